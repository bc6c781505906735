"""Masked tokens read their own guess: what the model would fill in by now stands where [MASK] stood.

    u = h + r ⊙ (g − h),   g = LayerNorm(W E p),   p = softmax(head(h))        at [MASK], u = h elsewhere

E p is the table of tokens, averaged by their probabilities, and g what the model begins with where a text has that token. r is
learned for each dimension; a tenth of the way before training. No gradient flows through E p: what it is made of learns from a
loss of its own (`step_weights`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pnn.nn.recall import Share

Average = Callable[[Tensor], Tensor]  # states to E p, (1, n, d) → (1, n, token size)
Embed = Callable[[Tensor, Tensor | None], Tensor]  # a function: accelerate would move a module that it sees among arguments


class Gaps(NamedTuple):
    """Where a pass has [MASK], and what it needs to guess there."""

    at: Tensor  # flat indices, (n,)
    are: Tensor  # (n, 1), whether it is a gap indeed: a fixed number of places may be more than there are gaps
    positions: Tensor | None  # their position ids, where positions are learned
    average: Average


class Guess(Share):
    def forward(self, h: Tensor, gaps: Gaps, embed: Embed) -> Tensor:
        tokens = h.flatten(0, -2)
        here = tokens.index_select(0, gaps.at)
        with torch.no_grad():
            average = gaps.average(here[None])  # as all states come: ONNX's quantiser fails over a head of two dimensions
        guess = embed(average, gaps.positions)[0].to(h.dtype)
        moved = self.share.to(h.dtype) * (guess - here) * gaps.are.to(h.dtype)
        # added: a place behind the last gap may name a token that is named before
        return tokens.index_add(0, gaps.at, moved).view_as(h)


def gaps_of(input_ids: Tensor, mask: int, at: Tensor | None, position_ids: Tensor | None, average: Average) -> Gaps:
    """`at`: where the gaps are, ascending, if somebody knows it who need not wait for the device to count them. Repeats of one
    earlier place may follow."""
    flat = input_ids.flatten()
    if at is None:
        at = (flat == mask).nonzero().squeeze(1)
    are = (flat.index_select(0, at) == mask) & F.pad(at[1:] > at[:-1], (1, 0), value=True)
    places = None if position_ids is None else position_ids.expand_as(input_ids).flatten().index_select(0, at)
    return Gaps(at, are.unsqueeze(1), places, average)
