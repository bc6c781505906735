"""How useful units of all kinds are.

In one currency, an estimate of what leaving a unit out costs in loss per token, so that all kinds and layers can be compared:

    fisher         ½ Σ over rows of (∂(row's loss)/∂g)² / targets   at g = 1, g the unit's gate: second order, with the Fisher
                                                                   matrix for the Hessian. The estimates of units that work
                                                                   independently add up, so a group's is the sum of its units'
    contribution   loss without the unit − loss                     exact leave-one-out, a pass over the text for each unit
    gradient       Σ over rows of |∂(row's loss)/∂g| / targets      first order, row by row; within one kind. Absolute values of
                                                                   many small slopes do not cancel as the slopes do: of
                                                                   stories15M the neurons of a layer add up to ten times its
                                                                   heads, and a budget shared out by it takes nearly all heads

By what reaches the state through one matrix, y = x W, to compare units that share it:

    surgeon        ‖X W − X̃ W'‖², the error that is left without the unit when the rest has taken over (`repair`), in closed
                   form: tr(W_uᵀ ([(XᵀX + λI)⁻¹]_uu)⁻¹ W_u), for a neuron ‖w_u‖² / [(XᵀX + λI)⁻¹]_uu
    wanda          Σ over the unit's columns j and all outputs i of |W_ij| · ‖x_j‖
    magnitude      ‖W_u‖
    random         uniform in [0, 1), by seed; for all kinds

fisher and gradient need one forward and one backward pass over the calibration text for all kinds together, surgeon and wanda a
forward pass. Gates say little of whole layers, which are no small change: layers are left out one by one instead, a pass each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pnn.errors import UserError, did_you_mean
from pnn.models.precision import undisturbed
from pnn.plasticity.architectures import HEAD, KINDS, LAYER, NEURON, WIDTH
from pnn.plasticity.matrices import Projection
from pnn.plasticity.repair import RIDGE, input_major, listen, outputs, run
from pnn.plasticity.scores import Batch, gate_slopes, left_out, prepared
from pnn.plasticity.units import Gates, UnitScores, open_gates, unit_map

OF_MATRICES = ("surgeon", "wanda", "magnitude")
Batches = Sequence[dict[str, Any]]


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
        raise UserError(f"unknown score of units {method!r}{did_you_mean(method, UNIT_METHODS)}")
    if method in OF_MATRICES and (wide := [kind for kind in (LAYER, WIDTH) if kind in kinds]):
        raise UserError(f"{method} scores one matrix, but a {wide[0]} has several: score it by fisher or contribution")
    ready = [prepared(model, batch) for batch in batches or ()]
    if not ready and method not in ("magnitude", "random"):
        raise UserError(f"scoring units by {method} needs batches of text")
    with undisturbed(model):
        found = UNIT_METHODS[method](model, ready, kinds, seed)
    nothing = torch.zeros(0, dtype=torch.float64)
    rows = {kind: range(len(unit_map(model, kind))) for kind in kinds}
    scores = UnitScores({kind: [found.get((kind, layer), nothing) for layer in rows[kind]] for kind in kinds})
    scores.check(model)
    return scores


# By the loss ----------------------------------------------------------------------------------------------------------


def _by_slopes(model: PreTrainedModel, batches: Batches, kinds: Sequence[str], power: int) -> Gates:
    inside = [kind for kind in (HEAD, NEURON, WIDTH) if kind in kinds]
    found = gate_slopes(model, batches, inside, power) if inside else {}
    return found | (left_out(model, batches, (LAYER,)) if LAYER in kinds else {})


def _fisher(model: PreTrainedModel, batches: Batches, kinds: Sequence[str], seed: int) -> Gates:
    found = _by_slopes(model, batches, kinds, power=2)
    return {at: values if at[0] == LAYER else values / 2 for at, values in found.items()}


def _gradient(model: PreTrainedModel, batches: Batches, kinds: Sequence[str], seed: int) -> Gates:
    return _by_slopes(model, batches, kinds, power=1)


def _contribution(model: PreTrainedModel, batches: Batches, kinds: Sequence[str], seed: int) -> Gates:
    return left_out(model, batches, kinds)


def _random(model: PreTrainedModel, batches: Batches, kinds: Sequence[str], seed: int) -> Gates:
    draw = torch.Generator().manual_seed(seed)
    return {at: torch.rand(len(gate), generator=draw, dtype=torch.float64) for at, gate in open_gates(model, kinds).items()}


# By one matrix --------------------------------------------------------------------------------------------------------


def grams(model: PreTrainedModel, batches: Batches, parts: Mapping[tuple[str, int], Projection]) -> Gates:
    """XᵀX of what each of these matrices reads, over all tokens: one pass over the text."""
    found = {at: torch.zeros(part.weight.shape[part.dim], 1, dtype=torch.float64) for at, part in parts.items()}

    def add(at: tuple[str, int], x: Tensor) -> None:
        found[at] = found[at].to(x.device) + (x.T @ x).double()

    for batch in batches:
        with ExitStack() as stack:
            for at, part in parts.items():
                stack.callback(listen(part, batch.get("attention_mask"), partial(add, at)).remove)
            run(model, batch)
    return found


def _of_matrices(rule: Callable[[Projection, Tensor], Tensor]) -> UnitMethod:
    """`rule`: a projection and XᵀX of what it reads → a number for each of its units."""

    def measure(model: PreTrainedModel, batches: Batches, kinds: Sequence[str], seed: int) -> Gates:
        parts = {at: part for at, part in outputs(model).items() if at[0] in kinds}
        seen = grams(model, batches, parts)
        return {at: rule(part, seen[at]).double().cpu() for at, part in parts.items()}

    return measure


def _surgeon(part: Projection, gram: Tensor) -> Tensor:
    weight = input_major(part).double().unflatten(0, (part.count, part.width))
    pulled = gram + RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(pulled)).unflatten(0, (part.count, part.width))
    units = torch.arange(part.count)
    blocks = inverse.unflatten(2, (part.count, part.width))[units, :, units]  # [(XᵀX + λI)⁻¹]_uu
    return (weight * torch.linalg.solve(blocks, weight)).sum((1, 2))


def _wanda(part: Projection, gram: Tensor) -> Tensor:
    return _by_unit(part, input_major(part).abs().sum(1) * gram.diagonal().clamp(min=0).sqrt())


def _magnitude(part: Projection, gram: Tensor) -> Tensor:
    return _by_unit(part, input_major(part).square().sum(1)).sqrt()


def _by_unit(part: Projection, columns: Tensor) -> Tensor:
    return columns.view(part.count, part.width).sum(1)


UnitMethod = Callable[[PreTrainedModel, Batches, Sequence[str], int], Gates]
UNIT_METHODS: dict[str, UnitMethod] = {
    "fisher": _fisher,
    "gradient": _gradient,
    "contribution": _contribution,
    "surgeon": _of_matrices(_surgeon),
    "wanda": _of_matrices(_wanda),
    "magnitude": _of_matrices(_magnitude),
    "random": _random,
}
