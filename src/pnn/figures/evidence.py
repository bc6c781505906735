"""The figure of each of the ten experiments, by its published name: one result of experimental_results.json in, a figure out.

Every figure has the published measure, ours with intervals, and across the bottom the hypothesis: its effect beside its
control, and the verdict as the experiment computed it.
"""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.figure import Figure

from pnn.figures.evidence_activity import difficulty, dimensionwise, gate_entropy, layerwise_activity, meg, modeling
from pnn.figures.evidence_interventions import cross_token, gate_specificity, layer_importance, optogenetics
from pnn.figures.results import Json

EVIDENCE_FIGURES: dict[str, Callable[[Json], Figure]] = {
    "meg": meg,
    "optogenetics": optogenetics,
    "modeling": modeling,
    "dimensionwise": dimensionwise,
    "difficulty": difficulty,
    "layer_importance": layer_importance,
    "gate_specificity": gate_specificity,
    "layerwise_activity": layerwise_activity,
    "cross_token": cross_token,
    "gate_entropy": gate_entropy,
}
