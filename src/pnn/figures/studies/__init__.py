"""The figure of each analysis and experiment: the function of its name in the file of its name, result in, figure out.

Figures of the published experiments have the published measure, ours with intervals, and across the bottom the hypothesis: its
effect beside its control, and the verdict as the experiment computed it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from matplotlib.figure import Figure

from pnn.results import Json


def figure_of(name: str) -> Callable[[Json], Figure]:
    draw: Callable[[Json], Figure] = getattr(import_module(f"pnn.figures.studies.{name}"), name)
    return draw
