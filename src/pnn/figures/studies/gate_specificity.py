"""E7, gate specificity: every intervention on the gates."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import BLUE, CONTROL, ORANGE, estimates
from pnn.figures.parts import is_wide
from pnn.figures.style import QUIET, styled
from pnn.numbers import bare_per_cent
from pnn.results import Json

# Of gate_specificity: how the interventions are called, by what their keys end in
GATE_TESTS = {
    "dropout": "dropout {} %",
    "anti_gate": "1 − g",
    "noise": "noise, deviation 0.{}",
    "pattern_shuffling": "shuffled within the token",
    "uniform_gate": "token's mean everywhere",
    "scale": "× {}",
}


@styled
def gate_specificity(found: Json) -> Figure:
    """Every intervention on a row of its own; hollow: the same with the token's mean gate restored."""
    rows = len(found["interventions"]) + 1
    keys = [
        Line2D([], [], color=BLUE, marker="o", ls="none", label="on all gates"),
        Line2D([], [], color=BLUE, marker="o", mfc="white", ls="none", label="token's mean gate restored"),
        Line2D([], [], color=ORANGE, marker="o", ls="none", label="tested"),
        Line2D([], [], color=CONTROL, marker="o", ls="none", label="its control"),
    ]
    figure, (accuracy, loss) = panels_and_strip(found, 0.62 + 0.235 * rows, (1.15, 1), keys=keys)
    labels: list[str] = []
    for name, condition in found["interventions"].items():
        place = len(labels)
        leaf = name.split(".")[-1]
        labels.append(_gate_test(leaf))
        colour = ORANGE if leaf == "pattern_shuffling" else BLUE
        _row(accuracy, loss, place, condition, colour)
        restored = found["magnitude_matched"].get(f"{leaf}_mean_restored")
        if restored is not None:
            _row(accuracy, loss, place + 0.28, restored, colour, mfc="white", ms=4.5)
        if leaf == "pattern_shuffling":
            labels.append("in place, same ‖Δ‖ as shuffled")
            _row(accuracy, loss, place + 1, found["magnitude_matched"]["scaled_like_shuffled"], CONTROL)
    accuracy.set_yticks(range(len(labels)), labels)
    loss.set_yticks(range(len(labels)), [])
    for axes, title, label in ((accuracy, "Accuracy lost", "points"), (loss, "Loss gained", "nats")):
        axes.axvline(0, color=QUIET, lw=0.8)
        axes.set(xlabel=label, ylim=(len(labels) - 0.4, -0.6))
        axes.grid(True, axis="both")
        axes.set_title(title)
    accuracy.xaxis.set_major_formatter(lambda value, _: bare_per_cent(value, 0 if is_wide(accuracy) else 1))
    return figure


def _gate_test(leaf: str) -> str:
    start, _, level = leaf.rpartition("_")
    if start not in GATE_TESTS or not level.isdigit():
        return GATE_TESTS[leaf]
    return GATE_TESTS[start].format({"dropout": level, "noise": level.rstrip("0"), "scale": f"{int(level) / 100:g}"}[start])


def _row(accuracy: Axes, loss: Axes, place: float, condition: Json, colour: str, **looks: Any) -> None:
    looks = {"marker": "o", "ms": 5.5, "elinewidth": 1.2, **looks}
    for axes, measure in ((accuracy, "accuracy_drop"), (loss, "loss_increase")):
        values, reach = estimates([condition[measure]])
        axes.errorbar(values, [place], xerr=reach, color=colour, **looks)
