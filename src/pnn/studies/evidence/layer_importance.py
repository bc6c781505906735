"""E6, layer importance: which part matters most?

Published: the drop of accuracy when a part's output is scaled by 0.25. Behind a norm that is no intervention at all, which
puts the FFN last by construction. Ours ranks by mean ablation and asks whether neighbours in the ranking really differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pnn.analysis.subject import Subject, accuracy_drop, drop_of, plain_metrics
from pnn.analysis.totals import Array, Smallest, finding
from pnn.studies.evidence.optogenetics import undone_by_norm
from pnn.studies.registry import Experiment

ABOUT = Experiment(
    number=6,
    key="layer_importance_analysis",
    figure="layer_importance_analysis",
    question="Which part matters most?",
    picture=(
        "Full bars are the accuracy lost when a part is replaced by its mean, pale ones when its output is scaled by 0.25, as "
        "published."
    ),
    hypotheses={"layer_importance": "the parts differ in importance: their ranking is not chance"},
)

RATES = (0.25, 0.5, 0.75)
MARGIN = 0.01  # of accuracy


def run(subject: Subject) -> dict[str, Any]:
    base, components = subject.baseline, subject.components
    plain = plain_metrics(base)
    published: dict[str, Any] = {}
    for component in components:
        for rate in RATES:
            metrics = plain_metrics(subject.suppressed(component, rate))
            published.setdefault(component, {})[f"suppression_{rate}"] = {
                "metrics": metrics,
                "accuracy_drop": plain["accuracy"] - metrics["accuracy"],
                "loss_increase": metrics["loss"] - plain["loss"],
            }
    scores = {c: published[c]["suppression_0.75"]["accuracy_drop"] for c in components}
    ablated = {c: drop_of(base, subject.ablated(c)) for c in components}
    order = sorted(components, key=lambda c: -ablated[c]["accuracy_drop"]["value"])

    def gaps(sums: Array) -> Array:
        """Between neighbours of the ranking found on the whole text."""
        return -np.diff(np.stack([accuracy_drop(sums, 0, 1 + i) for i in range(len(order))], -1))

    return {
        "published": {
            "baseline": plain,
            **published,
            "importance_ranking": [
                {"component": c, "importance_score": scores[c]} for c in sorted(components, key=lambda c: -scores[c])
            ],
        },
        "ffn_scaling_is_undone_by_norm": undone_by_norm(subject),
        "importance_ranking": [{"component": c, **ablated[c]} for c in order],
        **finding(
            ABOUT.hypotheses["layer_importance"],
            "smallest gap in accuracy drop under mean ablation between neighbours in the ranking",
            np.concatenate([base, *(subject.ablated(c) for c in order)], 1),
            Smallest(gaps),
            margin=MARGIN,
        ),
    }
