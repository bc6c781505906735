"""Read, compare, overwrite: the rank-1 rewrite of Deep Delta Learning for a vector state.

    x⁺ = x + β k (v − kᵀx)        with ‖k‖ ≤ 1 and β ∈ (0, 2)

Along k the read-out kᵀx moves towards v (with ‖k‖ = 1 and β = 1 it becomes v exactly); every direction orthogonal to k
is left as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor


def soft_unit(k: Tensor, eps: float = 1.0) -> Tensor:
    """k / √(‖k‖² + ε²): a unit vector for long k. With ε = 1 a zero k stays zero and has a gradient of order one,
    which a zero-initialised module needs (a tiny ε would multiply its first gradient by 1/ε)."""
    return k * torch.rsqrt(k.square().sum(-1, keepdim=True) + eps * eps)


def rewrite(x: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """x: (…, d), k: (…, d), v and beta: (…, 1) → the rewritten state."""
    return x + rewrite_delta(x, k, v, beta)


def rewrite_delta(x: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """What `rewrite` adds to x."""
    return beta * (v - (k * x).sum(-1, keepdim=True)) * k
