"""A study of the plasticity cycle, drawn from study.json alone: what pruning costs, what growth brings back and how fast, which
ratios do least harm, and what it is worth in speed. One column of panels per model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from pnn.figures.marks import AMBER, BLUE, CONTROL, GREEN, MARKERS, ORANGE, PINK, SKY, dots, estimates, line
from pnn.figures.style import INK, QUIET, SMALL, WIDTH, ink_on, short_name, styled
from pnn.numbers import written
from pnn.results import Json

COLUMNS = 2  # panels side by side
METHODS = {
    "gradient": BLUE,
    "contribution": GREEN,
    "combined": PINK,
    "magnitude": AMBER,
    "entropy": ORANGE,
    "random": CONTROL,
}
STRATEGIES = ("gradient", "entropy_gap", "balanced", "importance", "random", "none")
SPEEDS = {1.0: (CONTROL, 4.5), 3.0: (SKY, 2.7), 5.0: (BLUE, 1.0)}  # the later are thinner: where all agree, all are seen
HARM = LinearSegmentedColormap.from_list("harm", ["#e8f1f8", "#56a0cf", "#08306b"])


def panels(result: Json, height: float, legend: float = 0.0) -> tuple[Figure, list[tuple[str, Axes]]]:
    """One panel per model, two in a row."""
    names = list(result["models"])
    columns = min(COLUMNS, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(WIDTH, height * rows + legend), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in grid[len(names) :]:
        unused.set_visible(False)
    for name, axes in zip(names, grid, strict=False):
        axes.set_title(title_of(name, result["models"][name]))
    return figure, list(zip(names, grid, strict=False))


def title_of(name: str, model: Json) -> str:
    size = model["parameters"]
    return f"{short_name(name, 24)}, {size / 1e6:.0f}M" if size >= 1e6 else f"{short_name(name, 24)}, {size / 1e3:.0f}K"


def left_and_bottom(shown: Sequence[tuple[str, Axes]], below: str, beside: str) -> None:
    for place, (_, axes) in enumerate(shown):
        if place + COLUMNS >= len(shown):
            axes.set_xlabel(below)
        if place % COLUMNS == 0:
            axes.set_ylabel(beside)


def logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """A vertical axis of perplexities with a few round numbers on it, whatever its range."""
    axes.set_yscale("log")
    low, high = min(values), max(values)
    low, high = low / (high / low) ** 0.06, high * (high / low) ** 0.06
    if high / low < 1.02:
        low, high = low / 1.01, high * 1.01
    axes.set_ylim(low, high)
    steps = np.array([1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8])
    if high / low > 12:
        steps = np.array([1, 2, 5])
    if high / low > 300:
        steps = np.array([1])
    ticks = [tick for power in range(-1, 9) for tick in steps * 10.0**power if low <= tick <= high]
    if len(ticks) < 3:
        ticks = [tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


@styled
def pruning(result: Json) -> Figure:
    """Perplexity against the share of heads pruned: right after, and after as many updates as the control made."""
    figure, shown = panels(result, 2.7, 0.5)
    for name, axes in shown:
        rows, control = result["tables"][name]["pruning"], result["tables"][name]["control"]
        heights = [result["models"][name]["perplexity"], control["perplexity"]["value"]]
        for (method, colour), marker in zip(METHODS.items(), MARKERS, strict=True):
            mine = [row for row in rows if row["prune_by"] == method]
            at = [row["prune"] for row in mine]
            right_after = [row["perplexity_pruned"]["value"] for row in mine]
            axes.plot([0, *at], [heights[0], *right_after], color=colour, lw=1.0, ls=(0, (3, 2)), zorder=2)
            aside = [place + 0.006 * (list(METHODS).index(method) - 2.5) for place in at]  # whiskers side by side
            line(axes, aside, [row["perplexity"] for row in mine], colour, marker=marker, lw=1.4, ms=4, zorder=3)
            axes.plot([0, aside[0]], [heights[1], mine[0]["perplexity"]["value"]], color=colour, lw=1.4, zorder=3)
            heights += right_after + [row["perplexity"]["value"] for row in mine]
        axes.plot(0, control["perplexity"]["value"], "o", color=INK, ms=5, zorder=4)
        logarithmic(axes, heights)
        axes.set_xlim(-0.02, 0.53)
        axes.set_xticks([0, 0.1, 0.3, 0.5], ["0", "10", "30", "50"])
    left_and_bottom(shown, "heads pruned, per cent", "perplexity on held-out text")
    keys = [Line2D([], [], color=c, marker=m, ms=4, label=n) for (n, c), m in zip(METHODS.items(), MARKERS, strict=True)]
    keys.append(Line2D([], [], color=INK, lw=1, ls=(0, (3, 2)), label="right after pruning"))
    keys.append(Line2D([], [], color=INK, lw=0, marker="o", ms=5, label="retrained, unpruned"))
    figure.legend(handles=keys, loc="outside upper center", ncols=4)
    return figure


@styled
def growth(result: Json) -> Figure:
    """What is left of the original performance, PPL₀/PPL, after growing by each strategy; the retrained control as a line."""
    figure, shown = panels(result, 2.1, 0.35)
    for place, (name, axes) in enumerate(shown):
        table = result["tables"][name]
        rows = {row["grow_by"]: row for row in table["growth"]}
        for at, strategy in enumerate(STRATEGIES):
            values, reach = estimates([rows[strategy]["performance"]])
            colour = CONTROL if strategy in ("random", "none") else BLUE
            axes.errorbar(values, [at], xerr=reach, color=colour, marker="o", ms=5, ls="none", capsize=2.5, elinewidth=1.1)
        axes.axvline(table["control"]["performance"]["value"], color=INK, lw=1.0, ls=":")
        axes.set_ylim(len(STRATEGIES) - 0.5, -0.5)
        labels = [strategy.replace("_", " ") for strategy in STRATEGIES] if place % COLUMNS == 0 else []
        axes.set_yticks(range(len(STRATEGIES)), labels or [""] * len(STRATEGIES))
        axes.grid(axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}"))
    left_and_bottom(shown, "original performance kept, PPL₀/PPL in per cent", "grown by")
    keys = [
        Line2D([], [], color=BLUE, marker="o", lw=1.1, label="a strategy"),
        Line2D([], [], color=CONTROL, marker="o", lw=1.1, label="controls: at random, no growth"),
        Line2D([], [], color=INK, lw=1, ls=":", label="retrained, unpruned"),
    ]
    figure.legend(handles=keys, loc="outside upper center", ncols=3)
    return figure


@styled
def ratios(result: Json) -> Figure:
    """How far above the control's perplexity a cycle ends, by the shares pruned and grown."""
    figure, shown = panels(result, 2.5)
    every = [row["rise_over_control"]["value"] for name in result["models"] for row in result["tables"][name]["ratios"]]
    low, high = min(0.0, *every), max(0.05, *every)
    for place, (name, axes) in enumerate(shown):
        rows = result["tables"][name]["ratios"]
        gone, new = sorted({row["prune"] for row in rows}), sorted({row["grow"] for row in rows})
        rise = {(row["prune"], row["grow"]): row["rise_over_control"]["value"] for row in rows}
        values = np.array([[rise[share, back] for share in gone] for back in new])
        axes.imshow(values, cmap=HARM, vmin=low, vmax=high, aspect="auto", origin="lower")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                colour = ink_on(_hex((value - low) / (high - low)))
                axes.text(x, y, written(100 * value, 1, plus=True), ha="center", va="center", color=colour)
        axes.set_xticks(range(len(gone)), [f"{100 * share:g}" for share in gone])
        axes.set_yticks(range(len(new)), [f"{100 * share:g}" for share in new] if place % COLUMNS == 0 else [""] * len(new))
        axes.grid(False)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    left_and_bottom(shown, "heads pruned, per cent", "heads grown, per cent")
    figure.suptitle("Perplexity above that of the retrained, unpruned model, per cent", x=0.01, ha="left", fontsize=9)
    return figure


