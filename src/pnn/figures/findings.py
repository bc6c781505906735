"""A hypothesis, its effect and its control on one axis, and the verdict in words. The verdict is read, never drawn from the
picture; the reason beside it follows from the same intervals."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, cast

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from pnn.figures.marks import BLUE, CONTROL
from pnn.figures.style import INK, NORMAL, QUIET, SMALL, WIDTH
from pnn.numbers import estimate
from pnn.results import EstimateJson, Finding, Json
from pnn.stats import Estimate

LINE = 116  # letters of the small size across a figure
STRIP = 1.6  # inches


def reason(found: Finding) -> str:
    """Why the verdict is what it is, from the intervals."""
    margin, effect = found["margin"], Estimate.from_json(found["effect"])
    beyond = Estimate.from_json(found["effect_beyond_control"]) if "effect_beyond_control" in found else None
    least = "zero" if margin == 0 else f"the margin of {margin:g}"
    if math.isnan(effect.value):
        return "the effect could not be measured: a group has no members"
    if any(math.isnan(end) for end in (*effect, *(beyond or ()))):
        return "no interval could be computed"
    if effect.high <= margin:
        return f"the effect's interval lies below {least}"
    if beyond is not None and beyond.high <= 0:
        return "the effect is not larger than the control's"
    if effect.low <= margin:
        return f"the effect's interval includes {least}"
    if beyond is not None and beyond.low <= 0:
        return "the effect cannot be told from the control's"
    return f"the effect's interval lies above {least}" + ("" if beyond is None else " and above its control")


def compared(found: Finding) -> list[tuple[str, str, EstimateJson]]:
    """What stands beside the effect: its role, what it is, its estimate. A control enters the verdict, a comparison
    does not."""
    if "control" in found:
        return [("control", found["control"]["what"], found["control"])]
    if "untrained" in found:
        return [("for comparison", "the same model untrained", found["untrained"])]
    return []


def verdict_line(found: Finding) -> str:
    if "not_done" in found:
        return f"Not done: {found['hypothesis']}. Because {found['not_done']}."
    beside = "".join(f"; {role} {estimate(value)}" for role, _, value in compared(found))
    return f"{found['verdict'].capitalize()}: {found['hypothesis']}. Effect {estimate(found['effect'])}{beside}."


def write_verdicts(figure: Figure, findings: Mapping[str, Finding]) -> None:
    """One line or two per finding, under all panels."""
    lines = [textwrap.fill(verdict_line(found), LINE, subsequent_indent="    ") for found in findings.values()]
    if lines:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=SMALL, color=INK, linespacing=1.35)


def panels_and_strip(
    found: Json, height: float, widths: tuple[float, ...] = (1, 1), *, rows: int = 1, keys: Sequence[Artist] = ()
) -> tuple[Figure, list[Axes]]:
    """A figure of `rows` × len(widths) panels of `height` inches per row under their common keys, with the finding below."""
    above = rows * height + (0.25 if keys else 0)
    figure = Figure(figsize=(WIDTH, above + STRIP), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(above, STRIP))
    top, bottom = parts
    panels = top.subplots(rows, len(widths), width_ratios=widths, squeeze=False)
    if keys:
        top.legend(handles=list(keys), loc="outside upper center", ncols=len(keys))
    strip(bottom, cast(Finding, found))
    return figure, list(panels.flat)


def strip(figure: SubFigure, found: Finding) -> None:
    """Effect and control side by side with zero and the margin that the effect has to pass, and the verdict."""
    axes = figure.subplots()
    rows: list[tuple[str, EstimateJson, str]] = [("effect", found["effect"], BLUE)]
    rows += [(f"{role}: {what}", value, CONTROL) for role, what, value in compared(found)]
    for place, (_, value, colour) in enumerate(rows):
        ink = colour if place == 0 else QUIET
        axes.text(1.01, place, estimate(value), transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL, color=ink)
        if value["value"] is not None:
            low, high = (value["value"] if end is None else end for end in value["interval"])
            axes.hlines(place, low, high, color=colour, lw=2.2)
            axes.plot([value["value"]], [place], "o", color=colour, ms=6, mfc=colour if place == 0 else "white", mew=1.4)
    axes.axvline(0, color=QUIET, lw=0.8)
    if found["margin"]:
        axes.axvline(found["margin"], color=INK, lw=1.0, ls=":")
        name, at = f"margin {found['margin']:g}", (found["margin"], -0.5)
        axes.annotate(name, at, (0, 1), textcoords="offset points", ha="center", fontsize=SMALL)
    axes.margins(x=0.08)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [textwrap.fill(label, 30) for label, _, _ in rows])
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(textwrap.fill(found["measure"], LINE), fontsize=SMALL)
    question = textwrap.fill(f"Is it so that {found['hypothesis']}?", LINE - 12)
    figure.suptitle(question, x=0.01, ha="left", fontsize=NORMAL)
    figure.supxlabel(_sentence(found), x=0.01, ha="left", fontsize=SMALL, color=INK)


def _sentence(found: Finding) -> str:
    return textwrap.fill(f"{found['verdict'].capitalize()}: {reason(found)}.", LINE)
