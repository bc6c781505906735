"""E10, gate entropy: how decided gates are at easy, medium and hard tokens."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import DIFFICULTY, MARKERS, at_least, difficulty_axis, difficulty_keys, dots, floats, step_axis, titled
from pnn.figures.style import INK, QUIET, styled, tint
from pnn.results import Json


@styled
def gate_entropy(found: Json) -> Figure:
    """At every step; the published panel shows the last one with the deviation over tokens."""
    figure, (by_step, last) = panels_and_strip(found, 2.9, (1.3, 1))
    steps = max((len(values) for values in found["entropy_by_step"].values()), default=1)
    for (name, colour), marker in zip(DIFFICULTY.items(), MARKERS, strict=False):
        if name in found["entropy_by_step"]:
            by_step.plot(
                range(1, steps + 1), floats(found["entropy_by_step"][name]), color=colour, marker=marker, ms=4.5, lw=1.6
            )
    by_step.axhline(np.log(2), color=QUIET, lw=0.9, ls="--")
    by_step.set(ylabel="binary entropy of gates (nats)")
    by_step.margins(y=0.12)
    at_least(by_step, 0.02)
    step_axis(by_step, 1, steps, "step")
    titled(by_step, "Entropy by step (dashed: ln 2)", difficulty_keys(found), 3)
    for index, (name, colour) in enumerate(DIFFICULTY.items()):
        published = found["published"][f"{name}_tokens"]
        if published["mean_entropy"] is None:
            continue
        spread = published["std_entropy"]
        last.errorbar(index + 0.18, published["mean_entropy"], spread, color=tint(colour, 0.5), marker="_", lw=0, elinewidth=3)
        dots(last, [index], [found["entropy"][name]], colour)
    last.axhline(np.log(2), color=QUIET, lw=0.9, ls="--")
    difficulty_axis(last, "nats")
    last.margins(y=0.12)
    at_least(last, 0.02)
    keys = [Line2D([], [], color=INK, marker="o", label="with interval")]
    keys.append(Line2D([], [], color=tint(INK, 0.5), lw=3, label="published: ± deviation"))
    titled(last, "At the last step", keys)
    return figure
