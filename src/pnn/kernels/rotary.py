"""Rotary positions on queries and keys where they lie, in one pass: the pairs (x_i, x_{i + w/2}) of every head are turned by
their token's angles, or back, which is what the gradient needs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def takes(width: int) -> bool:
    """Heads of this width: Triton's arrays have powers of two for lengths."""
    return width > 1 and width & (width - 1) == 0


@triton.jit
def _turn(x, cos, sin, stride, groups, half: tl.constexpr, block: tl.constexpr, back: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, block)[:, None]
    column = tl.arange(0, half)[None, :]
    at = x + row * stride + group * (2 * half) + column
    real = (group < groups) & (column < half)
    c = tl.load(cos + row * half + column)
    s = tl.load(sin + row * half + column)
    if back:
        s = -s
    a = tl.load(at, mask=real, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=real, other=0.0).to(tl.float32)
    tl.store(at, (a * c - b * s).to(x.dtype.element_ty), mask=real)
    tl.store(at + half, (b * c + a * s).to(x.dtype.element_ty), mask=real)


def turn(projected: Tensor, heads: int, width: int, rotation: tuple[Tensor, Tensor], back: bool = False) -> None:
    """Turns the first `heads` · `width` numbers of each row: queries, keys or both. cos and sin: (…, tokens, width / 2)."""
    cos, sin = (x.reshape(-1, width // 2).contiguous() for x in rotation)
    shape = {"half": width // 2, "block": triton.next_power_of_2(heads), "back": back, "num_warps": 2}
    _turn[(len(projected),)](projected, cos, sin, projected.stride(0), heads, **shape)
