"""One budget for all kinds: which units go, so that the model becomes so much smaller or so much faster.

Units go in portions: one head, a whole layer, or a group of a layer's neurons or of the width's dimensions, the least useful
first, so that what is left is a multiple of 64 (less in small models), as matrix units like it. A portion has a worth, the sum
of its units' scores, and a price, what its absence saves: parameters, or microseconds measured on this machine. The portion
with the least

    worth / price

goes first, until the prices add up to the budget. One that would save more than is still missing waits, and at the end the
smallest that is enough goes. A layer that goes takes its heads and neurons along, so its worth and its price count without
those that are gone already. Each layer that stays keeps a head and a group of neurons. Where a unit and a dimension of the
width both go, the numbers where they cross go once: each costs less when the other is gone.

What a unit costs in time is measured by taking half of its kind out of every layer: the same for all units of a kind, which
leaves out that the first group of a large matrix may save more than the last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.numbers import per_cent, several, written
from pnn.plasticity.architectures import LAYER, NEURON, WIDTH
from pnn.plasticity.measure import reading_times
from pnn.plasticity.surgery import prune
from pnn.plasticity.units import Unit, UnitScores, parameters_by_dimension, parameters_of, unit_map

GROUP = 64  # neurons or dimensions that go together
FEWEST_GROUPS = {NEURON: 8, WIDTH: 16}  # of a layer or the width, or groups are smaller: a dimension is dear
Price = Callable[[str, int], float]  # of each unit of a kind in a layer


@dataclass(frozen=True)
class Portion:
    """What goes at once."""

    kind: str
    layer: int
    units: tuple[Unit, ...]
    worth: float
    price: float
    crossing: float = 0.0  # what one dimension of the width holds of the price


def group_of(count: int, kind: str = NEURON) -> int:
    """How many of a layer's neurons, or of a model's dimensions, go together: 64, or less by halves where there would be fewer
    than eight groups of neurons or sixteen of dimensions."""
    size = GROUP
    while size > 1 and count // size < FEWEST_GROUPS[kind]:
        size //= 2
    return size


def portions(
    model: PreTrainedModel,
    scores: UnitScores,
    price: Price,
    crossing: Price | None = None,
    whole: PreTrainedModel | None = None,
) -> list[Portion]:
    """All that may go, with its worth and its price. `crossing`: how much of each unit's price a dimension of the width holds;
    asked for where the width may go. `whole`: the model before earlier rounds, which says how large groups are."""
    scores.check(model)
    found = []
    for kind in scores.kinds:
        rows, counts = unit_map(model, kind), [len(row) for row in unit_map(whole or model, kind)]
        crosses = None if kind == WIDTH or WIDTH not in scores.of else crossing
        for layer, row in enumerate(rows):
            if row:
                values = scores.of[kind][layer]
                order = sorted(range(len(row)), key=lambda at, values=values: (float(values[at]), at))  # type: ignore[misc]
                for group in _groups(kind, order, counts[layer]):
                    units = tuple(sorted(Unit(kind, layer, row[at]) for at in group))
                    worth = sum(float(values[at]) for at in group)
                    shared = len(units) * crosses(kind, layer) if crosses else 0.0
                    found.append(Portion(kind, layer, units, worth, len(units) * price(kind, layer), shared))
    return found


def _groups(kind: str, order: list[int], count: int) -> list[list[int]]:
    """Positions of a layer or of the width, least useful first, cut into what goes together; the last group stays. `count`: of
    the whole model."""
    if kind == LAYER:
        return [order]
    size = group_of(count, kind) if kind in FEWEST_GROUPS else 1
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

    def dimensions(self) -> int:
        """How many of the width are gone."""
        return sum(len(portion.units) for portion in self.taken if portion.kind == WIDTH)

    def counted(self) -> list[Portion]:
        gone = self.gone_layers()
        return [portion for portion in self.taken if portion.kind in (LAYER, WIDTH) or portion.layer not in gone]

    def saved(self) -> float:
        counted, thinner = self.counted(), self.dimensions()
        return sum(portion.price for portion in counted) - thinner * sum(portion.crossing for portion in counted)

    def rests(self, offered: Sequence[Portion]) -> list[tuple[float, float, Portion]]:
        """Worth and price of each beyond what is gone already."""
        thinner, crossed = self.dimensions(), sum(portion.crossing for portion in self.counted())
        inside: dict[int, list[Portion]] = {}
        for one in self.taken:
            if one.kind not in (LAYER, WIDTH):
                inside.setdefault(one.layer, []).append(one)
        found = []
        for portion in offered:
            parts = inside.get(portion.layer, []) if portion.kind == LAYER else []
            worth = portion.worth - sum(one.worth for one in parts)
            price = portion.price - sum(one.price for one in parts)
            price -= thinner * (portion.crossing - sum(one.crossing for one in parts))
            price -= crossed * len(portion.units) if portion.kind == WIDTH else 0.0
            found.append((worth, price, portion))
        return found

    def next(self, missing: float) -> Portion | None:
        """The least worth for its price among what does not save more than is missing; where all do, what saves least."""
        gone, taken = self.gone_layers(), {id(one) for one in self.taken}
        one_left = len(gone) >= self.layers - 1
        offered = [
            one
            for one in self.offered
            if id(one) not in taken and (one.kind == WIDTH or one.layer not in gone) and not (one_left and one.kind == LAYER)
        ]
        rests = [(worth, price, one) for worth, price, one in self.rests(offered) if price > 0]
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


def fewer_parameters(
    model: PreTrainedModel, scores: UnitScores, share: float, whole: PreTrainedModel | None = None
) -> list[Unit]:
    """The units whose absence makes the model smaller by this share of all its parameters, or a little more. `whole`: the model
    before earlier rounds."""
    total = sum(parameter.numel() for parameter in model.parameters())
    price, crossing = partial(parameters_of, model), partial(parameters_by_dimension, model)
    offered = portions(model, scores, price, crossing, whole)
    chosen, saved = share_out(offered, share * total, _layers(model))
    if saved < share * total:
        stays = "some of the width stays" if WIDTH in scores.of else "embeddings stay"
        raise UserError(
            f"−{written(100 * share, 0)} % of the parameters cannot go: {named(scores.kinds)} that may go hold "
            f"{per_cent(saved / total)} of them ({stays}, and a head and a group of neurons in each layer that stays)"
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
    words = [kind if kind == WIDTH else f"{kind}s" for kind in kinds]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def so_many(number: int, kind: str) -> str:
    return several(number, "dimension" if kind == WIDTH else kind)


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
    width = len(unit_map(model, WIDTH)[0]) if WIDTH in scores.of else 1
    # what is left of a unit's time is in proportion to the width that is left
    offered = portions(
        model, scores, lambda kind, layer: max(0.0, prices[kind]), lambda kind, layer: max(0.0, prices[kind]) / width
    )
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
            "fast on this machine (what each layer keeps stays, and all that is no such unit)"
        )
    return best
