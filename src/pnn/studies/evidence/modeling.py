"""E3, "brain activity modelling": early exploration → middle selectivity → late integration?

The published measure is the spread over dimensions of the mean state. States add up, so it tends to grow with the step and
the first step wins by default; two of four steps count as "middle", so chance is one half. Ours asks each update how many
dimensions take part in it: (Σ|Δ_j|)² / (d Σ Δ_j²), 1 if all change alike, 1/d if one does. Selective means few.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pnn.analysis.subject import Subject, with_steps
from pnn.analysis.totals import Array, Smallest, Statistic, Totals, finding, ratio, ratios
from pnn.analysis.trace import Trace, trace_batch
from pnn.studies.registry import Experiment

ABOUT = Experiment(
    number=3,
    key="brain_activity_modeling",
    figure="brain_activity_patterns",
    question="Is a middle step more selective?",
    picture=(
        "On the left the published measure, which grows because states add up. On the right the share of dimensions that take "
        "part in an update: a selective step is a valley."
    ),
    hypotheses={"modeling": "a middle step is more selective than the first and the last"},
    needs=(with_steps(3),),
    published_answer=("brain_hypothesis_test", "supports_selectivity_hypothesis"),
)

PERMUTATIONS = 1000


def participation(trace: Trace) -> torch.Tensor:
    """(tokens, steps)."""

    def of(x: torch.Tensor) -> torch.Tensor:
        return x.abs().sum(1).square() / (x.shape[1] * x.square().sum(1)).clamp(min=1e-30)

    return torch.stack([of(step.change) for step in trace.steps], 1)


def run(subject: Subject) -> dict[str, Any]:
    steps = subject.num_steps
    totals = Totals(len(subject.text))
    patterns = torch.zeros(steps + 1, subject.model.config.hidden_size, dtype=torch.float64)
    for batch in subject.text.batches():
        trace, control = trace_batch(subject.model, batch), trace_batch(subject.naive, batch)
        totals.count("tokens", trace.sequence)
        totals.add("trained", trace.sequence, participation(trace))
        totals.add("untrained", trace.sequence, participation(control))
        patterns += torch.stack([h.double().sum(0).cpu() for h in trace.states])

    def narrower_middle(first: int) -> Smallest:
        """The narrower of the outer steps less the narrowest middle one."""

        def of(*numbers: int) -> Statistic:
            return lambda sums: np.stack([ratio(sums[..., [first + t, -1]]) for t in numbers], -1)

        return Smallest(of(0, steps - 1), less=of(*range(1, steps - 1)))

    columns = np.concatenate((totals.of("trained"), totals.of("untrained"), totals.of("tokens")), 1)
    return {
        "published": _published(patterns.numpy() / totals.of("tokens").sum()),
        "participation_by_step": ratios(totals, "trained", "tokens"),
        "untrained_participation_by_step": ratios(totals, "untrained", "tokens"),
        "permutation_p": _permutation_p(columns, steps, narrower_middle(0)),
        **finding(
            ABOUT.hypotheses["modeling"],
            "share of dimensions taking part in Δ: narrower outer step − narrowest middle step",
            columns,
            narrower_middle(0),
            margin=0.01,
            control="the same model untrained",
            control_statistic=narrower_middle(steps),
        ),
    }


def _published(patterns: Array) -> dict[str, Any]:
    names = ["embeddings", *(f"step_{t}" for t in range(len(patterns) - 1)), "final"]
    stages = [*patterns, patterns[-1]]
    tested: dict[str, Any] = {}
    for name, pattern in zip(names, stages, strict=True):
        tested[f"{name}_breadth"] = float(pattern.std(ddof=1))
        tested[f"{name}_mean_activity"] = float(np.abs(pattern).mean())
    for before, after, a, b in zip(names[:-1], names[1:], stages[:-1], stages[1:], strict=True):
        tested[f"change_{before}_to_{after}"] = float(np.linalg.norm(b - a))
    breadths = [tested[f"step_{t}_breadth"] for t in range(len(patterns) - 1)]
    narrowest = int(np.argmin(breadths))
    tested["most_selective_step"] = narrowest
    tested["supports_selectivity_hypothesis"] = 0 < narrowest < len(breadths) - 1
    return {"activation_patterns": {n: p.tolist() for n, p in zip(names, stages, strict=True)}, "brain_hypothesis_test": tested}


def _permutation_p(columns: Array, steps: int, statistic: Smallest) -> float:
    """How often the effect is as large when each sequence's steps are put in another order."""
    generator = np.random.default_rng(0)
    observed = statistic.value(columns.sum(0))
    as_large = 0
    for _ in range(PERMUTATIONS):
        order = generator.permuted(np.tile(np.arange(steps), (len(columns), 1)), axis=1)
        mixed = np.concatenate((np.take_along_axis(columns[:, :steps], order, 1), columns[:, steps:]), 1)
        as_large += statistic.value(mixed.sum(0)) >= observed
    return float((as_large + 1) / (PERMUTATIONS + 1))
