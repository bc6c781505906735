"""E1, "MEG": activity inside a step, one panel per quantity."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import BLUE, GREEN, ORANGE, PINK, from_zero, line, step_axis
from pnn.figures.style import INK, styled, tint
from pnn.results import Json

SERIES = {
    "attention_output": ("Attention's output", "mean |output|", BLUE),
    "delta_generation": ("δ generated (FFN output)", "mean |output|", GREEN),
    "gate_computation": ("Gate", "mean g", ORANGE),
    "hidden_update": ("Update of the state", "mean |Δ|", PINK),
}


@styled
def meg(found: Json) -> Figure:
    """Activity inside a step. Published: the same batch means, one batch after the other on one axis, as if they were steps."""
    series = {name: by_step for name, by_step in found["by_step"].items() if name in SERIES}
    columns = 2 if len(series) > 3 else len(series)
    keys = [Line2D([], [], color=INK, marker="o", ms=4.5, label="all tokens, with interval")]
    keys.append(Line2D([], [], color=tint(INK, 0.35), lw=0.8, label="batch by batch, as published"))
    figure, panels = panels_and_strip(found, 2.3, (1,) * columns, rows=-(-len(series) // columns), keys=keys)
    for axes, (name, by_step) in zip(panels, series.items(), strict=True):
        title, label, colour = SERIES[name]
        steps = np.arange(1, len(by_step) + 1)
        for batch in np.reshape(found["published"][name]["values"], (-1, len(by_step))):
            axes.plot(steps, batch, color=tint(colour, 0.35), lw=0.8, zorder=1)
        line(axes, steps, by_step, colour)
        axes.set(title=title, ylabel=label)
        from_zero(axes)
        step_axis(axes, 1, len(by_step), "step")
    return figure
