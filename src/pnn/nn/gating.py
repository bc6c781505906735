"""Gates between a state h and a proposed change δ.

    query-key, equations (6)–(8)    g = σ(W_q h ⊙ W_k δ / τ [+ b])      one for each dimension
    diagonal                        g = σ(w ⊙ h ⊙ δ + b)                the same, W_q and W_k diagonal, τ in w; b a vector
    token                           g = σ(u·h + w·δ + b)                one for each token

W_q h is what is needed, W_k δ what is offered. τ is one learned number, started at √d. The paper's W_q and W_k have no biases,
the published code's have. A gate starts half open, or where `start` says: then a query-key gate has a b, one learned number,
with σ(b) = start. The diagonal gate always has its b, and starts with w = 0, so for all tokens alike: it costs two vectors
where the paper's costs two matrices, and can keep one dimension for long and rewrite another at every step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def logit(share: float) -> float:
    return math.log(share / (1 - share))


class QueryKeyGate(nn.Module):
    def __init__(self, hidden_size: int, bias: bool = False, start: float = 0.5):
        super().__init__()
        self.query = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.key = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.temperature = nn.Parameter(torch.empty(1))
        self.opening = nn.Parameter(torch.empty(1)) if start != 0.5 else None
        self.starts = {"temperature": math.sqrt(hidden_size)} | ({} if start == 0.5 else {"opening": logit(start)})
        for name, value in self.starts.items():
            nn.init.constant_(getattr(self, name), value)

    def forward(self, h: Tensor, delta: Tensor) -> Tensor:
        logits = self.query(h) * self.key(delta) / self.temperature
        return torch.sigmoid(logits if self.opening is None else logits + self.opening)


class DiagonalGate(nn.Module):
    def __init__(self, hidden_size: int, bias: bool = False, start: float = 0.5):
        super().__init__()
        self.product = nn.Parameter(torch.zeros(hidden_size))
        self.opening = nn.Parameter(torch.full((hidden_size,), logit(start)))
        self.starts = {"product": 0.0, "opening": logit(start)}

    def forward(self, h: Tensor, delta: Tensor) -> Tensor:
        return torch.sigmoid(self.product * h * delta + self.opening).to(delta.dtype)


class TokenGate(nn.Module):
    def __init__(self, hidden_size: int, bias: bool = False, start: float = 0.5):
        super().__init__()
        self.query = nn.Linear(hidden_size, 1, bias=False)
        self.key = nn.Linear(hidden_size, 1, bias=False)
        self.opening = nn.Parameter(torch.full((1,), logit(start)))
        self.starts = {"opening": logit(start)}

    def forward(self, h: Tensor, delta: Tensor) -> Tensor:
        return torch.sigmoid(self.query(h) + self.key(delta) + self.opening)


GATES: dict[str, type[nn.Module] | None] = {
    "query_key": QueryKeyGate,
    "diagonal": DiagonalGate,
    "token": TokenGate,
    "none": None,
}


def make_gate(config: Any) -> nn.Module | None:
    kind = GATES[config.gate]
    return None if kind is None else kind(config.hidden_size, config.gate_bias, config.gate_start)