def _hex(share: float) -> str:
    red, green, blue, _ = HARM(min(1.0, max(0.0, share)))
    return f"#{int(255 * red):02x}{int(255 * green):02x}{int(255 * blue):02x}"


@styled
def multipliers(result: Json) -> Figure:
    """Held-out loss while learning, for new heads that learn 1, 3 and 5 times as fast: every seed, and their mean."""
    figure, shown = panels(result, 2.5, 0.35)
    for name, axes in shown:
        for row in result["tables"][name]["multipliers"]:
            (colour, width), curves = SPEEDS[row["multiplier"]], np.array(row["curves"])
            for curve in curves:
                axes.plot(curve[:, 0], curve[:, 1], color=colour, lw=0.6, alpha=0.45)
            axes.plot(curves[0, :, 0], curves[:, :, 1].mean(0), color=colour, lw=width)
        axes.axhline(result["models"][name]["loss"], color=INK, lw=0.8, ls=":")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    left_and_bottom(shown, "updates", "held-out loss, nats per token")
    keys = [Line2D([], [], color=c, lw=width, label=f"{factor:g} × the rate") for factor, (c, width) in SPEEDS.items()]
    keys.append(Line2D([], [], color=INK, lw=0.8, ls=":", label="before pruning"))
    figure.legend(handles=keys, loc="outside upper center", ncols=4)
    return figure


