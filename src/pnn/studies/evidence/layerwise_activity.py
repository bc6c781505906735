"""E8, layer-wise activity: does activity accumulate over the steps?

Published: mean |h| is larger at the end than at the start. Adding almost anything to a normed vector makes it larger. The
control adds just that: updates of the same size in every dimension, each with a random sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pnn.analysis.controls import generator
from pnn.analysis.subject import Subject
from pnn.analysis.totals import Totals, finding, ratio, ratios
from pnn.analysis.trace import Trace, trace_text
from pnn.studies.registry import Experiment

ABOUT = Experiment(
    number=8,
    key="layerwise_activity_analysis",
    figure="layerwise_activity_analysis",
    question="Does activity accumulate?",
    picture="Adding almost anything makes a state larger: the grey line adds updates of the same sizes with random signs.",
    hypotheses={"layerwise_activity": "activity accumulates over the steps, more than adding anything would make it"},
    published_answer=("accumulation_pattern", "supports_accumulation_hypothesis"),
)


def randomly_signed(trace: Trace) -> list[torch.Tensor]:
    """h⁰ … hᵀ had every number of every Δ had a random sign."""
    states = [trace.states[0]]
    for number, step in enumerate(trace.steps, 1):
        source = generator(int(trace.batch.indices[0]), number, 3)
        signs = torch.randint(0, 2, step.change.shape, generator=source).to(step.change) * 2 - 1
        states.append(states[-1] + step.change * signs)
    return states


def run(subject: Subject) -> dict[str, Any]:
    totals = Totals(len(subject.text))
    batches: list[list[float]] = []
    for trace in trace_text(subject.model, subject.text):
        sizes = torch.stack([h.abs().mean(1) for h in trace.states], 1)
        totals.count("tokens", trace.sequence)
        totals.add("size", trace.sequence, sizes)
        totals.add("random", trace.sequence, torch.stack([h.abs().mean(1) for h in randomly_signed(trace)], 1))
        batches.append(sizes.mean(0).tolist())
    mean, deviation = np.mean(batches, 0), np.std(batches, 0)
    last = subject.num_steps
    columns = np.concatenate((totals.of("size")[:, [0, last]], totals.of("random")[:, [last]]), 1)
    return {
        "published": {
            "mean_activity_per_step": mean.tolist(),
            "std_activity_per_step": deviation.tolist(),
            "accumulation_pattern": {
                "early_activity": float(mean[0]),
                "late_activity": float(mean[-1]),
                "activity_increase": float(mean[-1] - mean[0]),
                "supports_accumulation_hypothesis": bool(mean[-1] > mean[0]),
            },
            "num_steps": last + 1,
        },
        "by_stage": ratios(totals, "size", "tokens"),
        "randomly_signed_by_stage": ratios(totals, "random", "tokens"),
        **finding(
            ABOUT.hypotheses["layerwise_activity"],
            "growth of mean |h| from the embeddings to the end, as a share of the former",
            columns,
            lambda sums: ratio(sums[..., [1, 0]]) - 1,
            margin=0.01,
            control="updates of the same sizes with random signs",
            control_statistic=lambda sums: ratio(sums[..., [2, 0]]) - 1,
        ),
    }
