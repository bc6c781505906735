"""A step that begins part of the way back, in one pass over memory each way:

    u = h + r ⊙ (h⁰ − h)        (r: one number for each dimension)
    ∂h = (1 − r) ⊙ ∂u,   ∂h⁰ = r ⊙ ∂u,   ∂r = Σ ∂u ⊙ (h⁰ − h)

Each program of the backward pass walks over many rows and adds up its share of ∂r in registers; a column sum finishes them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 4096
ROWS = 32  # of a program of the backward pass


def takes(h: Tensor, origin: Tensor) -> bool:
    return h.shape[-1] <= WIDEST and h.shape == origin.shape


@triton.jit
def recall_forward(h, origin, share, out, width: tl.constexpr, block: tl.constexpr):
    columns = tl.arange(0, block)
    real = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    state = tl.load(h + at, mask=real, other=0.0).to(tl.float32)
    first = tl.load(origin + at, mask=real, other=0.0).to(tl.float32)
    r = tl.load(share + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, (state + r * (first - state)).to(out.dtype.element_ty), mask=real)


@triton.jit
def recall_backward(
    grad,
    h,
    origin,
    share,
    grad_h,
    grad_origin,
    shares,
    rows,
    each: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    columns = tl.arange(0, block)
    inside = columns < width
    r = tl.load(share + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([block], tl.float32)
    for turn in range(each):
        row = tl.program_id(0).to(tl.int64) * each + turn
        real = inside & (row < rows)
        at = row * width + columns
        u = tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
        state = tl.load(h + at, mask=real, other=0.0).to(tl.float32)
        first = tl.load(origin + at, mask=real, other=0.0).to(tl.float32)
        tl.store(grad_h + at, (u - r * u).to(grad_h.dtype.element_ty), mask=real)
        tl.store(grad_origin + at, (r * u).to(grad_origin.dtype.element_ty), mask=real)
        total += u * (first - state)
    tl.store(shares + tl.program_id(0).to(tl.int64) * width + columns, total, mask=inside)


def _shape(h: Tensor) -> tuple[int, dict[str, int]]:
    width = h.shape[-1]
    return h.numel() // width, {"width": width, "block": triton.next_power_of_2(width), "num_warps": 4}


class _Recall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, origin: Tensor, share: Tensor) -> Tensor:
        h, origin = h.contiguous(), origin.contiguous()
        ctx.save_for_backward(h, origin, share)
        out = torch.empty_like(h)
        rows, shape = _shape(h)
        recall_forward[(rows,)](h, origin, share, out, **shape)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, origin, share = ctx.saved_tensors
        grad_h, grad_origin = torch.empty_like(h), torch.empty_like(origin)
        rows, shape = _shape(h)
        programs = triton.cdiv(rows, ROWS)
        shares = h.new_empty(programs, h.shape[-1], dtype=torch.float32)
        recall_backward[(programs,)](grad.contiguous(), h, origin, share, grad_h, grad_origin, shares, rows, each=ROWS, **shape)
        return grad_h, grad_origin, shares.sum(0).to(share.dtype)


def recall(h: Tensor, origin: Tensor, share: Tensor) -> Tensor:
    """h and h⁰: (…, d), r: (d,) → u, in h's precision."""
    out: Tensor = _Recall.apply(h, origin, share)
    return out
