"""Accuracy against measured speed: every way of stopping early, for each model on each machine. Drawn by collect.py."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from timed import FLOPS

from pnn.figures.marks import AMBER, BLUE, CONTROL, GREEN, ORANGE, PINK, line
from pnn.figures.style import SMALL, WIDTH, per_cent_axis, styled
from pnn.numbers import points
from pnn.results import Json
from pnn.studies.analyses.halting import LOSE

NAMES = {
    "pnn_paper": "the paper's PNN",
    "pnn_paper_ready": "the paper's, trained to halt",
    "pnn_rewrite_one": "one rewriting refiner",
    "pnn_rewrite_one_ready": "rewriting, trained to halt",
}
FIXED = ("dial", "two_dials")  # who takes how many steps is known before the pass
LOOKS = {  # colour, marker, what the key says
    "dial": (BLUE, "o", "fewer steps for everyone (the dial)"),
    "two_dials": (GREEN, "s", "fewer for tokens that are not masked (two dials)"),
    "change": (PINK, "^", "halting by the size of the change"),
    "confidence": (AMBER, "v", "halting by confidence"),
    "learned": (ORANGE, "D", "halting by a learned unit"),
}
RANDOM, ORACLE = "the unit's steps at random", "oracle: ideal speed, counted in FLOPs"
AIM = 1.4
SHOWN = 0.021  # lost: the figure ends there
WRITTEN: dict[str, Any] = {"textcoords": "offset points", "fontsize": SMALL}
CAPTION = (
    "![Accuracy against measured speed](figures/accuracy_against_speed.png)\n"
    "*Per cent of masked tokens of WikiText-103 valid right against measured speed (all steps are 1×, logarithmic). Large "
    "marks: the settings chosen on the tail, with 95 % intervals of what they lose; a kind without one has nothing faster "
    "than all steps that loses so little. Small marks: all others, of a unit one for each seed, cost and threshold. Numbers "
    "are steps, a/b are a steps for masked tokens and b for others. The oracle stands at its ideal speed, counted and not "
    "measured; the unit's steps at random at the speed of the unit, and at the lower edge where they lose more than is shown. "
    "Dotted: 1.4× and 0.3 points lost. Settings that lose more than two points are left out.*"
)


@styled
def accuracy_against_speed(machines: dict[str, dict[str, Any]], found: dict[str, dict[str, Json]]) -> Figure:
    """`machines`: of each its models, as collect.py knows them; `found`: what follows of each."""
    known = {name for models in machines.values() for name in models}
    names = [name for name in NAMES if name in known] + sorted(known - set(NAMES))
    figure = Figure(figsize=(WIDTH, 1.1 + 2.6 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), len(machines), squeeze=False)
    for down, (slug, models) in zip(panels.T, machines.items(), strict=True):
        for axes, name in zip(down, names, strict=True):
            axes.set_visible(name in models)
            if name in models:
                panel(axes, models[name], found[slug][name], ideal_only=slug == FLOPS)
                axes.set_title(f"{NAMES.get(name, name)}\n{slug}", fontsize="medium")
    looks = [*LOOKS.values(), (CONTROL, "X", RANDOM)]
    keys = [Line2D([], [], color=colour, marker=marker, ms=6, ls="", label=said) for colour, marker, said in looks]
    if any("oracle" in row for models in found.values() for row in models.values()):
        keys.append(Line2D([], [], color=ORANGE, marker="*", mfc="white", ms=11, ls="", label=ORACLE))
    figure.legend(handles=keys, loc="outside upper center", ncols=2)
    return figure


def panel(axes: Any, model: Any, row: Json, ideal_only: bool = False) -> None:
    """Small marks are all settings, large ones those that were chosen, with whiskers of what they lose."""
    whole = row["accuracy"]
    lowest, seen = whole - SHOWN, [AIM]

    def accuracy_of(lost: Json) -> Json:
        value, (low, high) = lost["value"], lost["interval"]
        return {"value": whole - value, "interval": [None if end is None else whole - end for end in (high, low)]}

    for family, (colour, marker, _) in LOOKS.items():
        ways = sorted([model.ways[0], *model.family(family)][family == "dial" :], key=model.speed_of)
        x = [model.speed_of(way) for way in ways]
        y = [whole - model.lost(way).sum() / model.targets.sum() for way in ways]
        seen += [at for at, height in zip(x, y, strict=True) if height >= lowest]
        axes.plot(x, y, color=colour, marker=marker, ms=2.5, alpha=0.6, lw=1.2 if family == "dial" else 0)
        way = row["ways"][family]
        if family == "dial" or not stays(model, way):
            line(axes, [way["speed"]], [accuracy_of(way["points_lost"])], colour, marker=marker, ms=6, ls="")
        if family in FIXED:
            for at, height, one in zip(x, y, ways, strict=True):
                halt = one["changes"]["halt"]
                steps = one["changes"]["num_steps"]
                text = str(steps) + (f"/{halt['min_steps']}" if halt else "")
                below = halt and steps < model.ways[0]["changes"]["num_steps"]  # 3/1 is beside 4/1
                if family == "dial" or halt:
                    axes.annotate(text, (at, height), (4, -11 if below else 4), **WRITTEN, color=colour, annotation_clip=True)
    halting = row["ways"]["learned"]
    if not stays(model, halting):
        at_random(axes, halting["speed"], accuracy_of(halting["random_points_lost"]), whole, lowest)
    if "oracle" in row:
        ideal = row["oracle"]["ideal_speedup"]["value"]
        axes.plot([ideal], [whole], "*", color=ORANGE, mfc="white", ms=11)
        seen.append(ideal)
    axes.axvline(AIM, color=CONTROL, lw=0.8, ls=":")
    axes.axhline(whole - LOSE, color=CONTROL, lw=0.8, ls=":")
    axes.set(xscale="log", xlabel=f"{'ideal' if ideal_only else 'measured'} speed, all steps = 1×", ylabel="accuracy (%)")
    axes.set(xlim=(min(seen) / 1.08, max(seen) * 1.12), ylim=(lowest, whole + SHOWN / 3))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}×" if round(value, 1) in (2, 3, 5) else "")
    per_cent_axis(axes)


def stays(model: Any, way: Json) -> bool:
    """Whether nothing but all steps was chosen: a large mark would hide that of all steps."""
    return set(way["chosen"]) == {model.ways[0]["name"]}


def at_random(axes: Any, speed: float, accuracy: Json, whole: float, lowest: float) -> None:
    """What loses more than is shown stands at the lower edge, and says how much."""
    if accuracy["value"] > lowest:
        line(axes, [speed], [accuracy], CONTROL, marker="X", ms=6, ls="")
        return
    height = lowest + SHOWN / 25
    axes.plot([speed], [height], "X", color=CONTROL, ms=6)
    said = f"↓ {points(whole - accuracy['value'])} lost"
    left = speed > AIM  # where there is room: the dial's line comes down on the right
    axes.annotate(
        said, (speed, height), (-6 if left else 6, 0), **WRITTEN, color=CONTROL, ha="right" if left else "left", va="center"
    )
