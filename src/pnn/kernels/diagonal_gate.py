"""The update of a gate without matrices in one pass over memory each way:

    g = σ(w ⊙ h ⊙ δ + b),   h⁺ = h + g ⊙ δ        (w and b: one number for each dimension)

The backward pass makes g again from h and δ. With u = ∂L/∂h⁺:

    s = u ⊙ δ ⊙ g ⊙ (1 − g),   ∂h = u + s ⊙ w ⊙ δ,   ∂δ = u ⊙ g + s ⊙ w ⊙ h,   ∂w = Σ s ⊙ h ⊙ δ,   ∂b = Σ s

Each of its programs walks over many rows and adds up its share of ∂w and ∂b in registers; a column sum finishes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 4096
ROWS = 32  # of a program of the backward pass


def takes(h: Tensor) -> bool:
    return h.shape[-1] <= WIDEST


@triton.jit
def diagonal_forward(h, delta, product, opening, out, width: tl.constexpr, block: tl.constexpr):
    columns = tl.arange(0, block)
    real = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    state = tl.load(h + at, mask=real, other=0.0).to(tl.float32)
    change = tl.load(delta + at, mask=real, other=0.0).to(tl.float32)
    w = tl.load(product + columns, mask=real, other=0.0).to(tl.float32)
    b = tl.load(opening + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, (state + tl.sigmoid(w * state * change + b) * change).to(out.dtype.element_ty), mask=real)


@triton.jit
def diagonal_backward(
    grad,
    h,
    delta,
    product,
    opening,
    grad_h,
    grad_delta,
    shares,
    rows,
    each: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    columns = tl.arange(0, block)
    inside = columns < width
    w = tl.load(product + columns, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(opening + columns, mask=inside, other=0.0).to(tl.float32)
    product_share = tl.zeros([block], tl.float32)
    opening_share = tl.zeros([block], tl.float32)
    for turn in range(each):
        row = tl.program_id(0).to(tl.int64) * each + turn
        real = inside & (row < rows)
        at = row * width + columns
        u = tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
        state = tl.load(h + at, mask=real, other=0.0).to(tl.float32)
        change = tl.load(delta + at, mask=real, other=0.0).to(tl.float32)
        g = tl.sigmoid(w * state * change + b)
        s = u * change * g * (1 - g)
        tl.store(grad_h + at, (u + s * w * change).to(grad_h.dtype.element_ty), mask=real)
        tl.store(grad_delta + at, (u * g + s * w * state).to(grad_delta.dtype.element_ty), mask=real)
        product_share += s * state * change
        opening_share += s
    share = shares + tl.program_id(0).to(tl.int64) * 2 * width + columns
    tl.store(share, product_share, mask=inside)
    tl.store(share + width, opening_share, mask=inside)


def _shape(h: Tensor) -> tuple[int, dict[str, int]]:
    width = h.shape[-1]
    return h.numel() // width, {"width": width, "block": triton.next_power_of_2(width), "num_warps": 4}


def forward(h: Tensor, delta: Tensor, product: Tensor, opening: Tensor) -> Tensor:
    out = torch.empty_like(h)
    rows, shape = _shape(h)
    diagonal_forward[(rows,)](h, delta, product, opening, out, **shape)
    return out


def backward(grad: Tensor, h: Tensor, delta: Tensor, product: Tensor, opening: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, of δ, and of w and b, one a row."""
    grad_h, grad_delta = torch.empty_like(h), torch.empty_like(delta)
    rows, shape = _shape(h)
    programs = triton.cdiv(rows, ROWS)
    shares = h.new_empty(programs, 2, h.shape[-1], dtype=torch.float32)
    diagonal_backward[(programs,)](grad, h, delta, product, opening, grad_h, grad_delta, shares, rows, each=ROWS, **shape)
    return grad_h, grad_delta, shares.sum(0)


@torch.library.custom_op("pnn::diagonal_update", mutates_args=())
def _update(h: Tensor, delta: Tensor, product: Tensor, opening: Tensor) -> Tensor:
    return forward(h.contiguous(), delta.contiguous(), product, opening)


@torch.library.custom_op("pnn::diagonal_update_backward", mutates_args=())
def _update_backward(grad: Tensor, h: Tensor, delta: Tensor, product: Tensor, opening: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return backward(grad.contiguous(), h.contiguous(), delta.contiguous(), product, opening)


@_update.register_fake
def _(h: Tensor, delta: Tensor, product: Tensor, opening: Tensor) -> Tensor:
    return torch.empty_like(h, memory_format=torch.contiguous_format)


@_update_backward.register_fake
def _(grad: Tensor, h: Tensor, delta: Tensor, product: Tensor, opening: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (h, delta)]
    return like[0], like[1], h.new_empty(2, h.shape[-1], dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad):
    product = ctx.saved_tensors[2]
    grad_h, grad_delta, sums = _update_backward(grad, *ctx.saved_tensors)
    return grad_h, grad_delta, *sums.to(product.dtype)


_update.register_autograd(_differentiate, setup_context=_save)


def gated_update(h: Tensor, delta: Tensor, product: Tensor, opening: Tensor) -> Tensor:
    """h and δ: (…, d), w and b: (d,) → the new state, in h's precision."""
    out: Tensor = _update(h, delta, product, opening)
    return out
