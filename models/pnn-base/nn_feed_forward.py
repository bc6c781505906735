# From plastic-neural-networks 0.1.0, pnn/nn/feed_forward.py. MIT licence.
"""FFN(h) = W_2 · dropout(GELU(W_1 h + b_1)) + b_2, and its gated form FFN(h) = W_2 · dropout(GELU(u) ⊙ v) + b_2 with
(u, v) = split(W_1 h + b_1), which has as many parameters at two thirds of the inner size."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float):
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.up(h))))


class GatedFeedForward(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float):
        super().__init__()
        self.up = nn.Linear(hidden_size, 2 * intermediate_size)
        self.up.parts = 2  # type: ignore[assignment]  # as `SelfAttention`'s qkv
        self.down = nn.Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        u, v = self.up(h).chunk(2, dim=-1)
        return self.down(self.dropout(F.gelu(u) * v))


FEED_FORWARDS = {"gelu": FeedForward, "geglu": GatedFeedForward}
