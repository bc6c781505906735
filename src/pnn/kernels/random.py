"""Dropout masks by hash: which numbers of a (rows, columns) array survive follows from a seed and their place.

A backward pass draws the mask again instead of reading it from memory, and the plain twin can draw it too. A general random
generator (Philox, ten rounds a number) would take longer than everything else an element-wise kernel does.

    kept where  (mix(row, seed) ^ mix(column)) · C mod 2³²  ≥  p 2³²

Rows and columns are mixed well, once each; a number itself costs an exclusive or, a product and a comparison.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOW32 = 0xFFFFFFFF


@triton.jit
def mix(x):
    """MurmurHash3's finaliser on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def row_hash(rows, seed):
    return mix(mix(rows.to(tl.uint32)) ^ seed.to(tl.uint32))


@triton.jit
def column_hash(columns):
    return mix(columns.to(tl.uint32) + 0x9E3779B9)


@triton.jit
def kept(rows, columns, threshold):
    """`rows` and `columns`: hashes that broadcast to the wanted shape."""
    return (rows ^ columns) * 0x9E3779B1 >= threshold.to(tl.uint32)


def threshold(probability: float) -> int:
    return int(probability * (LOW32 + 1))


def seed_for(x: Tensor, probability: float) -> Tensor:
    """A new seed on x's device, from torch's generator there; nothing waits for it."""
    if probability > 0:
        return torch.randint(0, 2**31 - 1, (1,), device=x.device)
    return torch.zeros(1, dtype=torch.long, device=x.device)
