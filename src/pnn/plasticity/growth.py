"""Growing heads and neurons: where, and what they start as.

A caller names the places of new neurons. Those of heads can be chosen: they are the places of removed heads, and on request new
ones beyond the original number. Which of them grow:

    gradient      add every candidate on trial, at a hundredth of its output; ‖∇W_Q‖ + ‖∇W_K‖ + ‖∇W_V‖ of each, highest first
    entropy_gap   mean ln(keys in sight) − mean entropy of the layer's heads: layers that look at few places, highest first
    balanced      the layer with the fewest heads, counted anew after each
    importance    the score that a removed head had before it went, most useful first
    random        by seed

Ties: fewer heads in the layer, counted anew, then (layer, index). A layer without heads takes part like any other; its entropy
counts as zero. The source's gap is ln S − H, which no causal head can reach: a row sees what stands before it, and the mean
over rows of ln(keys in sight) is what uniform attention has. Candidates of one layer differ in the gradient measure by their
random start only: it says which layer would use a head.

What a new head starts as (`init`); a neuron's rows of W_up (and W_gate) are started like W_Q, W_K, W_V, its column of W_down
like W_O:

    zero      W_Q, W_K, W_V as spread out as the layer's, biases 0, W_O = 0: the model computes what it did, to the last bit
              of rounding, and the unit learns, because W_O's gradient is not zero
    random    the same with W_O a tenth as spread out as the layer's: the model changes a little
    clone     queries, keys and values of its nearest neighbour, and both get half of the neighbour's W_O, with opposite small
              changes so that they part: the model computes what it did, to rounding
    revive    the weights that the unit had in the original model, W_O too: not a new one, the old one back

The source's own code sets all of W_O to 0.01, which adds the same number to every feature.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pnn.errors import UserError, did_you_mean
from pnn.models.precision import undisturbed
from pnn.plasticity.architectures import HEAD, NEURON, architecture_of
from pnn.plasticity.heads import Head, head_map, original_counts, room_for_heads, stretches
from pnn.plasticity.matrices import Stretch
from pnn.plasticity.scores import (
    Batch,
    Scores,
    attention_entropy,
    loss_gradients,
    prepared,
    share_of,
)
from pnn.plasticity.surgery import reorganised
from pnn.plasticity.units import Unit, UnitMap, check_places, check_units, gated, stretches_of, unit_map

M = TypeVar("M", bound=PreTrainedModel)
MOST = 2  # times the original number: as many heads or neurons as a layer may have
SMALL = 0.1  # how spread out a small start is, compared with weights of its kind
TRIAL = 0.01  # what a candidate's output is multiplied by while its gradient is taken


# Where ----------------------------------------------------------------------------------------------------------------


def candidates(model: PreTrainedModel, beyond: int = 0) -> list[Head]:
    """Places for new heads: those that were removed, and in every layer `beyond` more than the original number."""
    found = []
    rows = head_map(model)
    for layer, count in room_for_heads(model).items():
        row = rows[layer]
        new = [index for index in range(count, MOST * count) if index not in row][:beyond]
        found += [(layer, index) for index in range(count) if index not in row] + [(layer, index) for index in new]
    return found


def count_to_grow(total: int, ratio: float, room: int) -> int:
    """⌊ratio · total⌋, at least one and no more than there is room for. `total`: heads of the original model."""
    if not 0 < ratio <= 1:
        raise UserError(f"cannot grow {ratio} of the heads: expected a share above 0 and at most 1")
    if room == 0:
        raise UserError("there is no place to grow a head: none was removed (ask for some beyond the original number)")
    return min(room, max(1, share_of(total, ratio)))


def propose(
    model: PreTrainedModel,
    ratio: float,
    strategy: str = "gradient",
    batches: Iterable[Batch] | None = None,
    *,
    lost: Mapping[Head, float] | None = None,
    beyond: int = 0,
    seed: int = 0,
) -> list[Head]:
    """Where to grow ⌊ratio · N⌋ heads, N of the original model. `batches` serve gradient and entropy_gap; `lost`, scores from
    before pruning, serves importance."""
    if strategy not in STRATEGIES:
        raise UserError(f"unknown way to choose where heads grow: {strategy!r}{did_you_mean(strategy, STRATEGIES)}")
    places = candidates(model, beyond)
    count = count_to_grow(sum(original_counts(model)), ratio, len(places))
    ready = [prepared(model, batch) for batch in batches or ()]
    if not ready and strategy in ("gradient", "gradient_sensitivity", "entropy_gap"):
        raise UserError(f"choosing where heads grow by {strategy} needs batches of text")
    wishes = STRATEGIES[strategy](model, places, ready, lost, seed)
    return pick(wishes, count, [len(row) for row in head_map(model)])


def pick(wishes: Mapping[Head, float], count: int, sizes: Sequence[int]) -> list[Head]:
    """The `count` most wanted places, in the order of choice; ties go to the layer with fewer heads, then by (layer, index)."""
    left, now, chosen = dict(wishes), list(sizes), []
    for _ in range(count):
        best = min(left, key=lambda head: (-left[head], now[head[0]], head))
        del left[best]
        now[best[0]] += 1
        chosen.append(best)
    return chosen


def _gradient(
    model: PreTrainedModel, places: list[Head], batches: list[dict[str, Any]], lost: Mapping[Head, float] | None, seed: int
) -> dict[Head, float]:
    trial = grow(model, places, init="random", seed=seed)
    layers = head_map(trial)
    gates = {(HEAD, layer): torch.ones(len(layers[layer]), device=trial.device) for layer, _ in places}
    for layer, index in places:
        gates[HEAD, layer][layers[layer].index(index)] = TRIAL
    owned = {head: [one for one in stretches(trial, head) if one.role != "o" and one.parameter.dim() > 1] for head in places}
    trial.requires_grad_(False)
    weights = list({id(one.parameter): one.parameter for parts in owned.values() for one in parts}.values())
    for weight in weights:
        weight.requires_grad_(True)
    with undisturbed(trial), gated(trial, gates):
        slopes = dict(zip(map(id, weights), loss_gradients(trial, batches, weights), strict=True))
    return {head: sum(float(one.of(slopes[id(one.parameter)]).norm()) for one in parts) for head, parts in owned.items()}


def _entropy_gap(
    model: PreTrainedModel, places: list[Head], batches: list[dict[str, Any]], lost: Mapping[Head, float] | None, seed: int
) -> dict[Head, float]:
    with undisturbed(model):
        entropy, possible = attention_entropy(model, batches)
    means = {
        layer: sum(entropy[layer, index] for index in row) / len(row) if row else 0.0
        for layer, row in enumerate(head_map(model))
    }
    return {head: possible - means[head[0]] for head in places}


def _balanced(
    model: PreTrainedModel, places: list[Head], batches: list[dict[str, Any]], lost: Mapping[Head, float] | None, seed: int
) -> dict[Head, float]:
    return dict.fromkeys(places, 0.0)  # all alike: ties go to the layer with fewer heads


def _random(
    model: PreTrainedModel, places: list[Head], batches: list[dict[str, Any]], lost: Mapping[Head, float] | None, seed: int
) -> dict[Head, float]:
    draw = random.Random(seed)
    return {head: draw.random() for head in places}


def _importance(
    model: PreTrainedModel, places: list[Head], batches: list[dict[str, Any]], lost: Mapping[Head, float] | None, seed: int
) -> dict[Head, float]:
    if not lost:
        raise UserError("growing by importance needs the scores that removed heads had (lost=…)")
    useful = lost.usefulness() if isinstance(lost, Scores) else lost
    unknown = [head for head in places if head not in useful]
    # places beyond the original number never had a score: they come last
    return {head: useful[head] for head in places if head in useful} | dict.fromkeys(unknown, -float("inf"))


Strategy = Callable[[PreTrainedModel, list[Head], list[dict[str, Any]], Mapping[Head, float] | None, int], dict[Head, float]]
STRATEGIES: dict[str, Strategy] = {
    "gradient": _gradient,
    "gradient_sensitivity": _gradient,  # its name in the source
    "entropy_gap": _entropy_gap,
    "balanced": _balanced,
    "random": _random,
    "importance": _importance,
}


# What they start as ---------------------------------------------------------------------------------------------------


def grow(model: M, units: Iterable[Any], init: str = "zero", *, seed: int = 0, original: PreTrainedModel | None = None) -> M:
    """A larger copy of the model, with new heads and neurons in these places: (kind, layer, index) of units that were removed,
    or indices beyond the original number, up to twice as many; a pair (layer, index) is a head. Layers and width do not grow.
    `original`: the model as it was, for units that are revived."""
    if init not in INITS:
        raise UserError(f"unknown start of new heads {init!r}{did_you_mean(init, INITS)}")
    new = check_places(model, units, MOST)
    grown = reorganised(model, {kind: _map_with(model, kind, new) for kind in (HEAD, NEURON)})
    with torch.no_grad():
        if init == REVIVE:
            _revive(grown, new, original)
        else:
            STARTS[init](grown, new, model, torch.Generator().manual_seed(seed))
    return grown


def _map_with(model: PreTrainedModel, kind: str, new: Sequence[Unit]) -> UnitMap:
    rows = [set(row) for row in unit_map(model, kind)]
    for unit in new:
        if unit.kind == kind:
            rows[unit.layer].add(unit.index)
    return [sorted(row) for row in rows]


def start_inputs(owned: Iterable[Stretch], spread: Mapping[str, float], generator: torch.Generator) -> None:
    """Fill what a new unit, now zero, reads by. Its biases and what it writes by stay zero, so that the model computes what
    it did. Growth in training starts units here too."""
    for one in owned:
        if one.role != "o" and one.parameter.dim() > 1:
            _fill(one.view(), spread[one.role], generator)


def _start_at_zero(grown: PreTrainedModel, new: list[Unit], before: PreTrainedModel, generator: torch.Generator) -> None:
    spreads = _spreads(before, new)
    for unit, owned in stretches_of(grown, new).items():
        start_inputs(owned, spreads[unit.kind, unit.layer], generator)


def _start_small(grown: PreTrainedModel, new: list[Unit], before: PreTrainedModel, generator: torch.Generator) -> None:
    _start_at_zero(grown, new, before, generator)
    spreads = _spreads(before, new)
    for unit, owned in stretches_of(grown, new).items():
        for one in owned:
            if one.role == "o":
                _fill(one.view(), SMALL * spreads[unit.kind, unit.layer]["o"], generator)


def _start_as_clone(grown: PreTrainedModel, new: list[Unit], before: PreTrainedModel, generator: torch.Generator) -> None:
    maps = {kind: unit_map(before, kind) for kind in (HEAD, NEURON)}
    families: dict[Unit, list[Unit]] = {}
    for unit in new:
        kind, layer, index = unit
        if not maps[kind][layer]:
            raise UserError(f"layer {layer} has no {kind} to clone: start new ones there at zero")
        parent = Unit(kind, layer, min(maps[kind][layer], key=lambda other: (abs(other - index), other)))
        families.setdefault(parent, [parent]).append(unit)
    of = stretches_of(grown, [unit for family in families.values() for unit in family])
    for parent, family in families.items():
        originals = [(one, one.view().clone()) for one in of[parent]]
        for unit in family[1:]:
            for mine, (_, value) in zip(of[unit], originals, strict=True):
                mine.view().copy_(value)
        shares = [one for unit in family for one in of[unit] if one.role == "o"]
        whole = next(value for one, value in originals if one.role == "o")
        changes = torch.stack([_fill(torch.empty_like(whole), SMALL * float(whole.std()), generator) for _ in shares])
        for one, change in zip(shares, changes - changes.mean(0), strict=True):  # the changes add up to nothing
            one.view().copy_(whole / len(shares) + change)


Start = Callable[[PreTrainedModel, list[Unit], PreTrainedModel, torch.Generator], None]
STARTS: dict[str, Start] = {"zero": _start_at_zero, "random": _start_small, "clone": _start_as_clone}
REVIVE = "revive"
INITS = (*STARTS, REVIVE)


def _revive(grown: PreTrainedModel, new: list[Unit], original: PreTrainedModel | None) -> None:
    if original is None:
        raise UserError("reviving units needs the model that had them, which only a whole cycle has (original=…)")
    old = stretches_of(original, check_units(original, new))
    for unit, owned in stretches_of(grown, new).items():
        for mine, its in zip(owned, old[unit], strict=True):
            mine.view().copy_(its.view())


def _fill(target: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    return target.copy_(spread * torch.randn(target.shape, generator=generator))


def _spreads(before: PreTrainedModel, new: Iterable[Unit]) -> dict[tuple[str, int], dict[str, float]]:
    """For each kind and layer that grows: the standard deviation of each role's weights among the units that were there, in
    the nearest layer that has any."""
    architecture, found = architecture_of(before), {}
    for kind, layer in {(unit.kind, unit.layer) for unit in new}:
        near = min((at for at, row in enumerate(unit_map(before, kind)) if row), key=lambda at: (abs(at - layer), at))
        parts = architecture.parts(kind, architecture.blocks(before)[near])
        found[kind, layer] = {role: spread for part in parts for role, spread in part.spreads().items()}
    return found
