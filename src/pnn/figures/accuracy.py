"""Accuracy after every step, and by kind of word: is refining again worth it, and for what?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from pnn.figures.style import INK, SMALL, WIDTH, colours, ink_on, label_ends, per_cent_axis, short_name, styled, tint
from pnn.kinds import of_result
from pnn.numbers import bare_per_cent, per_cent
from pnn.results import Accuracy, MaskedEvaluation


@styled
def accuracy_by_step(evaluations: Mapping[str, MaskedEvaluation]) -> Figure:
    """Left from the embeddings on, right from step 1 on, enlarged. A BERT baseline is a line at its final accuracy: its
    layers are not steps, and its head was trained for the last one only."""
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    whole, enlarged = figure.subplots(1, 2, width_ratios=(1, 1.35))
    steps = max((len(e["accuracy_by_step"]) - 1 for e in evaluations.values() if of_result(e).has_steps), default=1)
    colour = colours(evaluations)
    refiners = [name for name, evaluation in evaluations.items() if of_result(evaluation).has_steps]
    for axes, first in ((whole, 0), (enlarged, 1)):
        for name, evaluation in evaluations.items():
            if of_result(evaluation).has_steps:
                aside = 0.05 * (refiners.index(name) - (len(refiners) - 1) / 2)  # so that intervals do not hide each other
                _step_line(axes, evaluation, first, aside, colour[name])
            else:
                axes.axhspan(*evaluation["accuracy_interval"], color=colour[name], alpha=0.12, lw=0)
                axes.axhline(evaluation["accuracy"], color=colour[name], lw=1.6, ls=(0, (5, 2)))
        for ceiling, _ in _ceilings(evaluations):
            axes.axhline(ceiling, color=INK, lw=1.2, ls=":")
        axes.set(xlabel="refinement step", xlim=(first - 0.3, max(steps, first + 1) + 0.3))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
        per_cent_axis(axes)
    room = (-0.03, 1.03)  # for marks at the ends
    whole.set(title="From the embeddings on", ylabel="masked tokens predicted right (%)", ylim=room)
    enlarged.set(title="From step 1 on, enlarged")
    labels = [(ceiling, f"best possible{owner} {per_cent(ceiling)}", INK) for ceiling, owner in _ceilings(evaluations)]
    for name, evaluation in evaluations.items():
        labels.append((evaluation["accuracy"], f"{short_name(name)} {per_cent(evaluation['accuracy'])}", colour[name]))
    enlarged.margins(y=0.12)
    label_ends(enlarged, labels)
    return figure


def _step_line(axes: Axes, evaluation: MaskedEvaluation, first: int, aside: float, colour: str) -> None:
    values = np.array(evaluation["accuracy_by_step"][first:])
    low, high = np.array(evaluation["accuracy_by_step_interval"][first:]).T
    spread = np.stack((values - low, high - values))
    at = np.arange(first, first + len(values)) + aside
    axes.errorbar(at, values, spread, color=colour, marker="o", ms=4.5, lw=1.8, elinewidth=1.2, capsize=2.5)


def _ceilings(evaluations: Mapping[str, MaskedEvaluation]) -> list[tuple[float, str]]:
    """Each best possible accuracy once, and whose it is if the runs were measured on different text."""
    found: dict[float, str] = {}
    for name, evaluation in evaluations.items():
        if "ceiling" in evaluation:
            found.setdefault(evaluation["ceiling"], f" ({short_name(name)})")
    return [(value, owner if len(found) > 1 else "") for value, owner in found.items()]


@styled
def accuracy_by_kind(evaluations: Mapping[str, MaskedEvaluation]) -> Figure:
    """For each kind of word a pale bar after step 1 and a full one after the last step; BERT baselines have only the latter.
    A black line over a run's bars is the best possible there."""
    colour = colours(evaluations)
    evaluations = {name: e for name, e in evaluations.items() if "by_kind" in e}
    kinds = list(next(iter(evaluations.values()))["by_kind"])
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    bars = sum(_bars_of(e) for e in evaluations.values())
    width = 0.84 / bars
    for group, kind in enumerate(kinds):
        left = group - 0.42
        for name, evaluation in evaluations.items():
            measured = evaluation["by_kind"][kind]
            reach = _bars_of(evaluation) * width
            axes.hlines(measured["ceiling"], left, left + reach, color=INK, lw=1.8, zorder=4)
            if reach > width * 1.5:
                _bar(axes, left, width, measured, 1, tint(colour[name], 0.45), bars)
                left += width
            _bar(axes, left, width, measured, -1, colour[name], bars)
            left += width
    shares = next(iter(evaluations.values()))["by_kind"]
    axes.set_xticks(range(len(kinds)), [f"{kind}\n{per_cent(shares[kind]['share'], 0)} of targets" for kind in kinds])
    axes.set(ylabel="masked tokens predicted right (%)", xlim=(-0.5, len(kinds) - 0.5), ylim=(0, 1.06))
    axes.tick_params(axis="x", length=0, labelsize=SMALL + 1)
    axes.set_yticks(np.linspace(0, 1, 6))
    per_cent_axis(axes)
    keys: list[Patch | Line2D] = []
    for name, evaluation in evaluations.items():
        if _bars_of(evaluation) == 2:
            keys.append(Patch(color=tint(colour[name], 0.45), label=f"{short_name(name)}, step 1"))
            keys.append(Patch(color=colour[name], label=f"{short_name(name)}, step {evaluation['num_steps']}"))
        else:
            keys.append(Patch(color=colour[name], label=f"{short_name(name)}, last layer"))
    keys.append(Line2D([], [], color=INK, lw=1.6, label="best possible"))
    figure.legend(handles=keys, loc="outside upper center", ncols=min(len(keys), 4))
    return figure


def _bars_of(evaluation: MaskedEvaluation) -> int:
    return 2 if of_result(evaluation).has_steps and evaluation["num_steps"] > 1 else 1


def _bar(axes: Axes, left: float, width: float, measured: Accuracy, step: int, colour: str, bars: int) -> None:
    value = measured["accuracy_by_step"][step]
    low, high = _clipped(measured["accuracy_by_step_interval"][step])
    axes.bar(left, value, width * 0.92, align="edge", color=colour)
    middle = left + width * 0.46
    axes.errorbar(
        middle, value, [[max(value - low, 0)], [max(high - value, 0)]], color=INK, elinewidth=0.9, capsize=2, zorder=5
    )
    inside = low > 0.14  # else the number does not fit under the interval and stands above it
    axes.text(
        middle,
        0.02 if inside else high + 0.02,
        bare_per_cent(value),
        ha="center",
        va="bottom",
        fontsize=SMALL,
        rotation=90 if bars > 4 else 0,
        color=ink_on(colour) if inside else INK,
    )


def _clipped(interval: Sequence[float]) -> tuple[float, float]:
    low, high = interval
    return max(low, 0.0), min(high, 1.0)
