"""When do predictions settle? The paper's four panels, each with its controls, and beside them what they do not show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pnn.figures.findings import write_verdicts
from pnn.figures.marks import (
    AMBER,
    CONTROL,
    DIFFICULTY,
    GREEN,
    MARKERS,
    PALE,
    PINK,
    dots,
    floats,
    from_zero,
    line,
    shades,
    stacked_rows,
    step_axis,
    titled,
    unit_of,
)
from pnn.figures.style import INK, SMALL, WIDTH, per_cent_axis, styled
from pnn.numbers import count, per_cent
from pnn.results import Json

MEANING = {"easy": "easy: embeddings right", "medium": "medium: right in the end", "hard": "hard: wrong"}
CONTROLS = {"untrained": "x", "shuffled": "+"}  # the mark of each
CONTROL_NAMES = {"untrained": "model untrained", "shuffled": "labels shuffled"}


@styled
def convergence(result: Json) -> Figure:
    embedded = "true_difficulty" in result
    rows = 4 if embedded else 3
    figure = Figure(figsize=(WIDTH, 2.8 * rows + 0.5), layout=ConstrainedLayoutEngine(h_pad=0.08))
    panels = figure.subplots(rows, 2)
    _counts(panels[0, 0], result)
    _means(panels[0, 1], result)
    _stability(panels[1, 0], result)
    _shares(panels[1, 1], result)
    _when(panels[2, 0], result)
    _belief(panels[2, 1], result)
    if embedded:
        _settled_by_kind(panels[3, 0], result)
        _settled_shares(panels[3, 1], result)
    keys: list[Patch | Line2D] = [Patch(color=colour, label=MEANING[name]) for name, colour in DIFFICULTY.items()]
    keys += [Line2D([], [], color=CONTROL, marker=mark, ls="none", label=CONTROL_NAMES[c]) for c, mark in CONTROLS.items()]
    figure.legend(handles=keys, loc="outside upper center", ncols=5, columnspacing=1.0, handletextpad=0.4, handlelength=1.2)
    write_verdicts(figure, result["findings"])
    return figure


# The paper's panels ----------------------------------------------------------------------------------------------------


def _counts(axes: Axes, result: Json) -> None:
    steps = np.arange(result["num_steps"] + 1)
    for index, (name, colour) in enumerate(DIFFICULTY.items()):
        counts = result["classes"][name]["convergence_counts"]
        axes.bar(steps + 0.27 * (index - 1), counts, 0.26, color=colour)
    axes.set(ylabel="targets")
    titled(axes, "Convergence step, the paper's measure")
    axes.yaxis.set_major_formatter(lambda value, _: count(value))
    step_axis(axes, 0, result["num_steps"], unit_of(result))


def _means(axes: Axes, result: Json) -> None:
    """The paper's measure and the settled step of each class, controls beside them."""
    measures = (("convergence_step", "o", "convergence step"), ("settled_step", "D", "settled step"))
    for index, (name, colour) in enumerate(DIFFICULTY.items()):
        for (measure, marker, _), left in zip(measures, (-0.3, 0.12), strict=True):
            dots(axes, [index + left], [result["classes"][name][measure]], colour, marker=marker)
            for number, (control, mark) in enumerate(CONTROLS.items(), 1):
                found = result["controls"][control]["classes"][name][measure]
                dots(axes, [index + left + 0.09 * number], [found], CONTROL, marker=mark, ms=5, elinewidth=0.7, capsize=0)
    axes.set(ylabel=f"mean {unit_of(result).split()[-1]}", xlim=(-0.6, 2.6))
    top = axes.get_ylim()[1]
    axes.set_ylim(-0.06 * top, 1.06 * top)
    axes.set_xticks(range(3), list(DIFFICULTY))
    keys = [Line2D([], [], color=INK, marker=marker, ls="none", ms=5, label=label) for _, marker, label in measures]
    titled(axes, "Mean step of each class", keys)


def _stability(axes: Axes, result: Json) -> None:
    steps = np.arange(1, result["num_steps"] + 1)
    for (name, colour), marker in zip(DIFFICULTY.items(), MARKERS, strict=False):
        axes.plot(steps, floats(result["classes"][name]["stable_by_step"]), color=colour, marker=marker, ms=4.5, lw=1.6)
    untrained = result["controls"]["untrained"]["classes"].values()
    weights = np.array([part["targets"] for part in untrained], dtype=float)
    stable = np.array([floats(part["stable_by_step"]) for part in untrained])
    pooled = np.nansum(stable * weights[:, None], axis=0) / weights.sum()
    looks = {key: value for key, value in PALE.items() if key not in ("elinewidth", "capsize")}
    axes.plot(steps, pooled, color=CONTROL, marker="x", **looks)
    axes.set(ylabel="same prediction as before (%)", ylim=(-0.03, 1.05))
    per_cent_axis(axes)
    step_axis(axes, 1, result["num_steps"], unit_of(result))
    axes.set_title("How stable are predictions? (untrained: all targets)")


