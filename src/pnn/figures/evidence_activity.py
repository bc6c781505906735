"""Figures of the experiments that only watch: how large activity is, where, at which step, for which tokens."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import (
    AMBER,
    BLUE,
    CONTROL,
    DIFFICULTY,
    GREEN,
    MARKERS,
    ORANGE,
    PALE,
    PINK,
    at_least,
    dots,
    floats,
    from_zero,
    line,
    step_axis,
    titled,
)
from pnn.figures.numbers import count
from pnn.figures.results import Json
from pnn.figures.style import INK, QUIET, SMALL, per_cent_axis, styled, tint

SERIES = {
    "attention_output": ("Attention's output", "mean |output|", BLUE),
    "delta_generation": ("δ generated (FFN output)", "mean |output|", GREEN),
    "gate_computation": ("Gate", "mean g", ORANGE),
    "hidden_update": ("Update of the state", "mean |Δ|", PINK),
}
ROLES = {"accumulator": BLUE, "selector": ORANGE, "oscillator": GREEN, "stable": CONTROL}


@styled
def meg(found: Json) -> Figure:
    """Activity inside a step. Published: the same batch means, one batch after the other on one axis, as if they were steps."""
    series = {name: by_step for name, by_step in found["by_step"].items() if name in SERIES}
    columns = 2 if len(series) > 3 else len(series)
    keys = [Line2D([], [], color=INK, marker="o", ms=4.5, label="all tokens, with interval")]
    keys.append(Line2D([], [], color=tint(INK, 0.35), lw=0.8, label="batch by batch, as published"))
    figure, panels = panels_and_strip(found, 2.3, (1,) * columns, rows=-(-len(series) // columns), keys=keys)
    for axes, (name, by_step) in zip(panels, series.items(), strict=True):
        title, label, colour = SERIES[name]
        steps = np.arange(1, len(by_step) + 1)
        for batch in np.reshape(found["published"][name]["values"], (-1, len(by_step))):
            axes.plot(steps, batch, color=tint(colour, 0.35), lw=0.8, zorder=1)
        line(axes, steps, by_step, colour)
        axes.set(title=title, ylabel=label)
        from_zero(axes)
        step_axis(axes, 1, len(by_step), "step")
    return figure


@styled
def modeling(found: Json) -> Figure:
    """Published: spread of the mean state, which grows because states add up. Ours: how many dimensions take part in Δ."""
    figure, (published, ours) = panels_and_strip(found, 2.9)
    tested, steps = found["published"]["brain_hypothesis_test"], len(found["participation_by_step"])
    stages = ["embeddings", *(f"step_{t}" for t in range(steps))]
    for measure, colour, marker in (("breadth", BLUE, "o"), ("mean_activity", AMBER, "s")):
        published.plot([tested[f"{stage}_{measure}"] for stage in stages], color=colour, marker=marker, ms=4.5, lw=1.6)
    narrowest = tested["most_selective_step"]
    published.plot([narrowest + 1], [tested[f"step_{narrowest}_breadth"]], "o", ms=11, mfc="none", mec=INK, mew=1.2)
    published.set(ylabel="of the mean state")
    from_zero(published)
    step_axis(published, 0, steps, "after step")
    keys = [Line2D([], [], color=BLUE, marker="o", ms=4.5, label="breadth")]
    keys.append(Line2D([], [], color=AMBER, marker="s", ms=4.5, label="mean activity"))
    keys.append(Line2D([], [], color=INK, marker="o", ms=8, mfc="none", ls="none", label="narrowest step"))
    titled(published, "Published: breadth of the mean state", keys, 3)
    at = np.arange(1, steps + 1)
    line(ours, at, found["participation_by_step"], BLUE)
    line(ours, at, found["untrained_participation_by_step"], CONTROL, **PALE)
    ours.set(ylabel="share of dimensions (%)")
    ours.margins(y=0.15)
    at_least(ours, 0.02)
    per_cent_axis(ours)
    step_axis(ours, 1, steps, "step")
    keys = [Line2D([], [], color=BLUE, marker="o", ms=4.5, label="trained")]
    keys.append(Line2D([], [], color=CONTROL, marker="o", ms=4, mfc="white", ls=(0, (4, 2)), label="model untrained"))
    titled(ours, f"Ours: dimensions in Δ, permutation p = {found['permutation_p']:.3f}", keys)
    return figure


@styled
def dimensionwise(found: Json) -> Figure:
    """Counts by both rules, and every dimension's path in the colour of its class by ours."""
    figure, (counts, paths) = panels_and_strip(found, 2.9, (1, 1.25))
    places = np.arange(len(ROLES))
    for rule, shift, strength in ((found["published"], -0.2, 0.45), (found, 0.2, 1.0)):
        values = [rule["pattern_counts"][role] for role in ROLES]
        counts.barh(places + shift, values, 0.38, color=[tint(colour, strength) for colour in ROLES.values()])
        for place, value in zip(places + shift, values, strict=True):
            counts.annotate(count(value), (value, place), (3, 0), textcoords="offset points", va="center", fontsize=SMALL)
    counts.set_yticks(places, list(ROLES))
    counts.set(xlabel="dimensions", ylim=(len(ROLES) - 0.4, -0.6))
    counts.margins(x=0.18)
    counts.grid(False)
    keys = [Patch(color=tint(INK, 0.45), label="published rule"), Patch(color=INK, label="beyond 2 standard errors")]
    titled(counts, "Dimensions of each class", keys, 2)
    activity = np.array(found["published"]["step_activities"])
    faint = min(1.0, max(0.12, 12 / activity.shape[1]))
    for role, colour in ROLES.items():
        members = found["dimension_patterns"][role]
        if members:
            paths.plot(activity[:, members], color=colour, lw=0.7, alpha=faint)
            paths.plot(activity[:, members].mean(1), color=colour, lw=2.4, marker="o", ms=4)
    paths.set(ylabel="mean |h| of the dimension")
    from_zero(paths)
    step_axis(paths, 0, len(activity) - 1, "after step")
    titled(paths, "Each dimension, and the mean of each class (thick)")
    return figure


