"""The query-key gate of PNN, equations (6)–(8):

    q = W_q h   (what is needed)      k = W_k δ   (what is offered)      g = σ(q ⊙ k / τ)

τ is one learned number, started at √d. The paper's W_q and W_k have no biases, the published code's have.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pnn.nn.pointwise import for_kernels


class QueryKeyGate(nn.Module):
    def __init__(self, hidden_size: int, bias: bool = False):
        super().__init__()
        self.query = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.key = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.temperature = nn.Parameter(torch.empty(1))
        self.reset_temperature()

    @property
    def initial_temperature(self) -> float:
        return math.sqrt(self.query.in_features)

    def reset_temperature(self) -> None:
        nn.init.constant_(self.temperature, self.initial_temperature)

    def forward(self, h: Tensor, delta: Tensor) -> Tensor:
        # times 1/τ: the gradient of a division goes over the tokens three times more
        return torch.sigmoid(self.query(h) * self.key(delta) * self.temperature.reciprocal())

    def update(self, h: Tensor, delta: Tensor) -> Tensor:
        """h + g ⊙ δ, for callers that do not need the gate itself."""
        if for_kernels(h):
            from pnn.kernels import gate as kernel

            if kernel.takes(h):
                return kernel.gated_update(h, self.query(h), self.key(delta), delta, self.temperature)
        return torch.addcmul(h, self(h, delta), delta)
