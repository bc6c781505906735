"""Is refinement an iteration toward something? Predictions, movement and what remains, round by round."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pnn.figures.findings import write_verdicts
from pnn.figures.marks import BLUE, CONTROL, GREEN, ORANGE, PALE, PINK, at_least, line, step_axis
from pnn.figures.style import INK, WIDTH, per_cent_axis, styled
from pnn.results import EstimateJson, Json

FURTHER = "#f3f3f3"


@styled
def more_steps(result: Json) -> Figure:
    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    (accuracy, loss), (contraction, remaining) = figure.subplots(2, 2)
    seen = len(result["accuracy_by_round"]) - 1
    _path(accuracy, result, result["accuracy_by_round"][:seen], GREEN, 1)
    accuracy.axhline(result["accuracy_by_round"][-1]["value"], color=GREEN, ls=":", lw=1.2)
    accuracy.set(title="Accuracy (dotted: far state)", ylabel="targets right (%)")
    at_least(accuracy, 0.02)
    per_cent_axis(accuracy)
    _path(loss, result, result["loss_by_round"][:seen], BLUE, 1)
    loss.axhline(result["loss_by_round"][-1]["value"], color=BLUE, ls=":", lw=1.2)
    loss.set(title="Loss (dotted: far state)", ylabel="nats")
    at_least(loss, 0.1)
    _path(contraction, result, result["untrained_contraction_by_round"], CONTROL, 2, **PALE)
    _path(contraction, result, result["contraction_by_round"], ORANGE, 2)
    contraction.axhline(1, color=INK, lw=0.8)
    contraction.set(title="Contraction", ylabel="moved, over the round before")
    for name, colour, looks in (("untrained_remaining_by_round", CONTROL, PALE), ("remaining_by_round", PINK, {})):
        first = result[name][0]["value"] or 1.0
        _path(remaining, result, [_scaled(one, 1 / first) for one in result[name]], colour, 1, **looks)
    remaining.set(title=f"Way that remains to round {result['far_rounds']}", ylabel="share of that after round 1")
    write_verdicts(figure, result["findings"])
    return figure


def _path(axes: Axes, result: Json, found: list[EstimateJson], colour: str, first: int, **looks: Any) -> None:
    last = len(result["accuracy_by_round"]) - 1
    line(axes, range(first, first + len(found)), found, colour, **looks)
    axes.axvspan(result["num_rounds"] + 0.5, last + 0.5, color=FURTHER, lw=0, zorder=0)
    step_axis(axes, 1, last, "round")


def _scaled(one: EstimateJson, factor: float) -> EstimateJson:
    ends = [None if end is None else end * factor for end in one["interval"]]
    return {**one, "value": None if one["value"] is None else one["value"] * factor, "interval": ends}
