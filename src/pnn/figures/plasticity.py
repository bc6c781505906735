"""The plasticity cycle, drawn from metrics.jsonl alone: its four phases as a circle, which heads there are before and after
each, and what the model's perplexity does on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.ticker import MaxNLocator

from pnn.figures.marks import BLUE, GREEN, ORANGE, PINK
from pnn.figures.style import INK, NORMAL, QUIET, SMALL, WIDTH, ink_on, short_name, styled, tint
from pnn.numbers import several, written
from pnn.results import CycleRecord

PRESENT, GONE, NEW, ABSENT = BLUE, ORANGE, GREEN, "#efefef"
ROUNDS_IN_WORDS = 3  # beside a phase of the circle; of more rounds the first and the last ones stand there

Records = Sequence[CycleRecord]


def of_phase(records: Records, phase: str) -> list[CycleRecord]:
    return [record for record in records if record["phase"] == phase]


def figure_of(number: float) -> str:
    """A perplexity in as many digits as it needs."""
    return written(number, 2 if number < 100 else 1 if number < 1000 else 0)


# The circle -------------------------------------------------------------------------------------------------------------


@styled
def circle(records: Records) -> Figure:
    """Prune, measure, grow, learn: what each phase did in each round, and in the middle what came of it."""
    initial, final = records[0], of_phase(records, "final")[-1]
    rounds = len(of_phase(records, "final"))
    figure = Figure(figsize=(WIDTH, 4.7))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-WIDTH / 2, WIDTH / 2), ylim=(-2.35, 2.35))
    axes.axis("off")
    nodes = (
        ("Prune", 90, ORANGE, _lines(records, "pruning", rounds, _pruned)),
        ("Measure", 0, BLUE, _lines(records, "measurement", rounds, _measured)),
        ("Grow", 270, GREEN, _lines(records, "growth", rounds, _grown)),
        ("Learn", 180, PINK, _lines(records, "final", rounds, _learned)),
    )
    radius, size = 1.4, 0.42
    for name, angle, colour, lines in nodes:
        x, y = radius * math.cos(math.radians(angle)), radius * math.sin(math.radians(angle))
        _arc(axes, radius, angle, size, colour)
        axes.add_patch(Circle((x, y), size, facecolor=colour, edgecolor="none", zorder=3))
        axes.text(x, y, name, ha="center", va="center", fontsize=NORMAL, color=ink_on(colour), weight="bold", zorder=4)
        _beside(axes, x, y, size, angle, lines)
    before, after = initial["heads"], final["heads"]
    axes.text(0, 0.36, short_name(str(initial["model_name"]), 22), ha="center", va="center", weight="bold")
    axes.text(0, 0.08, f"{before} → {after} heads", ha="center", va="center")
    change = f"{figure_of(initial['perplexity'])} → {figure_of(final['perplexity'])}"
    axes.text(0, -0.16, f"perplexity {change}", ha="center", va="center")
    note = "one round" if rounds == 1 else f"{rounds} rounds"
    axes.text(0, -0.42, note, ha="center", va="center", fontsize=SMALL, color=QUIET)
    return figure


def _arc(axes: Axes, radius: float, angle: float, size: float, colour: str) -> None:
    """From this phase clockwise to the next."""
    gap = math.degrees(2 * math.asin(size / 2 / radius)) + 4
    start, end = math.radians(angle - gap), math.radians(angle - 90 + gap)
    ends = [(radius * math.cos(at), radius * math.sin(at)) for at in (start, end)]
    bend = -math.tan((start - end) / 4)
    axes.add_patch(
        FancyArrowPatch(
            *ends,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=14,
            shrinkA=0,
            shrinkB=0,
            lw=2.2,
            color=tint(colour, 0.75),
        )
    )


def _beside(axes: Axes, x: float, y: float, size: float, angle: float, lines: list[str]) -> None:
    """Numbers outside of the circle: to the right of it, of the left phase to its left; those of the upper and the lower one
    above and below the arrow that begins or ends there."""
    left = angle == 180
    at = x - size - 0.12 if left else x + size + 0.12
    side = "right" if left else "left"
    pitch = 0.2
    top = {90: y + 0.12 + pitch * (len(lines) - 1), 270: y - 0.12}.get(int(angle), y + pitch * (len(lines) - 1) / 2)
    for index, line in enumerate(lines):
        height = top - pitch * index
        axes.text(at, height, line, ha=side, va="center", fontsize=SMALL, color=INK)


def _lines(records: Records, phase: str, rounds: int, words: Callable[[CycleRecord], str]) -> list[str]:
    rows = of_phase(records, phase)
    if rounds == 1:
        return words(rows[0]).split("; ")
    chosen = rows if rounds <= ROUNDS_IN_WORDS else [rows[0], *rows[-(ROUNDS_IN_WORDS - 1) :]]
    said = [words(row).replace("; ", ", ") for row in chosen]
    lines = [f"{row['cycle']}: {text.removeprefix('perplexity ')}" for row, text in zip(chosen, said, strict=True)]
    if rounds > ROUNDS_IN_WORDS:
        lines.insert(1, "…")
    return ["perplexity", *lines] if said[0].startswith("perplexity ") else lines


def _pruned(row: CycleRecord) -> str:
    return f"−{several(row['heads_pruned'], 'head')}; by {_plain(row['pruning_strategy'])}"


def _measured(row: CycleRecord) -> str:
    share = f"{written(row['perplexity_change_percent'], 1, plus=True)} %"
    return f"perplexity {figure_of(row['pruned_perplexity'])}; {share}"


def _grown(row: CycleRecord) -> str:
    return f"+{several(row['heads_added'], 'head')}; by {_plain(row['growth_strategy'])}" if row["heads_added"] else "nothing"


def _learned(row: CycleRecord) -> str:
    # learning on this text may help more than pruning hurt; how many times more says nothing about pruning
    back = f"; recovery {written(100 * row['recovery'], 0)} %" if 0 < row["recovery"] <= 1 else ""
    back = "; better than before" if row["perplexity_change_from_initial"] < 0 else back
    return f"perplexity {figure_of(row['final_perplexity'])}{back}"


def _plain(name: str) -> str:
    return name.replace("_", " ")


# Head maps --------------------------------------------------------------------------------------------------------------


@styled
def heads(records: Records) -> Figure:
    """Before pruning, after pruning, after growth: one row of panels per round, one square per head."""
    pruning, growth = of_phase(records, "pruning"), of_phase(records, "growth")
    before = records[0]["head_map"]
    layers, columns = len(before), 1 + max(max(row, default=0) for one in (records[0], *growth) for row in one["head_map"])
    cell = min(0.3, 2.1 / columns)
    height = max(1.0, cell * layers) + 0.62
    layout = ConstrainedLayoutEngine(h_pad=0.08)
    figure = Figure(figsize=(WIDTH, height * len(pruning) + 0.4), layout=layout)
    panels = figure.subplots(len(pruning), 3, squeeze=False)
    for row, gone, new in zip(panels, pruning, growth, strict=True):
        first = f"Round {gone['cycle']}: before" if len(pruning) > 1 else "Before"
        _map(row[0], f"{first}, {_count(before)} heads", before, columns)
        _map(row[1], f"Pruned, {_count(gone['head_map'])} left", gone["head_map"], columns, gone["pruned_heads"], GONE)
        _map(row[2], f"Grown, {_count(new['head_map'])} heads", new["head_map"], columns, new["added_heads"], NEW)
        row[0].set_ylabel("layer")
        before = new["head_map"]
    for axes in panels[-1]:
        axes.set_xlabel("head")
    keys = [
        Patch(color=PRESENT, label="there"),
        Patch(facecolor="white", edgecolor=GONE, lw=1.4, label="just pruned"),
        Patch(color=NEW, label="just grown"),
        Patch(color=ABSENT, label="not there"),
    ]
    figure.legend(handles=keys, loc="outside upper center", ncols=4, handlelength=1.0, handleheight=1.0)
    return figure


def _count(head_map: Sequence[Sequence[int]]) -> int:
    return sum(map(len, head_map))


def _map(
    axes: Axes,
    title: str,
    head_map: Sequence[Sequence[int]],
    columns: int,
    special: Sequence[Mapping[str, int]] = (),
    colour: str = PRESENT,
) -> None:
    marked = {(one["layer"], one["head"]) for one in special}
    for layer, present in enumerate(head_map):
        for head in range(columns):
            there, just = head in present, (layer, head) in marked
            face = (colour if there else "white") if just else PRESENT if there else ABSENT
            edge = colour if just else face
            place = (head - 0.39, layer - 0.39)
            box = FancyBboxPatch(
                place, 0.78, 0.78, boxstyle="round,pad=0,rounding_size=0.12", facecolor=face, edgecolor=edge, lw=1.2
            )
            axes.add_patch(box)
    axes.set(xlim=(-0.6, columns - 0.4), ylim=(len(head_map) - 0.4, -0.6), title=title)
    axes.set_aspect("equal")
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))


# Perplexity -------------------------------------------------------------------------------------------------------------


@styled
def perplexity(records: Records) -> Figure:
    """Perplexity on held-out text: at the end of each phase as bars, and while learning as a curve."""
    figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    initial = records[0]
    rounds = [record["cycle"] for record in of_phase(records, "final")]
    phases = (("measurement", "pruned", ORANGE), ("growth", "grown", GREEN), ("final", "learned", PINK))
    bars = [(initial["perplexity"], "before", BLUE)]
    for number in rounds:
        for phase, label, colour in phases:
            row = next(record for record in of_phase(records, phase) if record["cycle"] == number)
            bars.append((row["perplexity"], label, colour))
    places = np.arange(len(bars))
    left.bar(places, [value for value, _, _ in bars], 0.7, color=[colour for _, _, colour in bars])
    few = len(bars) <= 7
    if few:
        for place, (value, _, _) in enumerate(bars):
            label = left.annotate(figure_of(value), (place, value), (0, 3), textcoords="offset points", ha="center")
            label.set(fontsize=SMALL, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4})
        left.set_xticks(places, [label for _, label, _ in bars])
        if len(bars) > 4:
            left.tick_params(axis="x", rotation=30)
    else:
        left.set_xticks([0, *(2 + 3 * (number - 1) for number in rounds)], ["before", *map(str, rounds)])
        left.set_xlabel("round")
    left.set_ylim(0, 1.12 * max(value for value, _, _ in bars))
    left.axhline(initial["perplexity"], color=INK, lw=0.8, ls=":", zorder=0.5)
    left.set_title("At the end of each phase")
    left.set_ylabel("perplexity on held-out text")
    _curve(right, records, rounds)
    if not few:
        keys = [Patch(color=BLUE, label="before"), *(Patch(color=colour, label=label) for _, label, colour in phases)]
        figure.legend(handles=keys, loc="outside upper center", ncols=4, handlelength=1.0)
    return figure


def _curve(axes: Axes, records: Records, rounds: Sequence[int]) -> None:
    """Held-out perplexity against updates, rounds end to end; it begins where growth left the model."""
    start = 0
    for number in rounds:
        grown = next(record for record in of_phase(records, "growth") if record["cycle"] == number)
        rows = [record for record in of_phase(records, "evaluation") if record["cycle"] == number]
        steps = [start, *(start + row["step"] for row in rows)]
        values = [grown["perplexity"], *(row["perplexity"] for row in rows)]
        axes.plot(steps, values, color=PINK, lw=1.6, marker="o", ms=3.5)
        axes.plot(start, grown["perplexity"], color=GREEN, marker="o", ms=5.5)
        if start:
            axes.axvline(start, color=QUIET, lw=0.6)
        start = steps[-1]
    before = records[0]["perplexity"]
    axes.axhline(before, color=INK, lw=0.8, ls=":")
    axes.set(title="While learning", xlabel="updates")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    keys = [
        Line2D([], [], color=INK, lw=0.8, ls=":", label="before pruning"),
        Line2D([], [], color=GREEN, marker="o", ls="none", ms=5.5, label="after growth"),
        Line2D([], [], color=PINK, marker="o", lw=1.6, ms=3.5, label="learning"),
    ]
    axes.legend(handles=keys, loc="best", frameon=True, facecolor="white", edgecolor="none", framealpha=1)


CYCLE_FIGURES: dict[str, Callable[[Records], Figure]] = {"cycle": circle, "heads": heads, "perplexity": perplexity}
