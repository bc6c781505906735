"""How useful units of all kinds are, in one currency: an estimate of what leaving a unit out costs in loss per token.

    fisher     ½ Σ over rows of (∂(row's loss)/∂g)² / targets      at g = 1, g the unit's gate: second order, with the Fisher
                                                                  matrix for the Hessian. The estimates of units that work
                                                                  independently add up, so a group's is the sum of its units'
    gradient   Σ over rows of |∂(row's loss)/∂g| / targets         first order, row by row
    random     uniform in [0, 1), by seed

Both need one forward and one backward pass over the calibration text, for all kinds together. Gates say little of whole layers,
which are no small change: layers are left out one by one instead, a pass each, unless the score is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from pnn.errors import UserError, did_you_mean
from pnn.plasticity.architectures import HEAD, KINDS, LAYER, NEURON
from pnn.plasticity.scores import Batch, gate_slopes, left_out, prepared, undisturbed
from pnn.plasticity.units import Gates, UnitScores, open_gates, unit_map


def score_units(
    model: PreTrainedModel,
    batches: Iterable[Batch] | None,
    method: str = "fisher",
    kinds: Sequence[str] = KINDS,
    *,
    seed: int = 0,
) -> UnitScores:
    """A score for every unit of these kinds, higher is more useful. `batches` are as for `score`."""
    if method not in UNIT_METHODS:
        raise UserError(f"no way to score units is called {method!r}{did_you_mean(method, UNIT_METHODS)}")
    ready = [prepared(model, batch) for batch in batches or ()]
    if not ready and method != "random":
        raise UserError(f"scoring units by {method} needs batches of text")
    with undisturbed(model):
        found = UNIT_METHODS[method](model, ready, kinds, seed)
    nothing = torch.zeros(0, dtype=torch.float64)
    layers = range(len(unit_map(model, LAYER)))
    scores = UnitScores({kind: [found.get((kind, layer), nothing) for layer in layers] for kind in kinds})
    scores.check(model)
    return scores


def _by_slopes(model: PreTrainedModel, batches: Sequence[dict[str, Any]], kinds: Sequence[str], power: int) -> Gates:
    inside = [kind for kind in (HEAD, NEURON) if kind in kinds]
    found = gate_slopes(model, batches, inside, power) if inside else {}
    return found | (left_out(model, batches, (LAYER,)) if LAYER in kinds else {})


def _fisher(model: PreTrainedModel, batches: Sequence[dict[str, Any]], kinds: Sequence[str], seed: int) -> Gates:
    found = _by_slopes(model, batches, kinds, power=2)
    return {at: values if at[0] == LAYER else values / 2 for at, values in found.items()}


def _gradient(model: PreTrainedModel, batches: Sequence[dict[str, Any]], kinds: Sequence[str], seed: int) -> Gates:
    return _by_slopes(model, batches, kinds, power=1)


def _random(model: PreTrainedModel, batches: Sequence[dict[str, Any]], kinds: Sequence[str], seed: int) -> Gates:
    draw = torch.Generator().manual_seed(seed)
    return {at: torch.rand(len(gate), generator=draw, dtype=torch.float64) for at, gate in open_gates(model, kinds).items()}


UnitMethod = Callable[[PreTrainedModel, Sequence[dict[str, Any]], Sequence[str], int], Gates]
UNIT_METHODS: dict[str, UnitMethod] = {"fisher": _fisher, "gradient": _gradient, "random": _random}
