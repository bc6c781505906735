"""Figures of the experiments that intervene: a part is suppressed or replaced, a gate changed, a neighbour shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import (
    BLUE,
    CONTROL,
    DIFFICULTY,
    ORANGE,
    PART,
    PART_MARKER,
    at_least,
    bars,
    dots,
    estimates,
    floats,
    from_zero,
    line,
    step_axis,
    titled,
)
from pnn.figures.numbers import bare_per_cent, count
from pnn.figures.results import Json
from pnn.figures.style import INK, QUIET, SMALL, per_cent_axis, styled, tint

NAMES = {"attention": "attention", "gate": "gate", "ffn": "FFN", "delta": "δ behind its norm"}
UNDONE = "\nscaling the FFN by ½ changes nothing"
CONTEXTS = {"easy_context": "both easy", "mixed_context": "mixed", "hard_context": "both hard"}
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
def optogenetics(found: Json) -> Figure:
    """Above as published, a part's output scaled; below our test, its output replaced by its mean, at all steps or at one."""
    keys = _part_keys(list(found["suppression"]))
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


def _mean_ablation(axes: Axes, drops: Mapping[str, Json]) -> None:
    bars(axes, np.arange(len(drops)), list(drops.values()), [PART[part] for part in drops], 0.55)
    for place, drop in enumerate(drops.values()):
        top = max(v for v in (drop["value"], drop["interval"][1], 0.0) if v is not None)
        text = bare_per_cent(drop["value"])
        axes.annotate(text, (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=SMALL)
    axes.axhline(0, color=QUIET, lw=0.8)
    axes.set_xticks(range(len(drops)), [NAMES[part] for part in drops])
    axes.set(title="Ours: replaced by its mean, all steps", ylabel="accuracy lost (points)", xlim=(-0.6, len(drops) - 0.4))
    axes.use_sticky_edges = False  # room for the numbers also where all bars hang from zero
    axes.margins(y=0.14)
    at_least(axes, 0.01)
    per_cent_axis(axes)


@styled
def layer_importance(found: Json) -> Figure:
    """Ours and the published ranking side by side; the published drops by rate."""
    figure, (ranking, rates) = panels_and_strip(found, 2.9, (1.2, 1))
    ours = {entry["component"]: entry["accuracy_drop"] for entry in found["importance_ranking"]}
    published = {entry["component"]: entry["importance_score"] for entry in found["published"]["importance_ranking"]}
    for place, (part, drop) in enumerate(ours.items()):
        values, reach = estimates([drop])
        ranking.barh(place - 0.2, values, 0.36, color=PART[part])
        ranking.errorbar(values, [place - 0.2], xerr=reach, color=INK, ls="none", elinewidth=0.9, capsize=2)
        ranking.barh(place + 0.2, published[part], 0.36, color=tint(PART[part], 0.45))
        end = max(float(values[0]), drop["interval"][1] or 0.0, 0.0)
        for value, right, shift in ((drop["value"], end, -0.2), (published[part], max(published[part], 0.0), 0.2)):
            text = bare_per_cent(value)
            ranking.annotate(text, (right, place + shift), (4, 0), textcoords="offset points", va="center", fontsize=SMALL)
    ranking.set_yticks(range(len(ours)), [NAMES[part] for part in ours])
    ranking.set(xlabel="accuracy lost (points)", ylim=(len(ours) - 0.45, -0.55))
    ranking.use_sticky_edges = False
    ranking.margins(x=0.14)
    ranking.axvline(0, color=QUIET, lw=0.8)
    ranking.grid(False)
    ranking.xaxis.set_major_formatter(lambda value, _: bare_per_cent(value, 0 if _wide(ranking) else 1))
    rules = [Patch(color=INK, label="replaced by its mean"), Patch(color=tint(INK, 0.45), label="published: scaled by 0.25")]
    titled(ranking, "Importance of the parts", rules, 2)
    for part in PART:
        levels = {key.removeprefix("suppression_"): one for key, one in found["published"].get(part, {}).items()}
        if levels:
            at = [100 * float(level) for level in levels]
            drops = [one["accuracy_drop"] for one in levels.values()]
            rates.plot([0, *at], [0, *drops], color=PART[part], marker=PART_MARKER[part], ms=4.5, lw=1.6)
    rates.axhline(0, color=QUIET, lw=0.8)
    undone = UNDONE if found["ffn_scaling_is_undone_by_norm"] else ""
    rates.set(xlabel=f"suppressed by (%){undone}", ylabel="accuracy lost (points)")
    per_cent_axis(rates)
    titled(rates, "Published: drop by rate", _part_keys([part for part in PART if part in ours]))
    return figure


def _part_keys(parts: Sequence[str]) -> list[Line2D]:
    return [Line2D([], [], color=PART[part], marker=PART_MARKER[part], ms=4.5, label=NAMES[part]) for part in parts]


def _wide(axes: Axes) -> bool:
    low, high = axes.get_xlim()
    return high - low > 0.05


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
    accuracy.xaxis.set_major_formatter(lambda value, _: bare_per_cent(value, 0 if _wide(accuracy) else 1))
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


@styled
def cross_token(found: Json) -> Figure:
    """Published: tokens between masked ones that are easy or hard. Ours: what showing one of them does to the same token."""
    figure, (published, ours) = panels_and_strip(found, 2.9)
    for place, name in enumerate(CONTEXTS):
        part = found["published"][name]
        mean, spread = floats([part["mean_performance"]]), floats([part["std_performance"]])
        colour = (DIFFICULTY["easy"], DIFFICULTY["medium"], DIFFICULTY["hard"])[place]
        published.bar(place, mean, 0.6, color=colour)
        published.errorbar([place], mean, spread, color=INK, ls="none", elinewidth=0.9, capsize=2)
    labels = [f"{label}\n{count(found['published'][name]['count'])} targets" for name, label in CONTEXTS.items()]
    published.set_xticks(range(3), labels)
    published.set(ylabel="p of the right token, ± deviation", xlabel="masked neighbours on both sides")
    published.set(ylim=(0, 1.25), yticks=np.linspace(0, 1, 6))
    titled(published, "Published: tokens by their neighbours")
    at = np.arange(3)
    for name, shift, looks in (("near", -0.1, {}), ("far", 0.1, {"mfc": "white"})):
        shown = [found["gain_when_shown"][name][group] for group in DIFFICULTY]
        dots(ours, list(at + shift), shown, list(DIFFICULTY.values()) if name == "near" else CONTROL, **looks)
    ours.axhline(0, color=QUIET, lw=0.8)
    ours.set_xticks(at, list(DIFFICULTY))
    ours.set(ylabel="rise in p of right token (points)", xlabel="the masked token that is shown was", xlim=(-0.5, 2.5))
    ours.margins(y=0.1)
    at_least(ours, 0.01)
    per_cent_axis(ours)
    keys = [Line2D([], [], color=INK, marker="o", ls="none", label="nearest")]
    keys.append(Line2D([], [], color=CONTROL, marker="o", mfc="white", ls="none", label="furthest (control)"))
    titled(ours, "Ours: a masked token is shown", keys)
    return figure
