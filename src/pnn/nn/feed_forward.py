"""FFN(h) = W_2 · dropout(GELU(W_1 h + b_1)) + b_2."""

from __future__ import annotations

from torch import Tensor, nn

from pnn.nn.pointwise import gelu_drop, product, untouched


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float):
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(self.inner(h))

    def inner(self, h: Tensor) -> Tensor:
        return gelu_drop(*product(self.up, h), self.dropout)

    def unbiased(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        """FFN(h) without b_2, and b_2, where the next kernel adds it; elsewhere (FFN(h), None)."""
        return product(self.down, self.inner(h)) if untouched(self) else (self(h), None)
