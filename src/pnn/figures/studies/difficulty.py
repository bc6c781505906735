"""E5, token difficulty: how far easy, medium and hard tokens are moved."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import (
    CONTROL,
    DIFFICULTY,
    MARKERS,
    difficulty_axis,
    difficulty_keys,
    dots,
    floats,
    from_zero,
    step_axis,
    titled,
)
from pnn.figures.style import styled
from pnn.results import Json


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
    titled(curves, "Published: size of states ± deviation", difficulty_keys(found), 3)
    for index, (name, colour) in enumerate(DIFFICULTY.items()):
        increases.bar(index, floats([found["published_increase"].get(name)]), 0.6, color=colour)
    difficulty_axis(increases, "last |h| − first |h|")
    titled(increases, "Published: growth")
    for index, (name, colour) in enumerate(DIFFICULTY.items()):
        dots(path, [index], [found["path"][name]], colour)
        dots(path, [index + 0.2], [found["untrained_path"][name]], CONTROL, mfc="white", ms=4.5)
    difficulty_axis(path, "Σ mean |Δ|")
    from_zero(path)
    path.margins(y=0.1)
    key = Line2D([], [], color=CONTROL, marker="o", mfc="white", ls="none", label="model untrained")
    titled(path, "Ours: way moved", [key])
    return figure
