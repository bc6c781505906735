"""E6, layer importance: the parts' ranking by both rules."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pnn.figures.findings import panels_and_strip
from pnn.figures.marks import PART, PART_MARKER, estimates, titled
from pnn.figures.parts import PART_NAMES, UNDONE, is_wide, part_keys
from pnn.figures.style import INK, QUIET, SMALL, per_cent_axis, styled, tint
from pnn.numbers import bare_per_cent
from pnn.results import Json


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
    ranking.set_yticks(range(len(ours)), [PART_NAMES[part] for part in ours])
    ranking.set(xlabel="accuracy lost (points)", ylim=(len(ours) - 0.45, -0.55))
    ranking.use_sticky_edges = False
    ranking.margins(x=0.14)
    ranking.axvline(0, color=QUIET, lw=0.8)
    ranking.grid(False)
    ranking.xaxis.set_major_formatter(lambda value, _: bare_per_cent(value, 0 if is_wide(ranking) else 1))
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
    titled(rates, "Published: drop by rate", part_keys([part for part in PART if part in ours]))
    return figure
