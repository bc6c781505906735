"""Is refinement learned optimisation? Loss and accuracy along the path, beyond the trained steps too; do updates point
downhill?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pnn.figures.findings import write_verdicts
from pnn.figures.marks import BLUE, CONTROL, GREEN, ORANGE, PALE, estimates, from_zero, line, step_axis
from pnn.figures.style import INK, WIDTH, per_cent_axis, styled
from pnn.results import EstimateJson, Json

FURTHER = "#f3f3f3"


@styled
def optimisation(result: Json) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
    loss, accuracy, alignment = figure.subplots(1, 3)
    _path(loss, result, result["loss_by_step"], 0, BLUE)
    loss.set(title="Loss along the path", ylabel="nats")
    from_zero(loss)
    _path(accuracy, result, result["accuracy_by_step"], 0, GREEN)
    accuracy.set(title="Accuracy along the path", ylabel="targets right (%)")
    from_zero(accuracy)
    per_cent_axis(accuracy)
    _path(alignment, result, result["alignment_by_step"], 1, ORANGE)
    _path(alignment, result, result["shuffled_alignment_by_step"], 1, CONTROL, **PALE)
    alignment.axhline(0, color=INK, lw=0.8)
    alignment.set(title="Do updates point downhill?", ylabel="cosine of Δ and −∂ℓ/∂h")
    figure.legend(handles=_keys(), loc="outside upper center", ncols=3)
    write_verdicts(figure, result["findings"])
    return figure


def _path(axes: Axes, result: Json, found: Sequence[EstimateJson], first: int, colour: str, **looks: Any) -> None:
    """Trained steps with full marks, further ones on grey with hollow marks."""
    trained, last = result["num_steps"], result["steps_run"]
    at = np.arange(first, last + 1)
    looks = {"ms": 4.0 if last <= 10 else 3.0} | looks
    axes.plot(at, estimates(found)[0], color=colour, lw=looks.get("lw", 1.6), ls=looks.get("ls", "-"), zorder=1)
    inside = trained + 1 - first
    line(axes, at[:inside], found[:inside], colour, **looks | {"ls": "none"})
    line(axes, at[inside:], found[inside:], colour, **looks | {"ls": "none", "mfc": "white"})
    axes.axvspan(trained + 0.5, last + 0.5, color=FURTHER, lw=0, zorder=0)
    step_axis(axes, first, last, "step")


def _keys() -> list[Line2D]:
    return [
        Line2D([], [], color=INK, marker="o", ms=4.5, label="trained steps"),
        Line2D([], [], color=INK, marker="o", ms=4.5, mfc="white", label="further steps, not trained"),
        Line2D([], [], color=CONTROL, marker="o", ms=4, mfc="white", ls=(0, (4, 2)), label="labels shuffled"),
    ]
