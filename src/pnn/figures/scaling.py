"""How the cost of an update grows with tokens, width, steps and processes, beside the cost that FLOPs alone predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from pnn.errors import UserError
from pnn.figures.style import INK, QUIET, SMALL, WIDTH, colours, short_name, styled, tint
from pnn.numbers import short_count
from pnn.results import Json

# What is varied, the panel's title, and its place on the axis
PANELS: tuple[tuple[str, str, Callable[[Json], float]], ...] = (
    ("tokens", "Tokens of an update", lambda row: _tokens(row)),
    ("width", "Width of the model", lambda row: row["shapes"]["width"]),
    ("steps", "Refinement steps or layers", lambda row: row["shapes"]["steps"]),
    ("processes", "Processes", lambda row: row["processes"]),
)


@styled
def scaling(result: Json) -> Figure:
    """Milliseconds of an update against each, both axes logarithmic: a cost in proportion to FLOPs runs along the dashes."""
    rows = [row for row in result["rows"] if "varies" in row and "error" not in row]
    configs = list(dict.fromkeys(row["config"] for row in rows))
    if not rows:
        raise UserError("no row of this benchmark says how the cost scales: run pnn bench with --what scaling")
    figure = Figure(figsize=(WIDTH, 5.4), layout=ConstrainedLayoutEngine(h_pad=0.1))
    colour = colours(configs)
    panels = figure.subplots(2, 2)
    for axes in panels[:, 0]:
        axes.set_ylabel("milliseconds per update")
    for axes, (axis, title, place) in zip(panels.flat, PANELS, strict=True):
        ticks: set[float] = set()
        for config in configs:
            chosen = [row for row in rows if row["config"] == config and row["varies"] in _members(axis)]
            chosen.sort(key=place)
            if chosen:
                _draw(axes, [place(row) for row in chosen], chosen, colour[config])
                ticks |= {place(row) for row in chosen}
        _finish(axes, title, sorted(ticks))
    keys = [Line2D([], [], color=colour[name], marker="o", ms=4, lw=1.6, label=short_name(name)) for name in configs]
    keys.append(Line2D([], [], color=INK, lw=1.0, ls="--", label="in proportion to FLOPs"))
    figure.legend(handles=keys, loc="outside upper center", ncols=min(len(keys), 4))
    return figure


def _members(axis: str) -> tuple[str, ...]:
    return ("processes",) if axis == "processes" else ("base", axis)


def _tokens(row: Json) -> float:
    shapes = row["shapes"]
    return float(shapes["batch_tokens"] * shapes["micro_batches"] * row.get("processes", 1))


def _work(row: Json) -> float:
    """FLOPs of an update, of those that one process does."""
    return float(row["flops_per_token"]) * _tokens(row) / row.get("processes", 1)


def _draw(axes: Axes, places: Sequence[float], rows: Sequence[Json], colour: str) -> None:
    cost = [row["milliseconds_per_update"] for row in rows]
    speeds = [row["tokens_per_second"] for row in rows]
    spread = [
        [ms * (1 - speed["median"] / speed["high"]) for ms, speed in zip(cost, speeds, strict=True)],
        [ms * (speed["median"] / speed["low"] - 1) for ms, speed in zip(cost, speeds, strict=True)],
    ]
    origin = next((i for i, row in enumerate(rows) if row["varies"] == "base"), 0)  # one process where processes vary
    predicted = [cost[origin] * _work(row) / _work(rows[origin]) for row in rows]
    axes.plot(places, predicted, color=tint(colour, 0.6), lw=1.0, ls="--", zorder=1)
    axes.errorbar(places, cost, yerr=spread, color=colour, lw=1.6, marker="o", ms=4, capsize=2, elinewidth=0.8)


def _finish(axes: Axes, title: str, ticks: Sequence[float]) -> None:
    axes.set_title(title)
    if not ticks:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=QUIET, fontsize=SMALL)
        axes.set(xticks=[], yticks=[])
        return
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