def _shares(axes: Axes, result: Json) -> None:
    sources = {"trained": result, **{CONTROL_NAMES[c].replace(" ", "\n"): result["controls"][c] for c in CONTROLS}}
    rows = {label: [source["classes"][name]["share"] for name in DIFFICULTY] for label, source in sources.items()}
    stacked_rows(axes, rows, list(DIFFICULTY.values()))
    axes.set(xlabel="share of targets (%)")
    axes.set_title(f"Shares of the classes, {count(result['targets'])} targets")


# What they leave out -----------------------------------------------------------------------------------------------------


def _when(axes: Axes, result: Json) -> None:
    """From when on the prediction is final, and when it is right for the first time."""
    steps = result["num_steps"]
    measures = (("settled_counts", PINK, "settled"), ("first_correct_counts", GREEN, "first right"))
    for (measure, colour, _), left in zip(measures, (-0.21, 0.21), strict=True):
        for source, looks in ((result, None), (result["controls"]["untrained"], "x")):
            shares = np.array(source[measure]) / result["targets"]
            at = np.arange(len(shares)) + left
            if looks is None:
                axes.bar(at, shares, 0.4, color=colour)
            else:
                axes.plot(at, shares, looks, color=CONTROL, ms=5, mew=1.3)
    axes.set(ylabel="share of targets (%)", xlabel=unit_of(result), xlim=(-0.6, steps + 1.6))
    shown = range(0, steps + 1) if steps <= 8 else range(0, steps, 2)  # so that the last does not run into "never"
    axes.set_xticks([*shown, steps + 1], [*map(str, shown), "never"])
    axes.margins(y=0.08)
    per_cent_axis(axes)
    keys = [Patch(color=colour, label=label) for _, colour, label in measures]
    titled(axes, "From when on final, when first right?", keys)


def _belief(axes: Axes, result: Json) -> None:
    steps = np.arange(result["num_steps"] + 1)
    series = (
        ("confidence_by_step", PINK, "confidence", "s"),
        ("correct_by_step", GREEN, "accuracy", "o"),
        ("probability_by_step", AMBER, "p of right token", "^"),
    )
    for index, (name, colour, _, marker) in enumerate(series):
        line(axes, steps + 0.05 * (index - 1), result[name], colour, marker=marker)
    axes.set(ylabel="%", ylim=(0, 1.03))
    per_cent_axis(axes)
    step_axis(axes, 0, result["num_steps"], unit_of(result))
    keys = [Line2D([], [], color=colour, marker=marker, ms=4.5, label=label) for _, colour, label, marker in series]
    titled(axes, "Confidence and accuracy", keys, 3)


def _settled_by_kind(axes: Axes, result: Json) -> None:
    kinds = result["true_difficulty"]
    dots(axes, range(len(kinds)), [found["settled_step"] for found in kinds.values()], INK, marker="D")
    labels = [
        f"{kind}\n{'–' if found['best_possible'] is None else per_cent(found['best_possible'], 0)}"
        for kind, found in kinds.items()
    ]
    axes.set_xticks(range(len(kinds)), labels)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.set(ylabel="mean settled step", xlabel="kind of word, best possible accuracy", xlim=(-0.5, len(kinds) - 0.5))
    titled(axes, "Settled step by kind of word")
    from_zero(axes)
    axes.margins(y=0.15)


def _settled_shares(axes: Axes, result: Json) -> None:
    kinds = result["true_difficulty"]
    colours = ["#e3e3e3", *shades(result["num_steps"])]
    stacked_rows(axes, {kind: _normed(found["settled_counts"]) for kind, found in kinds.items()}, colours)
    axes.set(xlabel="share of targets (%)")
    every = -(-len(colours) // 9)  # more keys do not fit
    keys = [Patch(color=colour, label=str(step)) for step, colour in enumerate(colours) if step % every == 0]
    titled(axes, "Of each kind, settled at step", keys, len(keys))


def _normed(counts: Sequence[int]) -> list[float]:
    total = sum(counts)
    return [number / total if total else 0.0 for number in counts]
