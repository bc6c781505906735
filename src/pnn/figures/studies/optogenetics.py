"""E2, "optogenetics": what is lost when a part is scaled down or replaced by its mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import PART, PART_MARKER, at_least, bars, estimates, from_zero, line, step_axis
from pnn.figures.parts import PART_NAMES, UNDONE, part_keys
from pnn.figures.style import QUIET, SMALL, per_cent_axis, styled
from pnn.numbers import bare_per_cent
from pnn.results import EstimateJson, Json


@styled
def optogenetics(found: Json) -> Figure:
    """Above as published, a part's output scaled; below our test, its output replaced by its mean, at all steps or at one."""
    keys = part_keys(list(found["suppression"]))
    figure, (accuracy, loss, whole, by_step) = panels_and_strip(found, 2.6, rows=2, keys=keys)
    base = found["published"]["baseline"]
    for part, rates in found["suppression"].items():
        at = [0, *map(int, rates)]
        looks: dict[str, Any] = {"marker": PART_MARKER[part], "ls": (0, (4, 2)) if part == "delta" else "-"}
        for axes, start, measure, sign in ((accuracy, "accuracy", "accuracy_drop", -1), (loss, "loss", "loss_increase", 1)):
            values, reach = estimates([condition[measure] for condition in rates.values()])
            values, reach = np.append(0, values), np.pad(reach, ((0, 0), (1, 0)))
            reach = reach if sign > 0 else reach[::-1]
            axes.errorbar(at, base[start] + sign * values, reach, color=PART[part], ms=4.5, lw=1.6, capsize=2, **looks)
    suppressed = "suppressed by (%)" + (UNDONE if found["undone_by_norm"] else "")
    accuracy.set(title="Published: a part's output is scaled down", ylabel="targets right (%)", xlabel=suppressed)
    from_zero(accuracy)
    per_cent_axis(accuracy)
    loss.set(title="The same, loss", ylabel="nats", xlabel=suppressed)
    from_zero(loss)
    _mean_ablation(whole, {part: condition["accuracy_drop"] for part, condition in found["mean_ablation"].items()})
    steps = 1
    for part, conditions in found["mean_ablation_by_step"].items():
        steps = len(conditions)
        drops = [one["accuracy_drop"] for one in conditions]
        line(by_step, range(1, steps + 1), drops, PART[part], marker=PART_MARKER[part])
    by_step.axhline(0, color=QUIET, lw=0.8)
    by_step.set(title="Ours, at one step only", ylabel="accuracy lost (points)")
    at_least(by_step, 0.01)
    per_cent_axis(by_step)
    step_axis(by_step, 1, steps, "step")
    return figure


def _mean_ablation(axes: Axes, drops: Mapping[str, EstimateJson]) -> None:
    bars(axes, np.arange(len(drops)), list(drops.values()), [PART[part] for part in drops], 0.55)
    for place, drop in enumerate(drops.values()):
        top = max(v for v in (drop["value"], drop["interval"][1], 0.0) if v is not None)
        text = "" if drop["value"] is None else bare_per_cent(drop["value"])
        axes.annotate(text, (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=SMALL)
    axes.axhline(0, color=QUIET, lw=0.8)
    axes.set_xticks(range(len(drops)), [PART_NAMES[part] for part in drops])
    axes.set(title="Ours: replaced by its mean, all steps", ylabel="accuracy lost (points)", xlim=(-0.6, len(drops) - 0.4))
    axes.use_sticky_edges = False  # room for the numbers also where all bars hang from zero
    axes.margins(y=0.14)
    at_least(axes, 0.01)
    per_cent_axis(axes)
