"""How training went and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from pnn.figures.style import INK, SMALL, WIDTH, colours, per_cent_axis, short_name, styled, tint
from pnn.numbers import count, short_count
from pnn.results import Json, Measured, median_speed

LOG_FROM = 8.0  # a loss that falls by more than this factor is drawn on a logarithmic axis


@styled
def training_curves(metrics: Mapping[str, Sequence[Json]], ceiling: float | None = None) -> Figure:
    """Loss of the last step (what a PNN and a BERT baseline have in common) and validation accuracy against updates."""
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    colour = colours(metrics)
    losses: list[float] = []
    for name, rows in metrics.items():
        steps, values = series(rows, "last_step_loss")
        smooth = running_mean(values)
        loss_axes.plot(steps, values, color=tint(colour[name], 0.3), lw=0.7, zorder=1)
        loss_axes.plot(steps, smooth, color=colour[name], lw=1.6)
        losses += [float(smooth.max()), float(smooth.min())] if len(smooth) else []
        steps, values = series(rows, "validation_accuracy")
        accuracy_axes.plot(steps, values, color=colour[name], lw=1.6, marker="o", ms=3.5)
    if losses and max(losses) > LOG_FROM * min(losses) > 0:
        _plain_log_axis(loss_axes)
    loss_axes.set(title="Training loss of the last step", ylabel="cross-entropy (nats)", xlabel="updates")
    accuracy_axes.set(title="Accuracy on held-out text", ylabel="masked tokens right (%)", xlabel="updates")
    keys = [Line2D([], [], color=colour[name], lw=2, label=short_name(name)) for name in metrics]
    if ceiling is not None:
        keys.append(Line2D([], [], color=INK, lw=1.2, ls=":", label="best possible accuracy"))
        accuracy_axes.axhline(ceiling, color=INK, lw=1.2, ls=":")
    per_cent_axis(accuracy_axes)
    for axes in (loss_axes, accuracy_axes):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
        axes.set_xlim(left=0)
    figure.legend(handles=keys, loc="outside upper center", ncols=min(len(keys), 4))
    return figure


def series(rows: Sequence[Json], key: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    points = [(row["step"], row[key]) for row in rows if key in row]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    return steps, values


def running_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over a fiftieth of the run to each side, or as far as there are values, so that the curve is as long as the run."""
    half = len(values) // 50
    totals = np.concatenate(([0.0], np.cumsum(values)))
    at = np.arange(len(values))
    start, stop = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    mean: NDArray[np.float64] = (totals[stop] - totals[start]) / (stop - start)
    return mean


def _plain_log_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


@styled
def speed(evaluations: Mapping[str, Measured], metrics: Mapping[str, Sequence[Json]]) -> Figure:
    """Parameters and training speed of each run, as bars from zero."""
    names = list(evaluations)
    speeds = {name: median_speed(metrics[name]) or 0.0 for name in names}
    sizes = {name: float(evaluations[name]["parameters"]) for name in names}
    figure = Figure(figsize=(WIDTH, 0.75 + 0.36 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, "Parameters", sizes)
    _bars(right, "Training speed (tokens per second)", speeds)
    left.set_yticks(range(len(names)), [short_name(name) for name in names])
    left.invert_yaxis()
    return figure


def _bars(axes: Axes, title: str, values: Mapping[str, float]) -> None:
    colour = colours(values)
    axes.set_title(title)
    axes.grid(False)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0, 1.25 * (max(values.values()) or 1.0))
    for place, (name, value) in enumerate(values.items()):
        axes.barh(place, value, height=0.62, color=colour[name])
        axes.annotate(short_count(value), (value, place), (4, 0), textcoords="offset points", va="center", fontsize=SMALL)
