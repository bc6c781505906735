"""u = h + r ⊙ (h⁰ − h): where a step begins, part of the way back at the embeddings, as far as its refiner has learned to, for
each dimension. It stands beside the refiners, which are the same with it and without."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pnn.nn import fast

START = 0.1  # halfway cost a model of the paper's width 1.7 points after one epoch, one seed (docs/log.md)


class Share(nn.Module):
    """r, how far a state moves towards something else, learned for each dimension."""

    def __init__(self, width: int):
        super().__init__()
        self.share = nn.Parameter(torch.full((width,), START))
        self.starts = {"share": START}  # for the model's initialiser


class Recall(Share):
    def forward(self, h: Tensor, origin: Tensor) -> Tensor:
        return fast.recalled(h, origin, self.share)
