"""What the figures of interventions on a model's parts share: the parts' names and keys, and how far an axis reaches."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from pnn.figures.marks import PART, PART_MARKER

PART_NAMES = {"attention": "attention", "gate": "gate", "ffn": "FFN", "delta": "δ behind its norm"}
UNDONE = "\nscaling the FFN by ½ changes nothing"


def part_keys(parts: Sequence[str]) -> list[Line2D]:
    return [Line2D([], [], color=PART[part], marker=PART_MARKER[part], ms=4.5, label=PART_NAMES[part]) for part in parts]


def is_wide(axes: Axes) -> bool:
    low, high = axes.get_xlim()
    return high - low > 0.05
