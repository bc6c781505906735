"""E9, cross-token interference: tokens by their neighbours, and what showing one of them does."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import CONTROL, DIFFICULTY, at_least, dots, floats, titled
from pnn.figures.style import INK, QUIET, per_cent_axis, styled
from pnn.numbers import count
from pnn.results import Json

CONTEXTS = {"easy_context": "both easy", "mixed_context": "mixed", "hard_context": "both hard"}


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
