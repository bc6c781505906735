"""FFN(h) = W_2 · dropout(GELU(W_1 h + b_1)) + b_2."""

from __future__ import annotations

from torch import Tensor, nn

from pnn.nn.pointwise import gelu_drop


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float):
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(gelu_drop(self.up(h), self.dropout))
