"""What do gates do? The four panels of the paper's Figure 3, and what they hide: which kind of token each gate belongs to.

Figure 3 pools all tokens. Specials and masked tokens live at other gate values than ordinary ones, so a histogram of all of
them can have several humps without any token being "bimodal". Here every number is also given for each kind.

The paper calls gates "increasingly selective" because fewer of them are above one half. Gates that are all equally shut select
nothing. To select is to treat the dimensions of one token differently, so selectivity is measured as the spread of a token's
gates over its dimensions (their standard deviation). The share above one half stands beside it as a description.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pnn.analysis.subject import Subject, with_gates_by_dimension
from pnn.analysis.totals import Array, Smallest, Totals, finding, ratio, ratios
from pnn.analysis.trace import KINDS, trace_batch
from pnn.results import Finding
from pnn.studies.registry import Analysis

BINS = 50  # of the histogram of token means, from 0 to 1
MARGIN = 0.01  # of the deviation: a smaller change is not worth a claim

ABOUT = Analysis(
    question="What do the gates do?",
    picture=(
        "The paper's four panels pool all tokens. The panels by kind of token show which humps and shifts belong to masked or "
        "special tokens alone; grey lines are the same model untrained. Gates select where they differ within a token, so "
        "their spread over a token's dimensions says how selective they are, not how many are above one half. The paper has "
        "mean gates of 0.61, 0.54, 0.51 and 0.60 after its four steps, and 77, 58, 53 and 67 % above one half."
    ),
    hypotheses={
        "gates_become_more_selective": "gates become more selective from step to step: they differ more within a token",
    },
    needs=(with_gates_by_dimension,),
)


def run(subject: Subject) -> dict[str, Any]:
    """What analysis/gates.json holds."""
    text, totals = subject.text, Totals(len(subject.text))
    width, steps = subject.model.config.hidden_size, subject.num_steps
    by_dimension = torch.zeros(steps, width, dtype=torch.float64)
    histogram = torch.zeros(steps, len(KINDS), BINS, dtype=torch.float64)
    squares = torch.zeros(steps, dtype=torch.float64)
    for batch in text.batches():
        trace, control = trace_batch(subject.model, batch), trace_batch(subject.naive, batch)
        gates, never = ([step.gate for step in found.steps if step.gate is not None] for found in (trace, control))
        means = torch.stack([g.mean(1) for g in gates], 1)  # (tokens, steps)
        totals.count("tokens", trace.sequence)
        totals.add("mean", trace.sequence, means)
        totals.add("open", trace.sequence, torch.stack([(g > 0.5).float().mean(1) for g in gates], 1))
        totals.add("spread", trace.sequence, torch.stack([g.std(1) for g in gates], 1))
        totals.add("untrained spread", trace.sequence, torch.stack([g.std(1) for g in never], 1))
        totals.add("untrained open", trace.sequence, torch.stack([(g > 0.5).float().mean(1) for g in never], 1))
        kinds = torch.nn.functional.one_hot(trace.kinds, len(KINDS))
        totals.add("kind", trace.sequence, kinds)
        totals.add("kind mean", trace.sequence, kinds[:, :, None] * means[:, None])
        for t, g in enumerate(gates):
            by_dimension[t] += g.double().sum(0).cpu()
            squares[t] += g.double().square().mean(1).sum().cpu()
            histogram[t] += _histogram(g.mean(1), trace.kinds)
    tokens = totals.of("tokens").sum()
    mean, kind_means = ratios(totals, "mean", "tokens"), totals.of("kind mean").sum(0).reshape(len(KINDS), steps)
    spread = [math.sqrt(max(0.0, float(squares[t]) / tokens - (mean[t]["value"] or 0.0) ** 2)) for t in range(steps)]
    kind_tokens = totals.of("kind").sum(0)
    return {
        "num_steps": steps,
        "tokens": int(tokens),
        "tokens_by_kind": {name: int(kind_tokens[i]) for i, name in enumerate(KINDS)},
        "mean_by_step": mean,
        "deviation_by_step": spread,  # over all gates of all tokens, as in the paper's panel
        "spread_within_token_by_step": ratios(totals, "spread", "tokens"),
        "open_by_step": ratios(totals, "open", "tokens", shares=True),
        "mean_by_kind_and_step": {
            name: [float(value / kind_tokens[i]) for value in kind_means[i]] for i, name in enumerate(KINDS) if kind_tokens[i]
        },
        "dimension_means": (by_dimension / tokens).tolist(),  # (steps, width)
        "token_mean_histogram": {name: histogram[:, i].long().tolist() for i, name in enumerate(KINDS)},
        "untrained_open_by_step": ratios(totals, "untrained open", "tokens", shares=True),
        "untrained_spread_within_token_by_step": ratios(totals, "untrained spread", "tokens"),
        "findings": {"gates_become_more_selective": _selecting(totals, steps)} if steps > 1 else {},
    }


def _histogram(means: Tensor, kinds: Tensor) -> Tensor:
    bins = (means * BINS).long().clamp(0, BINS - 1)
    flat = torch.bincount(kinds * BINS + bins, minlength=len(KINDS) * BINS)
    return flat.view(len(KINDS), BINS).double().cpu()


def _selecting(totals: Totals, steps: int) -> Finding:
    """ "Increasingly selective" (the paper's introduction): the spread within a token rises at every step."""

    def rises(sums: Array, first: int) -> Array:
        return np.diff(np.stack([ratio(sums[..., [first + t, -1]]) for t in range(steps)], -1))

    return finding(
        ABOUT.hypotheses["gates_become_more_selective"],
        "smallest rise of the spread of gates within a token from one step to the next",
        np.concatenate((totals.of("spread"), totals.of("untrained spread"), totals.of("tokens")), 1),
        Smallest(lambda sums: rises(sums, 0)),
        margin=MARGIN,
        control="the same model untrained",
        control_statistic=Smallest(lambda sums: rises(sums, steps)),
    )
