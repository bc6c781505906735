"""E1, "MEG": activity inside a step. The published script averages it and draws it, with no decision.

That a delta is generated, then gated, then added, is the order of the equations and holds for any weights: nothing to test.
What can be tested is whether the cycle settles: the update gets smaller from every step to the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pnn.analysis.subject import Subject, with_steps
from pnn.analysis.totals import Array, Smallest, Totals, finding, ratio, ratios
from pnn.analysis.trace import Trace, trace_batch
from pnn.studies.registry import Experiment

ABOUT = Experiment(
    number=1,
    key="meg_analysis",
    figure="meg_temporal_patterns",
    question="Does refinement settle?",
    picture=(
        "Activity inside a step, one panel a quantity. A refinement that settles has an update that falls from every step to "
        "the next."
    ),
    hypotheses={"meg": "the update gets smaller from every step to the next: refinement settles"},
    needs=(with_steps(2),),
)

SERIES = ("attention_output", "delta_generation", "gate_computation", "hidden_update")


def activity(trace: Trace) -> dict[str, list[torch.Tensor]]:
    """Mean absolute size over dimensions, (tokens,) a step."""
    found = {
        "attention_output": [step.attention.abs().mean(1) for step in trace.steps],
        "delta_generation": [step.ffn.abs().mean(1) for step in trace.steps],
        "hidden_update": [step.change.abs().mean(1) for step in trace.steps],
    }
    if all(step.gate is not None for step in trace.steps):
        found["gate_computation"] = [step.gate.mean(1) for step in trace.steps if step.gate is not None]
    return found


def run(subject: Subject) -> dict[str, Any]:
    totals, steps = Totals(len(subject.text)), subject.num_steps
    published: dict[str, list[float]] = {}
    for batch in subject.text.batches():
        trace, control = trace_batch(subject.model, batch), trace_batch(subject.naive, batch)
        totals.count("tokens", trace.sequence)
        for name, by_step in activity(trace).items():
            totals.add(name, trace.sequence, torch.stack(by_step, 1))
            published.setdefault(name, []).extend(float(values.mean()) for values in by_step)
        totals.add("untrained", trace.sequence, torch.stack(activity(control)["hidden_update"], 1))
    published["activity_magnitude"] = published["hidden_update"]  # identical by construction

    def falls(sums: Array, first: int) -> Array:
        """As a share of the first step's update."""
        sizes = np.stack([ratio(sums[..., [first + t, -1]]) for t in range(steps)], -1)
        return -np.diff(sizes) / sizes[..., :1]

    return {
        "published": {
            name: {"mean": float(np.mean(values)), "std": float(np.std(values)), "values": values}
            for name, values in published.items()
        },
        "by_step": {name: ratios(totals, name, "tokens") for name in SERIES if name in totals},
        "untrained_update_by_step": ratios(totals, "untrained", "tokens"),
        **finding(
            ABOUT.hypotheses["meg"],
            "smallest fall of mean |Δ| from one step to the next, as a share of the first",
            np.concatenate((totals.of("hidden_update"), totals.of("untrained"), totals.of("tokens")), 1),
            Smallest(lambda sums: falls(sums, 0)),
            margin=0.01,
            control="the same model untrained",
            control_statistic=Smallest(lambda sums: falls(sums, steps)),
        ),
    }
