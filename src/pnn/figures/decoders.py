"""How decoders learn: of single runs, and of several seeds of several variants at equal tokens, work and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pnn.figures.style import SMALL, WIDTH, colours, label_ends, short_name, styled, tint
from pnn.figures.training import running_mean, series
from pnn.numbers import count
from pnn.results import Json


@styled
def decoder_curves(metrics: Mapping[str, Sequence[Json]]) -> Figure:
    """Training and validation loss of each run against updates."""
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    training, validation = figure.subplots(1, 2)
    colour = colours(metrics)
    for name, rows in metrics.items():
        steps, values = series(rows, "loss")
        training.plot(steps, values, color=tint(colour[name], 0.3), lw=0.7, zorder=1)
        training.plot(steps, running_mean(values), color=colour[name], lw=1.6)
        steps, values = series(rows, "validation_loss")
        validation.plot(steps, values, color=colour[name], lw=1.6, marker="o", ms=3.5)
    for axes, title in ((training, "Training loss"), (validation, "Loss on held-out text")):
        axes.set(title=title, ylabel="nats per token", xlabel="updates")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
        axes.set_xlim(left=0)
    keys = [Line2D([], [], color=colour[name], lw=2, label=short_name(name)) for name in metrics]
    figure.legend(handles=keys, loc="outside upper center", ncols=min(len(keys), 4))
    return figure


class Curve(NamedTuple):
    """Validation loss of one run on its way; per token, the work in FLOPs and the time in seconds, which scale its axis."""

    tokens: Sequence[float]
    loss: Sequence[float]
    flops_per_token: float
    seconds_per_token: float


@styled
def matched_curves(curves: Mapping[str, Sequence[Curve]], start: float = 0.35) -> Figure:
    """Validation loss against tokens, FLOPs and wall clock, one colour per variant: seeds thin, their mean thick. Only the last
    part of training is drawn, from the share `start` on: differences are small beside what all variants learn at first."""
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    colour = colours(curves)
    kinds = (
        ("tokens", 1e6, "million tokens", lambda one: 1.0),
        ("work", 1e15, "PFLOP", lambda one: one.flops_per_token),
        ("time", 1.0, "seconds", lambda one: one.seconds_per_token),
    )
    lowest = highest = None
    ends: list[tuple[float, str, str]] = []
    for axes, (title, unit, label, per_token) in zip(panels, kinds, strict=True):
        for name, seeds in curves.items():
            for one in seeds:
                x, y = np.array(one.tokens) * per_token(one) / unit, np.array(one.loss)
                late = np.array(one.tokens) >= start * max(one.tokens)
                axes.plot(x[late], y[late], color=tint(colour[name], 0.45), lw=0.7)
                lowest = float(y[late].min()) if lowest is None else min(lowest, float(y[late].min()))
                highest = float(y[late].max()) if highest is None else max(highest, float(y[late].max()))
            if len({len(one.tokens) for one in seeds}) == 1:
                x = np.mean([np.array(one.tokens) * per_token(one) for one in seeds], 0) / unit
                y = np.mean([one.loss for one in seeds], 0)
                late = np.array(seeds[0].tokens) >= start * max(seeds[0].tokens)
                axes.plot(x[late], y[late], color=colour[name], lw=1.8)
                if axes is panels[-1]:
                    ends.append((float(y[-1]), f"{y[-1]:.3f}", colour[name]))
        axes.set(title=f"At equal {title}", xlabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value) if value >= 1000 else f"{value:g}"))
    panels[0].set_ylabel("held-out loss, nats per token")
    _fit(panels[0], lowest, highest)
    label_ends(panels[-1], ends)
    keys = [Line2D([], [], color=colour[name], lw=2, label=name) for name in curves]
    figure.legend(handles=keys, loc="outside upper center", ncols=3, fontsize=SMALL)
    return figure


def _fit(axes: Axes, lowest: float | None, highest: float | None) -> None:
    if lowest is not None and highest is not None and highest > lowest:
        axes.set_ylim(lowest - 0.03 * (highest - lowest), highest)
