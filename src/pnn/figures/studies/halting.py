"""Accuracy against ideal speed, where tokens halt by an oracle, by chance, or all at once; and which tokens halt when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pnn.figures.findings import write_verdicts
from pnn.figures.marks import AMBER, BLUE, CONTROL, GREEN, ORANGE, PINK, line, stacked_rows
from pnn.figures.style import SMALL, WIDTH, per_cent_axis, styled, tint
from pnn.results import Json

LOOKS: dict[str, tuple[str, str, str]] = {  # colour, marker, what the key says
    "dial": (BLUE, "o", "the same steps for everyone"),
    "two_dials": (GREEN, "s", "fewer steps for tokens that are not masked"),
    "bound": (ORANGE, "*", "oracle: no prediction changes"),
    "from_the_start": (PINK, "*", "the same, from step 0 on"),
    "right_answers": (AMBER, "*", "oracle: right answers stay"),
    "random": (CONTROL, "X", "the oracle's steps at random"),
}
GROUPS = {"by_kind": "", "by_frequency": "", "by_outcome": "masked, ", "by_loss": "masked, "}


@styled
def halting(result: Json) -> Figure:
    rows = _rows(result)
    figure = Figure(figsize=(WIDTH, 4.1 + 0.24 * len(rows) + 0.3 * len(result["findings"])), layout="constrained")
    if not rows:
        speed_panel(figure.subplots(), result)
    else:
        panels: Any = figure.subplots(2, 1, height_ratios=(3.0, 0.24 * len(rows) + 0.4))
        speed_panel(panels[0], result)
        _when(panels[1], rows, result["num_steps"])
    figure.legend(handles=keys([result]), loc="outside upper center", ncols=2)
    write_verdicts(figure, result["findings"])
    return figure


def speed_panel(axes: Axes, result: Json, title: str = "") -> None:
    """Speed is the FLOPs of all steps over those that are left."""
    for name, rows in _conditions(result).items():
        colour, marker, _ = LOOKS[name]
        linked = name == "dial"
        for row in rows:
            line(axes, [row["ideal_speedup"]["value"]], [row["accuracy"]], colour, marker=marker, ms=9 if marker == "*" else 5)
        if linked:
            axes.plot([r["ideal_speedup"]["value"] for r in rows], [r["accuracy"]["value"] for r in rows], color=colour, lw=1.2)
    _steps_beside(axes, result)
    axes.margins(y=0.1)
    axes.set(xscale="log", xlabel="ideal speed: FLOPs of all steps over those spent", ylabel="accuracy (%)", title=title)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}×" if round(value) in (2, 3, 5) else "")
    per_cent_axis(axes)


def _steps_beside(axes: Axes, result: Json) -> None:
    """Steps for everyone beside the top of the whisker. Two numbers above it, on two lines where they stand close, or beside
    it too where something else stands above."""
    points = [(r["ideal_speedup"]["value"], *_ends(r["accuracy"])) for rows in _conditions(result).values() for r in rows]
    for row in result["dial"]:
        at = (row["ideal_speedup"]["value"], _ends(row["accuracy"])[1])
        label = axes.annotate(str(row["steps"]), at, (4, 1), textcoords="offset points", fontsize=SMALL, color=LOOKS["dial"][0])
        label.set(va="top")
    before, raised = 0.0, False
    for row in sorted(result["two_dials"], key=lambda row: row["ideal_speedup"]["value"]):
        speed, high = row["ideal_speedup"]["value"], _ends(row["accuracy"])[1]
        near = [(start, end) for other, start, end in points if abs(other / speed - 1) < 0.08]
        raised = speed < 1.15 * before and not raised
        beside = any(start > high for start, _ in near)
        at, aside = ((speed, high), (4, 1)) if beside else ((speed, max(end for _, end in near)), (0, 12 if raised else 3))
        label = axes.annotate(f"{row['masked']}/{row['others']}", at, aside, textcoords="offset points", fontsize=SMALL)
        label.set(color=LOOKS["two_dials"][0], ha="left" if beside else "center", va="top" if beside else "bottom")
        before = speed


def _ends(estimate: Json) -> tuple[float, float]:
    """Of its whisker."""
    low, high = (estimate["value"] if end is None else end for end in estimate["interval"])
    return low, high


def keys(results: list[Json]) -> list[Line2D]:
    """Of what any of these results has."""
    there = {name for result in results for name in _conditions(result)}
    return [
        Line2D([], [], color=colour, marker=marker, lw=1.2 if name == "dial" else 0, label=said)
        for name, (colour, marker, said) in LOOKS.items()
        if name in there
    ]


def _conditions(result: Json) -> dict[str, list[Json]]:
    found = {"dial": result["dial"], "two_dials": result["two_dials"]}
    single = {**result["oracles"], **({"random": result["random"]} if "random" in result else {})}
    return {name: rows for name, rows in (found | {name: [row] for name, row in single.items()}).items() if rows}


def _rows(result: Json) -> dict[str, Json]:
    return {f"{prefix}{label}": row for group, prefix in GROUPS.items() for label, row in result.get(group, {}).items()}


def _when(axes: Axes, rows: Mapping[str, Json], steps: int) -> None:
    colours = [tint(BLUE, 0.15 + 0.85 * step / steps) for step in range(steps + 1)]
    shares = {label: [n / row["tokens"] for n in row["halted_after"]] for label, row in rows.items()}
    stacked_rows(axes, shares, colours)
    used = [step for step in range(steps + 1) if any(row[step] for row in shares.values())]
    handles = [Patch(color=colours[step], label=str(step)) for step in used]
    axes.legend(handles=handles, title="steps", loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set(title="After how many steps tokens halt under the oracle (no prediction changes)", xlabel="share of tokens (%)")
