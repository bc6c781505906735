"""One budget for all kinds: which units go, so that the model becomes so much smaller or so much faster.

Units go in portions: one head, a whole layer, or a group of a layer's neurons, the least useful first, so that what is left is
a multiple of 64 (less in small models), as matrix units like it. A portion has a worth, the sum of its units' scores, and a
price, what its absence saves: parameters, or microseconds measured on this machine. The portion with the least

    worth / price

goes first, until the prices add up to the budget. One that would save more than is still missing waits, and at the end the
smallest that is enough goes. A layer that goes takes its heads and neurons along, so its worth and its price count without
those that are gone already. Each layer that stays keeps a head and a group of neurons.

What a unit costs in time is measured by taking half of its kind out of every layer: the same for all units of a kind, which
leaves out that the first group of a large matrix may save more than the last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.numbers import per_cent, written
from pnn.plasticity.architectures import LAYER, NEURON
from pnn.plasticity.measure import reading_times
from pnn.plasticity.surgery import prune
from pnn.plasticity.units import Unit, UnitScores, parameters_of, unit_map

GROUP = 64  # neurons that go together
FEWEST_GROUPS = 8  # of a layer, or groups are smaller
Price = Callable[[str, int], float]  # of each unit of a kind in a layer


@dataclass(frozen=True)
class Portion:
    """What goes at once."""

    kind: str
    layer: int
    units: tuple[Unit, ...]
    worth: float
    price: float


def group_of(neurons: int) -> int:
    """How many of a layer's neurons go together: 64, or less by halves where a layer would have fewer than eight groups."""
    size = GROUP
    while size > 1 and neurons // size < FEWEST_GROUPS:
        size //= 2
    return size


def portions(model: PreTrainedModel, scores: UnitScores, price: Price) -> list[Portion]:
    """All that may go, with its worth and its price."""
    scores.check(model)
    found = []
    for kind in scores.kinds:
        rows = unit_map(model, kind)
        for layer, row in enumerate(rows):
            if row:
                values = scores.of[kind][layer]
                order = sorted(range(len(row)), key=lambda at, values=values: (float(values[at]), at))  # type: ignore[misc]
                for group in _groups(kind, order):
                    units = tuple(sorted(Unit(kind, layer, row[at]) for at in group))
                    worth = sum(float(values[at]) for at in group)
                    found.append(Portion(kind, layer, units, worth, len(units) * price(kind, layer)))
    return found


def _groups(kind: str, order: list[int]) -> list[list[int]]:
    """Positions of a layer, least useful first, cut into what goes together; the last group stays."""
    if kind == LAYER:
        return [order]
    size = group_of(len(order)) if kind == NEURON else 1
    first = len(order) % size or size
    return [order[:first], *(order[at : at + size] for at in range(first, len(order), size))][:-1]


# Sharing out ----------------------------------------------------------------------------------------------------------


class Choice:
    """Which portions go. A layer's price and worth are all it has, so portions inside a layer that goes count nothing."""

    def __init__(self, offered: Sequence[Portion], layers: int):
        self.offered = [portion for portion in offered if portion.price > 0]
        self.taken: list[Portion] = []
        self.layers = layers

    def gone_layers(self) -> set[int]:
        return {portion.layer for portion in self.taken if portion.kind == LAYER}

    def counted(self) -> list[Portion]:
        gone = self.gone_layers()
        return [portion for portion in self.taken if portion.kind == LAYER or portion.layer not in gone]

    def saved(self) -> float:
        return sum(portion.price for portion in self.counted())

    def rest_of(self, portion: Portion) -> tuple[float, float]:
        """Worth and price of a portion beyond what is gone already."""
        if portion.kind != LAYER:
            return portion.worth, portion.price
        inside = [one for one in self.taken if one.layer == portion.layer]
        return portion.worth - sum(one.worth for one in inside), portion.price - sum(one.price for one in inside)

    def next(self, missing: float) -> Portion | None:
        """The least worth for its price among what does not save more than is missing; where all do, what saves least."""
        gone, taken = self.gone_layers(), {id(one) for one in self.taken}
        one_left = len(gone) >= self.layers - 1
        offered = [
            one
            for one in self.offered
            if id(one) not in taken and one.layer not in gone and not (one_left and one.kind == LAYER)
        ]
        rests = [(*self.rest_of(one), one) for one in offered]
        rests = [(worth, price, one) for worth, price, one in rests if price > 0]
        fitting = [(worth / price, one.units, one) for worth, price, one in rests if price <= missing]
        if fitting:
            return min(fitting)[2]
        return min(((price, worth, one.units, one) for worth, price, one in rests), default=(None,))[-1]


