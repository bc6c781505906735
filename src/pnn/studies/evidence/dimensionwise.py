"""E4, dimension by dimension: does mean |h_j| rise with every step (accumulator), fall (selector), turn (oscillator) or stay?

The published rule has no tolerance, so "stable" cannot occur. Ours: a change counts when it is larger than its own standard
error over sequences times two; a dimension none of whose changes counts is stable. Roles mean something when a fair share of
dimensions is not of the most common class, and is given the same class by either half of the text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pnn.analysis.subject import Subject, with_steps
from pnn.analysis.totals import Array
from pnn.analysis.trace import trace_batch
from pnn.models.base import MaskedLMBase
from pnn.stats import Estimate, middle, verdict
from pnn.studies.registry import Experiment

ABOUT = Experiment(
    number=4,
    key="dimensionwise_analysis",
    figure="dimensionwise_patterns",
    question="Do dimensions have roles?",
    picture=(
        "Full bars count only changes beyond two standard errors, pale ones any change, as published. Roles that mean "
        "something are not nearly all the same, and come out the same on two halves of the text."
    ),
    hypotheses={"dimensionwise": "dimensions have different roles, which come out the same on other text"},
    needs=(with_steps(2),),
)

Indices = NDArray[np.int64]
CLASSES = ("accumulator", "selector", "oscillator", "stable")
GROUPS = 64  # of sequences, resampled as wholes: (sequences, steps, width) numbers would grow with the text
DRAWS = 500
MARGIN = 0.05  # of the dimensions: if all but a few do the same, there are no roles to speak of


def run(subject: Subject) -> dict[str, Any]:
    sums, tokens = group_sums(subject.model, subject)
    naive_sums, _ = group_sums(subject.naive, subject)
    stages = sums.sum(0) / tokens.sum()
    classes, plain = classified(sums, tokens), published_classes(np.diff(stages, axis=0))
    effect, naive = agreement(sums, tokens), agreement(naive_sums, tokens)
    return {
        "published": {
            "dimension_patterns": {name: np.flatnonzero(plain == i).tolist() for i, name in enumerate(CLASSES)},
            "pattern_counts": {name: int((plain == i).sum()) for i, name in enumerate(CLASSES)},
            "sample_dimensions": {name: np.flatnonzero(plain == i)[:5].tolist() for i, name in enumerate(CLASSES)},
            "step_activities": stages.tolist(),
        },
        "pattern_counts": {name: int((classes == i).sum()) for i, name in enumerate(CLASSES)},
        "dimension_patterns": {name: np.flatnonzero(classes == i).tolist() for i, name in enumerate(CLASSES)},
        "hypothesis": ABOUT.hypotheses["dimensionwise"],
        "measure": "share of dimensions outside the most common class whose class is the same in both halves of the text",
        "effect": effect.as_json(),
        "margin": MARGIN,
        "untrained": naive.as_json(),  # fixed random weights have roles too: as many as this need not have been learnt
        "verdict": verdict(effect, MARGIN),
    }


@torch.no_grad()
def group_sums(model: MaskedLMBase, subject: Subject) -> tuple[Array, Array]:
    """Σ |h| over tokens, (groups, stages, width), and the tokens of each group. Sequence i is in group i mod GROUPS."""
    sums = torch.zeros(GROUPS, subject.num_steps + 1, model.config.hidden_size, dtype=torch.float64)
    tokens = torch.zeros(GROUPS, dtype=torch.float64)
    for batch in subject.text.batches():
        trace = trace_batch(model, batch)
        group = batch.sequence % GROUPS
        tokens += torch.bincount(group, minlength=GROUPS)
        for stage, h in enumerate(trace.states):
            sums[:, stage].index_add_(0, group, h.abs().double().cpu())
    return sums.numpy(), tokens.numpy()


def published_classes(differences: Array) -> Indices:
    """`differences`: (steps, width)."""
    signs = np.sign(differences)
    turns = (signs[1:] * signs[:-1] < 0).any(0)
    return np.select([(signs > 0).all(0), (signs < 0).all(0), turns], [0, 1, 2], 3)


def classified(sums: Array, tokens: Array) -> Indices:
    """As published, but a difference within two standard errors is none. Ratio of sums, linearised over groups."""
    differences = np.diff(sums, axis=1)
    used = tokens > 0
    mean = differences.sum(0) / tokens.sum()
    groups = max(2, int(used.sum()))
    residual = differences - mean * tokens[:, None, None]
    error = np.sqrt(np.square(residual).sum(0) * groups / (groups - 1)) / tokens.sum()
    signs = np.where(np.abs(mean) > 2 * error, np.sign(mean), 0)
    rising, falling = (signs > 0).any(0), (signs < 0).any(0)
    return np.select([rising & ~falling, falling & ~rising, rising & falling], [0, 1, 2], 3)


def with_a_role(one: Indices, other: Indices) -> float:
    """The share of dimensions that are in the same class twice, and not in the most common one."""
    table = np.zeros((len(CLASSES), len(CLASSES)))
    np.add.at(table, (one, other), 1)
    most_common = int((table.sum(0) + table.sum(1)).argmax())
    return float((np.trace(table) - table[most_common, most_common]) / table.sum())


def agreement(sums: Array, tokens: Array) -> Estimate:
    """`with_a_role` for the even and the odd groups; its interval by groups resampled within each half."""

    def between(even: Indices, odd: Indices) -> float:
        return with_a_role(classified(sums[even], tokens[even]), classified(sums[odd], tokens[odd]))

    halves = [np.flatnonzero((np.arange(GROUPS) % 2 == parity) & (tokens > 0)) for parity in (0, 1)]
    generator = np.random.default_rng(0)
    draws = [between(*(generator.choice(half, len(half)) for half in halves)) for _ in range(DRAWS)]
    return Estimate(between(*halves), *middle(draws, min(map(len, halves))))