@styled
def difficulty(found: Json) -> Figure:
    """Published: growth of |h|. Ours: the whole way that a state is moved, beside the same tokens untrained."""
    figure, (curves, increases, path) = panels_and_strip(found, 2.9, (1.5, 1, 1.2))
    for (name, colour), marker, aside in zip(DIFFICULTY.items(), MARKERS, (-0.08, 0, 0.08), strict=False):
        part = found["published"].get(name)
        if part is not None:
            at = np.arange(len(part["mean"])) + aside
            curves.errorbar(
                at, part["mean"], part["std"], color=colour, marker=marker, ms=4.5, lw=1.6, elinewidth=0.8, capsize=2
            )
    curves.set(ylabel="mean |h|")
    from_zero(curves)
    stages = max((len(part["mean"]) for part in found["published"].values()), default=1)
    step_axis(curves, 0, stages - 1, "after step")
    titled(curves, "Published: size of states ± deviation", _difficulty_keys(found), 3)
    for index, (name, colour) in enumerate(DIFFICULTY.items()):
        increases.bar(index, floats([found["published_increase"].get(name)]), 0.6, color=colour)
    _difficulty_axis(increases, "last |h| − first |h|")
    titled(increases, "Published: growth")
    for index, (name, colour) in enumerate(DIFFICULTY.items()):
        dots(path, [index], [found["path"][name]], colour)
        dots(path, [index + 0.2], [found["untrained_path"][name]], CONTROL, mfc="white", ms=4.5)
    _difficulty_axis(path, "Σ mean |Δ|")
    from_zero(path)
    path.margins(y=0.1)
    key = Line2D([], [], color=CONTROL, marker="o", mfc="white", ls="none", label="model untrained")
    titled(path, "Ours: way moved", [key])
    return figure


