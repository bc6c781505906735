"""E8, layer-wise activity: the size of states, beside the same updates with random signs."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import BLUE, CONTROL, PALE, from_zero, line, step_axis, titled
from pnn.figures.style import styled, tint
from pnn.results import Json


@styled
def layerwise_activity(found: Json) -> Figure:
    figure, (stages, ends) = panels_and_strip(found, 2.7, (1.6, 1))
    at = np.arange(len(found["by_stage"]))
    line(stages, at, found["by_stage"], BLUE)
    line(stages, at, found["randomly_signed_by_stage"], CONTROL, **PALE)
    stages.set(ylabel="mean |h|")
    from_zero(stages)
    step_axis(stages, 0, len(at) - 1, "after step")
    keys = [Line2D([], [], color=BLUE, marker="o", ms=4.5, label="measured")]
    keys.append(Line2D([], [], color=CONTROL, marker="o", mfc="white", ls=(0, (4, 2)), label="the same updates, random signs"))
    titled(stages, "Size of states", keys)
    published = found["published"]["accumulation_pattern"]
    random = found["randomly_signed_by_stage"][-1]["value"]
    ends.bar(
        range(3),
        [published["early_activity"], published["late_activity"], random],
        0.6,
        color=[tint(BLUE, 0.45), BLUE, CONTROL],
    )
    ends.set_xticks(range(3), ["start", "end", "end,\nrandom signs"])
    ends.set(ylabel="mean |h|")
    titled(ends, "Published: end above start?")
    return figure
