"""E5, token difficulty: do hard tokens need more processing?

Published: how much mean |h| grows from the embeddings to the end. Ours: how far the state is moved in all, Σ_t mean |Δᵗ|,
which a state that turns back cannot hide. Control: the same tokens in the untrained model; what they differ in there is the
embeddings' doing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pnn.analysis.subject import DIFFICULTIES, EASY, HARD, WHAT_IS_HARD, Subject, difficulty
from pnn.analysis.totals import Totals, difference_of_ratios, finding, ratios, two_ratios
from pnn.analysis.trace import trace_batch
from pnn.stats import finite
from pnn.studies.registry import Experiment

ABOUT = Experiment(
    number=5,
    key="token_difficulty_analysis",
    figure="token_difficulty_analysis",
    question="Are hard tokens moved further?",
    picture=(
        "If so, the points on the right rise from easy to hard, more than the hollow ones: the same tokens in the untrained "
        "model. " + WHAT_IS_HARD
    ),
    hypotheses={"difficulty": "hard tokens are moved further than easy ones"},
)


def run(subject: Subject) -> dict[str, Any]:
    totals = Totals(len(subject.text))
    stages = subject.num_steps + 1
    squares = torch.zeros(len(DIFFICULTIES), stages, dtype=torch.float64)
    for batch in subject.text.batches():
        trace, control = trace_batch(subject.model, batch), trace_batch(subject.naive, batch)
        sequence, at = trace.target_sequence, trace.targets
        groups = torch.nn.functional.one_hot(difficulty(trace.last.probability), len(DIFFICULTIES))
        sizes = torch.stack([h[at].abs().mean(1) for h in trace.states], 1)
        totals.add("targets", sequence, groups)
        totals.add("size", sequence, groups[:, :, None] * sizes[:, None])
        squares += (groups[:, :, None] * sizes[:, None].double().square()).sum(0).cpu()
        for name, found in (("path", trace), ("untrained path", control)):
            path = torch.stack([step.change[at].abs().mean(1) for step in found.steps], 1).sum(1)
            totals.add(name, sequence, groups * path[:, None])
    counts = totals.of("targets").sum(0)
    means = totals.of("size").sum(0).reshape(len(DIFFICULTIES), stages) / np.maximum(counts, 1)[:, None]
    deviations = np.sqrt(np.maximum(squares.numpy() / np.maximum(counts, 1)[:, None] - means**2, 0))

    columns = [two_ratios(totals, name, "targets", HARD, EASY) for name in ("path", "untrained path")]

    return {
        "published": {
            name: {"mean": means[i].tolist(), "std": deviations[i].tolist(), "count": int(counts[i])}
            for i, name in enumerate(DIFFICULTIES)
            if counts[i]
        },
        "published_increase": {name: finite(means[i, -1] - means[i, 0]) for i, name in enumerate(DIFFICULTIES) if counts[i]},
        "path": dict(zip(DIFFICULTIES, ratios(totals, "path", "targets"), strict=True)),
        "untrained_path": dict(zip(DIFFICULTIES, ratios(totals, "untrained path", "targets"), strict=True)),
        **finding(
            ABOUT.hypotheses["difficulty"],
            "Σ_t mean |Δᵗ| of hard targets − that of easy ones",
            np.concatenate(columns, 1),
            lambda sums: difference_of_ratios(sums[..., :4]),
            control="the same tokens in the untrained model",
            control_statistic=lambda sums: difference_of_ratios(sums[..., 4:]),
        ),
    }
