"""Where a step begins, its tokens have looked at those beside them:

    u_i = h_i + w₋ ⊙ h_{i−1} + w₀ ⊙ h_i + w₊ ⊙ h_{i+1}

Each refiner has weights of its own for each dimension, which start at zero. What stands next to a token is then known without
attention, which may look further.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pnn.nn import fast


class Neighbours(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, width))
        self.starts = {"weight": 0.0}  # for the model's initialiser

    def forward(self, h: Tensor, joined: Tensor) -> Tensor:
        """h: (B, L, d). `joined`: (B or 1, L), whether a token has one before it in its sequence."""
        mixed = _compiled if fast.for_kernels(h) and torch.is_grad_enabled() else _mixed
        return mixed(h, joined, self.weight)


def _mixed(h: Tensor, joined: Tensor, weight: Tensor) -> Tensor:
    joins = joined.unsqueeze(-1)
    before = F.pad(h[:, :-1], (0, 0, 1, 0)) * joins
    after = F.pad(h[:, 1:] * joins[:, 1:], (0, 0, 0, 1))
    mixed = h.float() + before.float() * weight[0] + h.float() * weight[1] + after.float() * weight[2]
    return mixed.to(h.dtype)


_compiled = torch.compile(_mixed)
