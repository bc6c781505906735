"""Growing heads: where, and what they start as.

Places are those of removed heads, and on request new ones beyond the original number. Which of them grow:

    gradient      add every candidate on trial, at a hundredth of its output; ‖∇W_Q‖ + ‖∇W_K‖ + ‖∇W_V‖ of each, highest first
    entropy_gap   mean ln(keys in sight) − mean entropy of the layer's heads: layers that look at few places, highest first
    balanced      the layer with the fewest heads, counted anew after each
    importance    the score that a removed head had before it went, most useful first
    random        by seed

Ties: fewer heads in the layer, counted anew, then (layer, index). A layer without heads takes part like any other; its entropy
counts as zero. The source's gap is ln S − H, which no causal head can reach: a row sees what stands before it, and the mean
over rows of ln(keys in sight) is what uniform attention has. Candidates of one layer differ in the gradient measure by their
random start only: it says which layer would use a head.

What a new head starts as (`init`):

    zero      W_Q, W_K, W_V as spread out as the layer's, biases 0, W_O = 0: the model computes what it did, to the last bit
              of rounding, and the head learns, because W_O's gradient is not zero
    random    the same with W_O a tenth as spread out as the layer's: the model changes a little
    clone     queries, keys and values of its nearest neighbour, and both get half of the neighbour's W_O, with opposite small
              changes so that they part: the model computes what it did, to rounding
    revive    the weights that the head had in the original model, W_O too: not a new head, the old one back

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
from pnn.plasticity.architectures import HEAD
from pnn.plasticity.heads import (
    Head,
    check_absent,
    check_present,
    head_map,
    original_counts,
    room_for_heads,
    stretches,
)
from pnn.plasticity.scores import (
    Batch,
    Scores,
    attention_entropy,
    loss_gradients,
    prepared,
    share_of,
    undisturbed,
)
from pnn.plasticity.surgery import reorganised
from pnn.plasticity.units import gated

M = TypeVar("M", bound=PreTrainedModel)
MOST = 2  # times the original number of heads: as many as a layer may have
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


def grow(model: M, heads: Iterable[Head], init: str = "zero", *, seed: int = 0, original: PreTrainedModel | None = None) -> M:
    """A larger copy of the model, with new heads in these places: (layer, index) of removed heads, or indices beyond the
    original number, up to twice as many. `original`: the model as it was, for heads that are revived."""
    if init not in INITS:
        raise UserError(f"unknown start of new heads {init!r}{did_you_mean(init, INITS)}")
    new = check_absent(model, heads, MOST)
    old_map = head_map(model)
    new_map = [sorted({*row, *(i for at, i in new if at == layer)}) for layer, row in enumerate(old_map)]
    grown = reorganised(model, {HEAD: new_map})
    with torch.no_grad():
        if init == REVIVE:
            _revive(grown, new, original)
        else:
            STARTS[init](grown, new, old_map, torch.Generator().manual_seed(seed))
    return grown


def _start_at_zero(model: PreTrainedModel, new: list[Head], old_map: list[list[int]], generator: torch.Generator) -> None:
    for head in new:
        spread = _spread(model, head[0], old_map)
        for one in stretches(model, head):
            if one.role != "o" and one.parameter.dim() > 1:
                _fill(one.view(), spread[one.role], generator)


def _start_small(model: PreTrainedModel, new: list[Head], old_map: list[list[int]], generator: torch.Generator) -> None:
    _start_at_zero(model, new, old_map, generator)
    for head in new:
        spread = _spread(model, head[0], old_map)
        for one in stretches(model, head):
            if one.role == "o":
                _fill(one.view(), SMALL * spread["o"], generator)


def _start_as_clone(model: PreTrainedModel, new: list[Head], old_map: list[list[int]], generator: torch.Generator) -> None:
    families: dict[Head, list[Head]] = {}
    for layer, index in new:
        if not old_map[layer]:
            raise UserError(f"layer {layer} has no head to clone: start new ones there at zero")
        parent = min(old_map[layer], key=lambda other: (abs(other - index), other))
        families.setdefault((layer, parent), [(layer, parent)]).append((layer, index))
    for parent_head, family in families.items():
        originals = [(one, one.view().clone()) for one in stretches(model, parent_head)]
        for head in family[1:]:
            for mine, (_, value) in zip(stretches(model, head), originals, strict=True):
                mine.view().copy_(value)
        shares = [one for head in family for one in stretches(model, head) if one.role == "o"]
        whole = next(value for one, value in originals if one.role == "o")
        changes = torch.stack([_fill(torch.empty_like(whole), SMALL * float(whole.std()), generator) for _ in shares])
        for one, change in zip(shares, changes - changes.mean(0), strict=True):  # the changes add up to nothing
            one.view().copy_(whole / len(shares) + change)


Start = Callable[[PreTrainedModel, list[Head], list[list[int]], torch.Generator], None]
STARTS: dict[str, Start] = {"zero": _start_at_zero, "random": _start_small, "clone": _start_as_clone}
REVIVE = "revive"
INITS = (*STARTS, REVIVE)


def _revive(model: PreTrainedModel, new: list[Head], original: PreTrainedModel | None) -> None:
    if original is None:
        raise UserError("reviving heads needs the model that had them, which only a whole cycle has (original=…)")
    for head in check_present(original, new):
        for mine, old in zip(stretches(model, head), stretches(original, head), strict=True):
            mine.view().copy_(old.view())


def _fill(target: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    return target.copy_(spread * torch.randn(target.shape, generator=generator))


def _spread(model: PreTrainedModel, layer: int, old_map: list[list[int]]) -> dict[str, float]:
    """The standard deviation of each role's weights among the heads that were there, in the nearest layer that has any."""
    near = min((at for at, row in enumerate(old_map) if row), key=lambda at: (abs(at - layer), at))
    values: dict[str, list[Tensor]] = {}
    for index in old_map[near]:
        for one in stretches(model, (near, index)):
            if one.parameter.dim() > 1:
                values.setdefault(one.role, []).append(one.view().float().flatten())
    return {role: float(torch.cat(parts).std()) for role, parts in values.items()}
