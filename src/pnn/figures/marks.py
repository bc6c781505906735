"""What the figures of analyses are made of: estimates with their intervals as lines, dots and bars, and the groups' colours.

An estimate is {"value": …, "interval": [low, high]} as the analyses write it. Null stands for what could not be measured (a
group without members, an interval of one sequence) and draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from pnn.figures.style import INK, PALETTE, SMALL, ink_on
from pnn.kinds import of_result
from pnn.numbers import count, written
from pnn.results import EstimateJson, Json

Array = NDArray[np.float64]

BLUE, ORANGE, GREEN, PINK, AMBER, SKY = PALETTE
CONTROL = "#8f8f8f"  # whatever an effect has to beat
DIFFICULTY = {"easy": SKY, "medium": BLUE, "hard": ORANGE}
PART = {"attention": BLUE, "gate": ORANGE, "ffn": GREEN, "delta": PINK}
TOKEN = {"ordinary": BLUE, "masked": ORANGE, "special": GREEN}
MARKERS = ("o", "s", "^", "D", "v", "P")
PART_MARKER = dict(zip(PART, MARKERS, strict=False))
ROOM_FOR_A_NUMBER = 0.06  # of a bar that shows shares of a whole


def floats(values: Iterable[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def estimates(found: Sequence[EstimateJson]) -> tuple[Array, Array]:
    """Values (n,) and how far their intervals reach down and up (2, n)."""
    values = floats(one["value"] for one in found)
    low, high = (floats(one["interval"][end] for one in found) for end in (0, 1))
    return values, np.stack((np.maximum(values - low, 0), np.maximum(high - values, 0)))


def line(axes: Axes, at: Sequence[float] | NDArray[Any], found: Sequence[EstimateJson], colour: str, **looks: Any) -> None:
    """A line with whiskers. A control is drawn by `**PALE`."""
    values, reach = estimates(found)
    defaults: dict[str, Any] = {"marker": "o", "ms": 4.5, "lw": 1.6, "elinewidth": 1.0, "capsize": 2.5}
    axes.errorbar(at, values, reach, color=colour, **defaults | looks)


PALE: dict[str, Any] = {"ls": (0, (4, 2)), "lw": 1.2, "ms": 4.0, "mfc": "white", "elinewidth": 0.8, "capsize": 2.0}


def dots(axes: Axes, at: Sequence[float], found: Sequence[EstimateJson], colour: str | Sequence[str], **looks: Any) -> None:
    """Separate estimates: no line says that there is something between them."""
    shades = [colour] * len(found) if isinstance(colour, str) else colour
    for place, one, shade in zip(at, found, shades, strict=True):
        line(axes, [place], [one], shade, **{"ls": "none", "ms": 5.5, **looks})


def bars(
    axes: Axes, at: Sequence[float] | NDArray[Any], found: Sequence[EstimateJson], colour: Any, width: float = 0.62
) -> None:
    values, reach = estimates(found)
    axes.bar(at, values, width, color=colour)
    axes.errorbar(at, values, reach, color=INK, ls="none", elinewidth=0.9, capsize=2)


def stacked_rows(axes: Axes, rows: Mapping[str, Sequence[float]], colours: Sequence[str]) -> None:
    """Shares of a whole as horizontal bars, the first row on top. A share that leaves room has its number written in it."""
    for place, shares in enumerate(rows.values()):
        left = 0.0
        for share, colour in zip(shares, colours, strict=True):
            axes.barh(place, share, 0.7, left, color=colour, edgecolor="white", linewidth=0.6)
            if share >= ROOM_FOR_A_NUMBER:
                text = written(100 * share, 0)
                axes.text(left + share / 2, place, text, ha="center", va="center", fontsize=SMALL, color=ink_on(colour))
            left += share
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5))
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: written(100 * value, 0)))


# Axes ------------------------------------------------------------------------------------------------------------------


def step_axis(axes: Axes, first: int, last: int, label: str = "refinement step") -> None:
    axes.set(xlabel=label, xlim=(first - 0.4, last + 0.4))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, min_n_ticks=1))


def from_zero(axes: Axes) -> None:
    """Start at zero, with some air above the highest mark."""
    axes.set_ylim(0, 1.06 * max(axes.get_ylim()[1], 1e-9))


def at_least(axes: Axes, span: float) -> None:
    """Widen a vertical axis that would blow up differences below what anybody cares for."""
    low, high = axes.get_ylim()
    more = max(0.0, span - (high - low)) / 2
    axes.set_ylim(low - more, high + more)


def unit_of(result: Json) -> str:
    """What a step of this model is called."""
    return "refinement step" if of_result(result).has_steps else "layer"


def titled(axes: Axes, title: str, keys: Sequence[Any] = (), columns: int = 4) -> None:
    """The title, and between it and the panel room for a line of keys, where no data can be under them. A panel without keys
    beside one that has some leaves the same room, so that their titles stand on one line."""
    axes.set_title(title, pad=22)
    if not keys:
        return
    legend = axes.legend(
        handles=list(keys),
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        borderpad=0.1,
        handlelength=1.4 if columns <= 4 else 0.8,
        handletextpad=0.4,
        columnspacing=0.9 if columns <= 4 else 0.6,
        labelspacing=0.3,
    )
    legend.set_in_layout(False)  # a panel is not to shrink for its keys


def shades(count: int) -> list[str]:
    """From light to dark, one per step."""
    start, end = np.array(to_rgb("#a6cbe3")), np.array(to_rgb("#08306b"))
    return [to_hex(start + (end - start) * (i / max(count - 1, 1))) for i in range(count)]


# Easy, medium and hard tokens --------------------------------------------------------------------------------------------


def difficulty_keys(found: Json) -> list[Line2D]:
    """With the number of targets, where the published part counts them."""
    keys = []
    for (name, colour), marker in zip(DIFFICULTY.items(), MARKERS, strict=False):
        part = found["published"].get(name) or found["published"].get(f"{name}_tokens") or {"count": 0}
        keys.append(Line2D([], [], color=colour, marker=marker, ms=4.5, label=f"{name} ({count(part['count'])})"))
    return keys


def difficulty_axis(axes: Axes, label: str) -> None:
    axes.set_xticks(range(3), list(DIFFICULTY))
    axes.set(ylabel=label, xlim=(-0.55, 2.55))
