"""What do gates do? The four panels of the paper's Figure 3, and the same split by kind of token, which it pools."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D

from pnn.figures.findings import write_verdicts
from pnn.figures.marks import (
    BLUE,
    CONTROL,
    MARKERS,
    PALE,
    TOKEN,
    Array,
    at_least,
    estimates,
    from_zero,
    line,
    shades,
    step_axis,
    titled,
)
from pnn.figures.style import INK, QUIET, SMALL, WIDTH, per_cent_axis, styled
from pnn.numbers import count
from pnn.results import Json

MOST_DIMENSIONS = 100  # as published; a narrower model shows all


@styled
def gates(result: Json) -> Figure:
    steps = result["num_steps"]
    figure = Figure(figsize=(WIDTH, 10.0 + 0.06 * steps), layout="constrained")
    grid = GridSpec(4, 6, figure, height_ratios=(1, 0.5 + 0.03 * steps, 1, 1))
    _means(figure.add_subplot(grid[0, :2]), result)
    _open(figure.add_subplot(grid[0, 2:4]), result)
    _spread(figure.add_subplot(grid[0, 4:]), result)
    _dimensions(figure, figure.add_subplot(grid[1, :]), result)
    _pooled(figure.add_subplot(grid[2, :3]), result)
    _by_kind(figure.add_subplot(grid[2, 3:]), result)
    first = figure.add_subplot(grid[3, :2])
    columns = [first, *(figure.add_subplot(grid[3, 2 * i : 2 * i + 2], sharex=first, sharey=first) for i in (1, 2))]
    for axes, kind in zip(columns, TOKEN, strict=True):
        _of_kind(axes, result, kind)
    first.set_ylabel("share of the kind's tokens (%)")
    from_zero(first)
    keys = [Line2D([], [], color=shade, lw=2, label=f"step {t}") for t, shade in enumerate(shades(steps), 1)]
    keys.append(Line2D([], [], color=CONTROL, marker="o", ms=4, mfc="white", ls=(0, (4, 2)), label="model untrained"))
    figure.legend(handles=keys, loc="outside upper center", ncols=min(steps + 1, 6))
    write_verdicts(figure, result["findings"])
    return figure


def _means(axes: Axes, result: Json) -> None:
    steps = np.arange(1, result["num_steps"] + 1)
    values, _ = estimates(result["mean_by_step"])
    axes.errorbar(steps, values, result["deviation_by_step"], color=BLUE, marker="o", ms=4.5, lw=1.6, elinewidth=1, capsize=3)
    axes.axhline(0.5, color=QUIET, lw=0.9, ls="--")
    axes.set(ylabel="gate", ylim=(0, 1))
    titled(axes, "Mean ± deviation of all gates")
    step_axis(axes, 1, result["num_steps"])


def _open(axes: Axes, result: Json) -> None:
    steps = np.arange(1, result["num_steps"] + 1)
    line(axes, steps, result["open_by_step"], BLUE)
    line(axes, steps, result["untrained_open_by_step"], CONTROL, **PALE)
    axes.axhline(0.5, color=QUIET, lw=0.9, ls="--")
    axes.margins(y=0.2)
    at_least(axes, 0.05)
    per_cent_axis(axes)
    step_axis(axes, 1, result["num_steps"])
    titled(axes, "Gates above 0.5 (%)")


def _spread(axes: Axes, result: Json) -> None:
    """How selective gates are. Results of before this was the measure have no spread of the untrained model."""
    steps = np.arange(1, result["num_steps"] + 1)
    line(axes, steps, result["spread_within_token_by_step"], BLUE)
    if "untrained_spread_within_token_by_step" in result:
        line(axes, steps, result["untrained_spread_within_token_by_step"], CONTROL, **PALE)
    from_zero(axes)
    axes.margins(y=0.2)
    step_axis(axes, 1, result["num_steps"])
    titled(axes, "Spread within a token")


def _dimensions(figure: Figure, axes: Axes, result: Json) -> None:
    """The published range, 0 to 1, with 0.5 in white: differences between dimensions look as small as they are."""
    means = np.array(result["dimension_means"])
    width = means.shape[1]
    shown = means[:, :MOST_DIMENSIONS]
    picture = axes.imshow(shown, aspect="auto", cmap="PuOr_r", vmin=0, vmax=1, interpolation="nearest")
    which = f"all {width}" if shown.shape[1] == width else f"the first {shown.shape[1]} of {width}"
    low, high = means.min(), means.max()
    axes.set(title=f"Mean gate of {which} dimensions ({low:.2f} to {high:.2f})", xlabel="dimension", ylabel="step")
    every = 1 if len(means) <= 8 else 2
    axes.set_yticks(range(0, len(means), every), [str(t + 1) for t in range(0, len(means), every)])
    axes.grid(False)
    bar = figure.colorbar(picture, ax=axes, pad=0.01, aspect=12)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=SMALL)


def _pooled(axes: Axes, result: Json) -> None:
    counts = np.sum([result["token_mean_histogram"][kind] for kind in TOKEN], axis=0)
    _histograms(axes, counts / max(result["tokens"], 1), _extent(result))
    from_zero(axes)
    axes.set(ylabel="share of tokens (%)", xlabel="mean gate")
    titled(axes, f"Token means, all {count(result['tokens'])} tokens pooled")


def _by_kind(axes: Axes, result: Json) -> None:
    steps = np.arange(1, result["num_steps"] + 1)
    found = {kind: values for kind, values in result["mean_by_kind_and_step"].items() if kind in TOKEN}
    for (kind, values), marker in zip(found.items(), MARKERS, strict=False):
        axes.plot(steps, values, color=TOKEN[kind], marker=marker, ms=4.5, lw=1.6)
    axes.axhline(0.5, color=QUIET, lw=0.9, ls="--")
    axes.set(ylabel="mean gate")
    axes.margins(y=0.2)
    at_least(axes, 0.05)
    step_axis(axes, 1, result["num_steps"])
    marks = zip(found, MARKERS, strict=False)
    keys = [Line2D([], [], color=TOKEN[kind], marker=marker, ms=4.5, label=kind) for kind, marker in marks]
    titled(axes, "The same means by kind of token", keys)


def _of_kind(axes: Axes, result: Json, kind: str) -> None:
    number = result["tokens_by_kind"][kind]
    _histograms(axes, np.array(result["token_mean_histogram"][kind]) / max(number, 1), _extent(result))
    axes.set(xlabel="mean gate")
    axes.set_title(f"{kind}: {count(number)} tokens", color=TOKEN[kind])


def _extent(result: Json) -> tuple[float, float]:
    """Where there are token means at all, and 0.3 to 0.7 at least."""
    counts = np.sum([result["token_mean_histogram"][kind] for kind in TOKEN], axis=(0, 1))
    used, width = np.flatnonzero(counts), 1 / len(counts)
    return min(0.3, width * used[0]), max(0.7, width * (used[-1] + 1))


def _histograms(axes: Axes, shares: Array, extent: tuple[float, float]) -> None:
    """One outline per step; the last one filled faintly, so that it is found again."""
    edges = np.linspace(0, 1, shares.shape[1] + 1)
    colours = shades(len(shares))
    axes.stairs(shares[-1], edges, fill=True, color=colours[-1], alpha=0.12)
    for row, colour in zip(shares, colours, strict=True):
        axes.stairs(row, edges, color=colour, lw=1.3)
    axes.set_xlim(*extent)
    axes.axvline(0.5, color=INK, lw=0.7, ls="--")
    per_cent_axis(axes)
