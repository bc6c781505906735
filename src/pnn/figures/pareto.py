"""Accuracy against what it costs, one panel per cost. The budgets of one model are joined; runs of an older recipe are grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from pnn.figures.marks import CONTROL, MARKERS, dots, line
from pnn.figures.style import WIDTH, colours, per_cent_axis, styled
from pnn.results import EstimateJson

COLUMNS = 3
OLD = {"PNN": "o", "BERT": "s"}  # the families of the older runs, and their markers


class Point(NamedTuple):
    """One model after one budget. In the panel of a cost that was not measured it has no place."""

    model: str
    accuracy: EstimateJson
    costs: Mapping[str, float | None]


@styled
def pareto(points: Sequence[Point], old: Sequence[Point], costs: Mapping[str, str]) -> Figure:
    """`costs`: the label of each cost's axis. The keys stand where a further panel would be."""
    models = list(dict.fromkeys(point.model for point in points))
    colour, marker = colours(models), dict(zip(models, MARKERS, strict=False))
    rows = len(costs) // COLUMNS + 1
    figure = Figure(figsize=(WIDTH, 2.6 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, sharey=True, squeeze=False).ravel()
    for axes, (cost, label) in zip(panels, costs.items(), strict=False):
        placed = [point for point in [*old, *points] if point.costs.get(cost) is not None]
        for family, shape in OLD.items():
            at, values = _of(family, [point for point in placed if point in old], cost)
            dots(axes, at, values, CONTROL, marker=shape, ms=4, mfc="white", elinewidth=0.0, capsize=0)
        for model in reversed(models):  # the first lies on top
            at, values = _of(model, [point for point in placed if point in points], cost)
            line(axes, at, values, colour[model], marker=marker[model], lw=1.0)
        axes.set_xlabel(label)
        _logarithmic(axes, [point.costs[cost] or 0.0 for point in placed])
    for axes in panels[len(costs) :]:
        axes.set_axis_off()
    for axes in panels[: len(costs) : COLUMNS]:
        axes.set_ylabel("masked tokens right, %")
    per_cent_axis(panels[0])
    keys = [Line2D([], [], color=colour[model], marker=marker[model], ms=4.5, lw=1.0, label=model) for model in models]
    for family, shape in OLD.items():
        keys.append(Line2D([], [], color=CONTROL, marker=shape, ms=4, mfc="white", ls="none", label=f"{family}, old recipe"))
    panels[len(costs)].legend(handles=keys, loc="center left", labelspacing=0.9)
    return figure


def _of(model: str, points: Sequence[Point], cost: str) -> tuple[list[float], list[EstimateJson]]:
    """Where a model's points are, in the order of their accuracy: a cost that all budgets share gives a vertical line."""
    mine = sorted((point for point in points if point.model == model), key=lambda point: point.accuracy["value"] or 0.0)
    return [point.costs[cost] or 0.0 for point in mine], [point.accuracy for point in mine]


def _logarithmic(axes: Axes, places: Sequence[float]) -> None:
    """A few round numbers, whatever the range."""
    if not places:
        axes.text(0.5, 0.5, "not measured yet", transform=axes.transAxes, ha="center", color=CONTROL)
        axes.set_xticks([])
        return
    low, high = min(places) / 1.3, max(places) * 1.3
    steps = (1, 2, 3, 5, 7) if high / low < 8 else (1, 3)
    ticks = [step * 10.0**power for power in range(-3, 10) for step in steps if low <= step * 10.0**power <= high]
    axes.set(xscale="log", xlim=(low, high))
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