@styled
def pareto(result: Json) -> Figure:
    """Perplexity after learning against measured speed: pruned, pruned and grown, and the whole model."""
    figure, shown = panels(result, 2.9, 0.35)
    kinds = {"pruned": (ORANGE, "s"), "pruned and grown": (BLUE, "o"), "whole, retrained": (INK, "D")}
    for name, axes in shown:
        table = result["tables"][name]
        timed = result["speed"][name]["rows"][-1]
        heights = []
        pruned = [row for row in table["pruning"] if row["prune_by"] == "gradient"]
        groups = {"pruned": pruned, "pruned and grown": table["ratios"], "whole, retrained": [table["control"]]}
        for kind, rows in groups.items():
            colour, marker = kinds[kind]
            speeds = [timed["tokens_per_second"][row["arm"]] for row in rows]
            dots(axes, speeds, [row["perplexity"] for row in rows], colour, marker=marker, ms=5, elinewidth=0.7, capsize=1.5)
            heights += [end for row in rows for end in (row["perplexity"]["value"], *row["perplexity"]["interval"]) if end]
            for speed, row in zip(speeds, rows, strict=True):
                if kind == "pruned":  # below its own interval, where nothing else is
                    found = row["perplexity"]
                    place = (speed, found["interval"][0] or found["value"])
                    label = axes.annotate(f"−{100 * row['prune']:g} %", place, (0, -3), textcoords="offset points")
                    label.set(fontsize=SMALL, color=QUIET, ha="center", va="top")
        room = (max(heights) / min(heights)) ** 0.05  # for the lowest label
        logarithmic(axes, [*heights, min(heights) / room])
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:,.4g}"))
        axes.margins(x=0.16)
    shape = result["speed"][next(iter(result["models"]))]["rows"][-1]
    size = f"{shape['batch']} × {shape['length']}"
    left_and_bottom(shown, f"thousand tokens read per second, {size}", "perplexity on held-out text")
    keys = [Line2D([], [], color=c, marker=m, ls="none", label=kind) for kind, (c, m) in kinds.items()]
    figure.legend(handles=keys, loc="outside upper center", ncols=3)
    return figure


STUDY_FIGURES: dict[str, Callable[[Json], Figure]] = {
    "pruning": pruning,
    "growth": growth,
    "ratios": ratios,
    "multipliers": multipliers,
    "pareto": pareto,
}
