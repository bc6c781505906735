"""E2, "optogenetics": suppress a part of the refiner and see what is lost.

The published intervention multiplies a part's output by 1 − r. Where δ is normed (the published variant), scaling the FFN by
any factor above zero is undone by the norm behind it; so δ is also scaled behind the norm. And since a part that is scaled
away takes its usual contribution with it, whatever it was, the test of a causal role is mean ablation: the part's output is
replaced by its mean over all tokens, at every step and at single ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pnn.analysis.subject import Subject, accuracy_drop, drop_of, plain_metrics
from pnn.analysis.totals import Array, Smallest, finding
from pnn.analysis.trace import blocks_of
from pnn.studies.registry import Experiment

ABOUT = Experiment(
    number=2,
    key="optogenetics_results",
    figure="optogenetics_suppression",
    question="Does each part have a role?",
    picture=(
        "Above, a part's output is scaled down as published; below, it is replaced by its mean over all tokens, which takes "
        "away what it says about a token and leaves its usual size. The further accuracy falls, the more the part does."
    ),
    hypotheses={"optogenetics": "each of {parts} has a causal role in predicting"},
)

RATES = (0.25, 0.5, 0.75, 1.0)
MARGIN = 0.01  # of accuracy


def run(subject: Subject) -> dict[str, Any]:
    base, components = subject.baseline, subject.components
    published = {"baseline": plain_metrics(base)}
    suppression: dict[str, Any] = {}
    for component in [*components, *(["delta"] if has_delta_norm(subject) else [])]:
        for rate in RATES:
            measured = subject.suppressed(component, rate)
            if component in components:
                published[f"{component}_suppressed_{round(100 * rate)}"] = plain_metrics(measured)
            suppression.setdefault(component, {})[f"{round(100 * rate)}"] = drop_of(base, measured)
    conditions = [base, *(subject.ablated(c) for c in components), subject.naive_baseline()]
    conditions += [subject.naive_ablated(c) for c in components]
    count = len(components)

    def drops(sums: Array, baseline: int) -> Array:
        return np.stack([accuracy_drop(sums, baseline, baseline + 1 + i) for i in range(count)], -1)

    return {
        "published": published,
        "suppression": suppression,
        "undone_by_norm": undone_by_norm(subject),
        "mean_ablation": {c: drop_of(base, subject.ablated(c)) for c in components},
        "mean_ablation_by_step": {
            c: [drop_of(base, subject.ablated(c, step)) for step in range(1, subject.num_steps + 1)] for c in components
        },
        **finding(
            ABOUT.hypotheses["optogenetics"].format(parts=", ".join(components)),
            "smallest drop of accuracy among them under mean ablation at all steps",
            np.concatenate(conditions, 1),
            Smallest(lambda sums: drops(sums, 0)),
            margin=MARGIN,
            control="the same ablations of the untrained model",
            control_statistic=Smallest(lambda sums: drops(sums, count + 1)),
        ),
    }


def has_delta_norm(subject: Subject) -> bool:
    """Whether δ is what a norm puts out. (Where a rewrite proposes a whole state, the norm is that state's.)"""
    normed = all(getattr(block, "delta_norm", None) is not None for block in blocks_of(subject.model))
    return normed and getattr(subject.model.config, "update", None) != "rewrite"


def undone_by_norm(subject: Subject) -> bool:
    """Whether scaling the FFN by a half, before a norm, changes nothing that can be seen: measured, not assumed."""
    half, base = subject.suppressed("ffn", 0.5), subject.baseline
    return has_delta_norm(subject) and bool(np.abs(half[:, 2] - base[:, 2]).sum() <= 1e-3 * base[:, 2].sum())
