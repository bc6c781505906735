"""E3, "brain activity modelling": the published breadth of the mean state, and how many dimensions take part in an update."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import AMBER, BLUE, CONTROL, PALE, at_least, from_zero, line, step_axis, titled
from pnn.figures.style import INK, per_cent_axis, styled
from pnn.results import Json


@styled
def modeling(found: Json) -> Figure:
    """Published: spread of the mean state, which grows because states add up. Ours: how many dimensions take part in Δ."""
    figure, (published, ours) = panels_and_strip(found, 2.9)
    tested, steps = found["published"]["brain_hypothesis_test"], len(found["participation_by_step"])
    stages = ["embeddings", *(f"step_{t}" for t in range(steps))]
    for measure, colour, marker in (("breadth", BLUE, "o"), ("mean_activity", AMBER, "s")):
        published.plot([tested[f"{stage}_{measure}"] for stage in stages], color=colour, marker=marker, ms=4.5, lw=1.6)
    narrowest = tested["most_selective_step"]
    published.plot([narrowest + 1], [tested[f"step_{narrowest}_breadth"]], "o", ms=11, mfc="none", mec=INK, mew=1.2)
    published.set(ylabel="of the mean state")
    from_zero(published)
    step_axis(published, 0, steps, "after step")
    keys = [Line2D([], [], color=BLUE, marker="o", ms=4.5, label="breadth")]
    keys.append(Line2D([], [], color=AMBER, marker="s", ms=4.5, label="mean activity"))
    keys.append(Line2D([], [], color=INK, marker="o", ms=8, mfc="none", ls="none", label="narrowest step"))
    titled(published, "Published: breadth of the mean state", keys, 3)
    at = np.arange(1, steps + 1)
    line(ours, at, found["participation_by_step"], BLUE)
    line(ours, at, found["untrained_participation_by_step"], CONTROL, **PALE)
    ours.set(ylabel="share of dimensions (%)")
    ours.margins(y=0.15)
    at_least(ours, 0.02)
    per_cent_axis(ours)
    step_axis(ours, 1, steps, "step")
    keys = [Line2D([], [], color=BLUE, marker="o", ms=4.5, label="trained")]
    keys.append(Line2D([], [], color=CONTROL, marker="o", ms=4, mfc="white", ls=(0, (4, 2)), label="model untrained"))
    titled(ours, f"Ours: dimensions in Δ, permutation p = {found['permutation_p']:.3f}", keys)
    return figure
