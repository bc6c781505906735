"""A masked token reads its own guess:

    g = LayerNorm(W E p),   p = softmax(head(h)),   u = h + r ⊙ (g − h)        at [MASK] tokens, u = h elsewhere

E p is the mean of the table of tokens by their probabilities: what stands in the text if the guess is right, so the steps that
follow read a text whose gaps are filled in. r is learned for each dimension. The guess is taken as it is, without a gradient:
what it is made of learns from the loss of the state that it is read from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pnn.nn.embeddings import TokenPositionEmbeddings
from pnn.nn.halting import Read

START = 0.1


class Guess(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.share = nn.Parameter(torch.full((width,), START))
        self.starts = {"share": START}  # for the model's initialiser

    def forward(
        self,
        h: Tensor,
        embeddings: TokenPositionEmbeddings,
        read: Read,
        at: Tensor,
        gaps: Tensor,
        places: Tensor | None,
    ) -> Tensor:
        """`at`: flat indices of tokens, of which those are [MASK] that `gaps` (a mask over all of them) says; `places`: their
        position ids, where positions are learned."""
        rows = h.flatten(0, -2)
        here = rows.index_select(0, at)
        with torch.no_grad():
            p = read(here).softmax(-1)
            thought = p.to(here.dtype) @ embeddings.token.weight.to(here.dtype)
        g = embeddings(thought[None], places)[0].to(here.dtype)
        share = self.share.to(here.dtype) * gaps.flatten().index_select(0, at).unsqueeze(-1)
        # added, not put: places that are not used may name a token more than once
        return rows.index_add(0, at, (share * (g - here)).to(rows.dtype)).view_as(h)
