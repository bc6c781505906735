"""E4, dimension by dimension: how many have each role, and their paths."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import BLUE, CONTROL, GREEN, ORANGE, from_zero, step_axis, titled
from pnn.figures.style import INK, SMALL, styled, tint
from pnn.numbers import count
from pnn.results import Json

ROLES = {"accumulator": BLUE, "selector": ORANGE, "oscillator": GREEN, "stable": CONTROL}


@styled
def dimensionwise(found: Json) -> Figure:
    """Counts by both rules, and every dimension's path in the colour of its class by ours."""
    figure, (counts, paths) = panels_and_strip(found, 2.9, (1, 1.25))
    places = np.arange(len(ROLES))
    for rule, shift, strength in ((found["published"], -0.2, 0.45), (found, 0.2, 1.0)):
        values = [rule["pattern_counts"][role] for role in ROLES]
        counts.barh(places + shift, values, 0.38, color=[tint(colour, strength) for colour in ROLES.values()])
        for place, value in zip(places + shift, values, strict=True):
            counts.annotate(count(value), (value, place), (3, 0), textcoords="offset points", va="center", fontsize=SMALL)
    counts.set_yticks(places, list(ROLES))
    counts.set(xlabel="dimensions", ylim=(len(ROLES) - 0.4, -0.6))
    counts.margins(x=0.18)
    counts.grid(False)
    keys = [Patch(color=tint(INK, 0.45), label="published rule"), Patch(color=INK, label="beyond 2 standard errors")]
    titled(counts, "Dimensions of each class", keys, 2)
    activity = np.array(found["published"]["step_activities"])
    faint = min(1.0, max(0.12, 12 / activity.shape[1]))
    for role, colour in ROLES.items():
        members = found["dimension_patterns"][role]
        if members:
            paths.plot(activity[:, members], color=colour, lw=0.7, alpha=faint)
            paths.plot(activity[:, members].mean(1), color=colour, lw=2.4, marker="o", ms=4)
    paths.set(ylabel="mean |h| of the dimension")
    from_zero(paths)
    step_axis(paths, 0, len(activity) - 1, "after step")
    titled(paths, "Each dimension, and the mean of each class (thick)")
    return figure
