"""E10, gate entropy: are gates more decided at easy tokens?

The README's formula is −Σ g log g; the published script computes the mean over dimensions of the binary entropy
−g ln g − (1−g) ln(1−g), at the last step. So does this one, at every step. Control: the same tokens in the untrained model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pnn.analysis.subject import DIFFICULTIES, EASY, HARD, WHAT_IS_HARD, Subject, difficulty, with_gates
from pnn.analysis.totals import Totals, difference_of_ratios, finding, ratios, two_ratios
from pnn.analysis.trace import Trace, trace_batch
from pnn.stats import finite
from pnn.studies.registry import Experiment

ABOUT = Experiment(
    number=10,
    key="gate_entropy_analysis",
    figure="gate_entropy_analysis",
    question="Are gates more decided at easy tokens?",
    picture=(
        "Low entropy is a decided gate, the dashed line one that is half open everywhere. If so, easy lies below hard. "
        + WHAT_IS_HARD
    ),
    hypotheses={"gate_entropy": "gates are more decided at easy tokens than at hard ones"},
    needs=(with_gates,),
    published_answer=("confidence_hypothesis", "easy_lower_entropy"),
)

MARGIN = 0.005  # nats, of at most ln 2 = 0.693


def entropies(trace: Trace) -> Tensor:
    """(targets, steps)."""

    def of(g: Tensor) -> Tensor:
        g = g[trace.targets]
        return -(torch.xlogy(g, g) + torch.xlogy(1 - g, 1 - g)).mean(1)

    return torch.stack([of(step.gate) for step in trace.steps if step.gate is not None], 1)


def run(subject: Subject) -> dict[str, Any]:
    totals, steps = Totals(len(subject.text)), subject.num_steps
    squares = torch.zeros(len(DIFFICULTIES), dtype=torch.float64)
    for batch in subject.text.batches():
        trace, control = trace_batch(subject.model, batch), trace_batch(subject.naive, batch)
        sequence = trace.target_sequence
        groups = torch.nn.functional.one_hot(difficulty(trace.last.probability), len(DIFFICULTIES))
        found = entropies(trace)
        totals.add("targets", sequence, groups)
        totals.add("entropy", sequence, groups[:, :, None] * found[:, None])
        totals.add("last", sequence, groups * found[:, -1:])
        totals.add("untrained", sequence, groups * entropies(control)[:, -1:])
        squares += (groups * found[:, -1:].double().square()).sum(0).cpu()
    counts = totals.of("targets").sum(0)
    last = totals.of("last").sum(0)
    means = [finite(s / n) if n else None for s, n in zip(last, counts, strict=True)]
    by_step = totals.of("entropy").sum(0).reshape(len(DIFFICULTIES), steps)
    easy, hard = means[EASY], means[HARD]
    known = easy is not None and hard is not None

    columns = [two_ratios(totals, name, "targets", HARD, EASY) for name in ("last", "untrained")]

    return {
        "published": {
            **{
                f"{name}_tokens": {
                    "mean_entropy": means[i],
                    "std_entropy": finite(np.sqrt(max(squares[i] / counts[i] - means[i] ** 2, 0))) if counts[i] else None,  # type: ignore[operator]
                    "count": int(counts[i]),
                }
                for i, name in enumerate(DIFFICULTIES)
            },
            "confidence_hypothesis": {
                "easy_lower_entropy": easy < hard if known else None,  # type: ignore[operator]
                "entropy_difference": hard - easy if known else None,  # type: ignore[operator]
            },
        },
        "entropy_by_step": {
            name: [finite(value / counts[i]) for value in by_step[i]] for i, name in enumerate(DIFFICULTIES) if counts[i]
        },
        "entropy": dict(zip(DIFFICULTIES, ratios(totals, "last", "targets"), strict=True)),
        "untrained_entropy": dict(zip(DIFFICULTIES, ratios(totals, "untrained", "targets"), strict=True)),
        **finding(
            ABOUT.hypotheses["gate_entropy"],
            "mean binary entropy of the last step's gates, hard targets − easy ones",
            np.concatenate(columns, 1),
            lambda sums: difference_of_ratios(sums[..., :4]),
            margin=MARGIN,
            control="the same tokens in the untrained model",
            control_statistic=lambda sums: difference_of_ratios(sums[..., 4:]),
        ),
    }
