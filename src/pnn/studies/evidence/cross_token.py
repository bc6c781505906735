"""E9, cross-token interference: does a hard masked neighbour hold a token back?

Published: tokens between hard masked tokens are predicted worse than those between easy ones. In a difficult passage all
tokens are hard, so that would come out without any interference. Ours intervenes: of every sequence one target is chosen, the
middle one; then its nearest masked neighbour is shown to the model, or the masked token furthest away, and the change of the
probability of the same target is what that neighbour being masked had cost.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pnn.analysis.subject import DIFFICULTIES, EASY, HARD, WHAT_IS_HARD, Subject, difficulty
from pnn.analysis.totals import Totals, finding, ratio, ratios
from pnn.analysis.trace import Batch, predict
from pnn.stats import finite
from pnn.studies.registry import Experiment

ABOUT = Experiment(
    number=9,
    key="cross_token_interference",
    figure="cross_token_interference",
    question="Does a hard neighbour hold a token back?",
    picture=(
        "On the left the published comparison, which a difficult passage explains as well. On the right one masked token is "
        "shown to the model: if neighbours interfere, showing the nearest one helps more than showing the furthest. "
        + WHAT_IS_HARD
    ),
    hypotheses={"cross_token": "a hard masked neighbour holds a token back, more than a hard masked token far away"},
    published_answer=("interference_effect", "hard_tokens_interfere"),
)

CONTEXTS = ("easy_context", "hard_context", "mixed_context")
MARGIN = 0.005  # of probability


def choose(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Of every sequence with three targets or more, the numbers (among the batch's targets) of its middle target, of the
    target nearest to that, and of the one furthest away."""
    positions = batch.masked.positions
    borders = torch.searchsorted(positions, batch.packed.cu_seqlens.long()).tolist()
    chosen = []
    for first, stop in itertools.pairwise(borders):
        if stop - first >= 3:
            middle = (first + stop - 1) // 2
            others = [i for i in range(first, stop) if i != middle]
            distance = {i: abs(int(positions[i] - positions[middle])) for i in others}
            chosen.append((middle, min(others, key=distance.__getitem__), max(others, key=distance.__getitem__)))
    middle, near, far = torch.tensor(chosen, dtype=torch.long).view(-1, 3).unbind(1)
    return middle, near, far


def contexts(groups: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """The published contexts: targets with a masked token before and after them in the same sequence, and which of CONTEXTS
    they have by the classes of those two."""
    inner = (sequence[1:-1] == sequence[:-2]) & (sequence[1:-1] == sequence[2:])
    before, after = groups[:-2][inner], groups[2:][inner]
    kind = torch.where((before == EASY) & (after == EASY), 0, torch.where((before == HARD) & (after == HARD), 1, 2))
    return inner.nonzero().squeeze(1) + 1, kind


def run(subject: Subject) -> dict[str, Any]:
    totals = Totals(len(subject.text))
    squares = torch.zeros(len(CONTEXTS), dtype=torch.float64)
    for batch in subject.text.batches():
        found = predict(subject.model, batch)
        p, sequence = found.last.probability, found.sequence
        groups = difficulty(p)
        at, kind = contexts(groups, sequence)
        of_kind = torch.nn.functional.one_hot(kind, len(CONTEXTS))
        totals.add("context", sequence[at], of_kind)
        totals.add("context p", sequence[at], of_kind * p[at, None])
        squares += (of_kind * p[at, None].double().square()).sum(0).cpu()
        middle, *others = choose(batch)
        for name, other in zip(("near", "far"), others, strict=True):
            other_side = predict(subject.model, batch.revealing(batch.masked.positions[other]))
            gain = (other_side.last.probability - p)[middle]
            of_group = torch.nn.functional.one_hot(groups[other], len(DIFFICULTIES))
            totals.add(f"{name} targets", sequence[middle], of_group)
            totals.add(f"{name} gain", sequence[middle], of_group * gain[:, None])
    hard = np.stack([totals.of(name)[:, HARD] for name in ("near gain", "near targets", "far gain", "far targets")], 1)
    return {
        "published": _published(totals, squares.numpy()),
        "gain_when_shown": {
            name: dict(zip(DIFFICULTIES, ratios(totals, f"{name} gain", f"{name} targets"), strict=True))
            for name in ("near", "far")
        },
        **finding(
            ABOUT.hypotheses["cross_token"],
            "rise in the probability of the right token when the nearest masked token, a hard one, is shown",
            hard,
            lambda sums: ratio(sums[..., :2]),
            margin=MARGIN,
            control="the furthest masked token, a hard one, is shown",
            control_statistic=lambda sums: ratio(sums[..., 2:]),
        ),
    }


def _published(totals: Totals, squares: Any) -> dict[str, Any]:
    counts, sums = totals.of("context").sum(0), totals.of("context p").sum(0)
    means = [finite(s / n) if n else None for s, n in zip(sums, counts, strict=True)]
    found: dict[str, Any] = {
        name: {
            "mean_performance": means[i],
            "std_performance": finite(np.sqrt(max(squares[i] / counts[i] - (means[i] or 0) ** 2, 0))) if counts[i] else None,
            "count": int(counts[i]),
        }
        for i, name in enumerate(CONTEXTS)
    }
    easy, hard = means[0], means[1]
    known = easy is not None and hard is not None
    found["interference_effect"] = {
        "easy_vs_hard_context_diff": easy - hard if known else None,  # type: ignore[operator]
        "hard_tokens_interfere": easy > hard if known else None,  # type: ignore[operator]
    }
    return found