def share_out(offered: Sequence[Portion], target: float, layers: int) -> tuple[list[Unit], float]:
    """The units to prune so that at least `target` is saved, in the unit of the prices, and what they save: less than that
    where all that may go is not enough. `layers`: how many the model has."""
    choice = Choice(offered, layers)
    while choice.saved() < target and (portion := choice.next(target - choice.saved())) is not None:
        choice.taken.append(portion)
    return sorted(unit for portion in choice.counted() for unit in portion.units), choice.saved()


# Parameters -----------------------------------------------------------------------------------------------------------


def fewer_parameters(model: PreTrainedModel, scores: UnitScores, share: float) -> list[Unit]:
    """The units whose absence makes the model smaller by this share of all its parameters, or a little more."""
    total = sum(parameter.numel() for parameter in model.parameters())
    offered = portions(model, scores, lambda kind, layer: parameters_of(model, kind, layer))
    chosen, saved = share_out(offered, share * total, _layers(model))
    if saved < share * total:
        raise UserError(
            f"−{written(100 * share, 0)} % of the parameters cannot go: {named(scores.kinds)} that may go hold "
            f"{per_cent(saved / total)} of them (embeddings stay, and a head and a group of neurons in each layer that stays)"
        )
    return chosen


def as_many(model: PreTrainedModel, gone: Sequence[Unit], scores: UnitScores) -> list[Unit]:
    """As many of each kind in each layer as these, but the least useful by other scores, which need to compare no more than
    what shares a matrix. Kinds without such a score stay as chosen."""
    numbers = Counter((unit.kind, unit.layer) for unit in gone if unit.kind in scores.of)
    chosen = [unit for unit in gone if unit.kind not in scores.of]
    for (kind, layer), number in numbers.items():
        row, order = unit_map(model, kind)[layer], scores.of[kind][layer].argsort(stable=True)
        chosen += [Unit(kind, layer, row[at]) for at in order[:number].tolist()]
    return sorted(chosen)


def most_fewer(model: PreTrainedModel, kinds: Sequence[str], share: float) -> None:
    """Say now if these kinds cannot give this share, before anything is scored."""
    nothing = {kind: [torch.zeros(len(row)) for row in unit_map(model, kind)] for kind in kinds}
    fewer_parameters(model, UnitScores(nothing), share)


def named(kinds: Sequence[str]) -> str:
    words = [f"{kind}s" for kind in kinds]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _layers(model: PreTrainedModel) -> int:
    return sum(map(len, unit_map(model, LAYER)))


# Time -----------------------------------------------------------------------------------------------------------------


def measured_prices(model: PreTrainedModel, kinds: Sequence[str], length: int) -> tuple[float, dict[str, float]]:
    """Microseconds that reading a batch takes, and those that a unit of each kind takes of them."""
    cut = {kind: half for kind in kinds if (half := _half(model, kind))}
    times = reading_times({"": model} | {kind: prune(model, units) for kind, units in cut.items()}, length)
    prices = {kind: (times[""] - times[kind]) / len(units) for kind, units in cut.items()}
    return times[""], prices | dict.fromkeys(set(kinds) - set(cut), 0.0)


def _half(model: PreTrainedModel, kind: str) -> list[Unit]:
    rows = unit_map(model, kind)
    if kind == LAYER:
        there = [layer for layer, row in enumerate(rows) if row]
        return [Unit(LAYER, layer, 0) for layer in there[: len(there) // 2]]
    return [Unit(kind, layer, index) for layer, row in enumerate(rows) for index in row[: len(row) // 2]]


TRIES = 4  # of a model that is as fast as asked: what units save together is not quite what they save alone
CLOSE = 0.02  # enough of the way to the speed that was asked for


def faster(model: PreTrainedModel, scores: UnitScores, times: float, length: int) -> list[Unit]:
    """The units without which the model reads so many times as fast, as measured here and now."""
    now, prices = measured_prices(model, scores.kinds, length)
    offered = portions(model, scores, lambda kind, layer: max(0.0, prices[kind]))
    wanted = now * (1 - 1 / times)
    target, best, best_speed, all_gone = wanted, list[Unit](), 1.0, False
    for _ in range(TRIES):
        chosen, promised = share_out(offered, target, _layers(model))
        all_gone = promised < target
        found = reading_times({"": model, "pruned": prune(model, chosen)}, length)
        speed = found[""] / found["pruned"]
        if abs(math.log(speed / times)) < abs(math.log(best_speed / times)):
            best, best_speed = chosen, speed
        if abs(speed / times - 1) < CLOSE or (all_gone and speed < times):
            break
        saved = found[""] - found["pruned"]
        target *= min(2.0, max(0.5, found[""] * (1 - 1 / times) / saved)) if saved > 0 else 2.0
    if not best or (all_gone and best_speed < times * (1 - CLOSE)):
        raise UserError(
            f"--speed {times:g}: without all the {named(scores.kinds)} that may go the model reads {best_speed:.2f} times as "
            "fast on this machine (embeddings, norms and what each layer keeps stay)"
        )
    return best