@styled
def layerwise_activity(found: Json) -> Figure:
    figure, (stages, ends) = panels_and_strip(found, 2.7, (1.6, 1))
    at = np.arange(len(found["by_stage"]))
    line(stages, at, found["by_stage"], BLUE)
    line(stages, at, found["randomly_signed_by_stage"], CONTROL, **PALE)
    stages.set(ylabel="mean |h|")
    from_zero(stages)
    step_axis(stages, 0, len(at) - 1, "after step")
    keys = [Line2D([], [], color=BLUE, marker="o", ms=4.5, label="measured")]
    keys.append(Line2D([], [], color=CONTROL, marker="o", mfc="white", ls=(0, (4, 2)), label="the same updates, random signs"))
    titled(stages, "Size of states", keys)
    published = found["published"]["accumulation_pattern"]
    random = found["randomly_signed_by_stage"][-1]["value"]
    ends.bar(
        range(3),
        [published["early_activity"], published["late_activity"], random],
        0.6,
        color=[tint(BLUE, 0.45), BLUE, CONTROL],
    )
    ends.set_xticks(range(3), ["start", "end", "end,\nrandom signs"])
    ends.set(ylabel="mean |h|")
    titled(ends, "Published: end above start?")
    return figure


@styled
def gate_entropy(found: Json) -> Figure:
    """At every step; the published panel shows the last one with the deviation over tokens."""
    figure, (by_step, last) = panels_and_strip(found, 2.9, (1.3, 1))
    steps = max((len(values) for values in found["entropy_by_step"].values()), default=1)
    for (name, colour), marker in zip(DIFFICULTY.items(), MARKERS, strict=False):
        if name in found["entropy_by_step"]:
            by_step.plot(
                range(1, steps + 1), floats(found["entropy_by_step"][name]), color=colour, marker=marker, ms=4.5, lw=1.6
            )
    by_step.axhline(np.log(2), color=QUIET, lw=0.9, ls="--")
    by_step.set(ylabel="binary entropy of gates (nats)")
    by_step.margins(y=0.12)
    at_least(by_step, 0.02)
    step_axis(by_step, 1, steps, "step")
    titled(by_step, "Entropy by step (dashed: ln 2)", _difficulty_keys(found), 3)
    for index, (name, colour) in enumerate(DIFFICULTY.items()):
        published = found["published"][f"{name}_tokens"]
        if published["mean_entropy"] is None:
            continue
        spread = published["std_entropy"]
        last.errorbar(index + 0.18, published["mean_entropy"], spread, color=tint(colour, 0.5), marker="_", lw=0, elinewidth=3)
        dots(last, [index], [found["entropy"][name]], colour)
    last.axhline(np.log(2), color=QUIET, lw=0.9, ls="--")
    _difficulty_axis(last, "nats")
    last.margins(y=0.12)
    at_least(last, 0.02)
    keys = [Line2D([], [], color=INK, marker="o", label="with interval")]
    keys.append(Line2D([], [], color=tint(INK, 0.5), lw=3, label="published: ± deviation"))
    titled(last, "At the last step", keys)
    return figure


def _difficulty_keys(found: Json) -> list[Line2D]:
    """With the number of targets, where the published part counts them."""
    keys = []
    for (name, colour), marker in zip(DIFFICULTY.items(), MARKERS, strict=False):
        part = found["published"].get(name) or found["published"].get(f"{name}_tokens") or {"count": 0}
        keys.append(Line2D([], [], color=colour, marker=marker, ms=4.5, label=f"{name} ({count(part['count'])})"))
    return keys


def _difficulty_axis(axes: Axes, label: str) -> None:
    axes.set_xticks(range(3), list(DIFFICULTY))
    axes.set(ylabel=label, xlim=(-0.55, 2.55))
