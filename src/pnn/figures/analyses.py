"""The figure of each analysis, by its name: analysis/<name>.json in, a figure out."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from pnn.figures.convergence import convergence
from pnn.figures.gates import gates
from pnn.figures.optimisation import optimisation
from pnn.figures.results import Json
from pnn.figures.rewrites import rewrites

ANALYSIS_FIGURES: dict[str, Callable[[Json], Figure]] = {
    "convergence": convergence,
    "gates": gates,
    "optimisation": optimisation,
    "rewrites": rewrites,
}
