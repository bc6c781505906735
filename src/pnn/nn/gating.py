"""The query-key gate of PNN, equations (6)–(8):

    q = W_q h   (what is needed)      k = W_k δ   (what is offered)      g = σ(q ⊙ k / τ)

τ is one learned number, started at √d. The paper's W_q and W_k have no biases, the published code's have.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pnn.nn.pointwise import for_kernels, untouched


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
        return torch.sigmoid(self.query(h) * self.key(delta) / self.temperature)

    def update(self, h: Tensor, delta: Tensor) -> Tensor:
        """h + g ⊙ δ, for callers that do not need the gate itself."""
        if for_kernels(h):
            from pnn.kernels import gate as kernel

            if kernel.takes(h):
                return kernel.gated_update(h, self.query(h), self.key(delta), delta, self.temperature)
        if type(self.query) is nn.Linear and untouched(self.query):
            # τ divides the matrix instead of every token, which takes its gradient over the tokens three times less
            bias = None if self.query.bias is None else self.query.bias / self.temperature
            q = F.linear(h, self.query.weight / self.temperature, bias)
            return torch.addcmul(h, torch.sigmoid(q * self.key(delta)), delta)
        return torch.addcmul(h, self(h, delta), delta)
