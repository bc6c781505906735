# From plastic-neural-networks 0.1.0, pnn/nn/rotary.py. MIT licence.
"""Rotary positions: the pairs (x_i, x_{i + w/2}) of a head of width w are turned by the angle p · base^(−2i/w) of its token's
place p, so that a query and a key see how far apart they are."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, (…, width / 2) in fp32. Made anew for each batch: a table that is not saved with
    the weights could come back as anything."""
    frequencies = base ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = positions[..., None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (B, T, heads, width), cos and sin: (B or 1, T, width / 2)."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
