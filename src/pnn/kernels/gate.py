"""The gated update of PNN in one pass over memory each way:

    g = σ(q ⊙ k / τ + b),   h⁺ = h + g ⊙ δ        (b, one number, may be left out)

The backward pass makes g again from q and k. With u = ∂L/∂h⁺:

    ∂δ = u ⊙ g,   s = u ⊙ δ ⊙ g ⊙ (1 − g) / τ,   ∂q = s ⊙ k,   ∂k = s ⊙ q,   ∂τ = −Σ s ⊙ q ⊙ k / τ,   ∂b = Σ s τ,   ∂h = u
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 4096
ROWS = 4  # of a program


def takes(h: Tensor) -> bool:
    return h.shape[-1] <= WIDEST


@triton.jit
def gate_forward(
    h,
    q,
    k,
    delta,
    temperature,
    opening,
    out,
    rows,
    q_stride,
    each: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    opens: tl.constexpr,
):
    columns = tl.arange(0, block)
    inverse = 1 / tl.load(temperature).to(tl.float32)
    shift = 0.0
    if opens:
        shift = tl.load(opening).to(tl.float32)
    for turn in range(each):
        row = tl.program_id(0).to(tl.int64) * each + turn
        real = (columns < width) & (row < rows)
        at = row * width + columns
        query = tl.load(q + row * q_stride + columns, mask=real, other=0.0).to(tl.float32)
        product = query * tl.load(k + at, mask=real, other=0.0).to(tl.float32)
        change = tl.sigmoid(product * inverse + shift) * tl.load(delta + at, mask=real, other=0.0).to(tl.float32)
        state = tl.load(h + at, mask=real, other=0.0).to(tl.float32) + change
        tl.store(out + at, state.to(out.dtype.element_ty), mask=real)


@triton.jit
def gate_backward(
    grad,
    q,
    k,
    delta,
    temperature,
    opening,
    grad_q,
    grad_k,
    grad_delta,
    shares,
    rows,
    q_stride,
    grad_q_stride,
    each: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    opens: tl.constexpr,
):
    columns = tl.arange(0, block)
    inverse = 1 / tl.load(temperature).to(tl.float32)
    shift = 0.0
    if opens:
        shift = tl.load(opening).to(tl.float32)
    temperature_share = tl.zeros([block], tl.float32)
    opening_share = tl.zeros([block], tl.float32)
    for turn in range(each):
        row = tl.program_id(0).to(tl.int64) * each + turn
        real = (columns < width) & (row < rows)
        at = row * width + columns
        u = tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
        query = tl.load(q + row * q_stride + columns, mask=real, other=0.0).to(tl.float32)
        key = tl.load(k + at, mask=real, other=0.0).to(tl.float32)
        g = tl.sigmoid(query * key * inverse + shift)
        s = u * tl.load(delta + at, mask=real, other=0.0).to(tl.float32) * g * (1 - g) * inverse
        tl.store(grad_q + row * grad_q_stride + columns, (s * key).to(grad_q.dtype.element_ty), mask=real)
        tl.store(grad_k + at, (s * query).to(grad_k.dtype.element_ty), mask=real)
        tl.store(grad_delta + at, (u * g).to(grad_delta.dtype.element_ty), mask=real)
        temperature_share -= s * query * key * inverse
        if opens:
            opening_share += s
    tl.store(shares + 2 * tl.program_id(0), tl.sum(temperature_share, 0))
    tl.store(shares + 2 * tl.program_id(0) + 1, tl.sum(opening_share, 0) / inverse)


def _shape(h: Tensor, opening: Tensor | None) -> tuple[int, dict[str, int]]:
    width = h.shape[-1]
    shape = {"each": ROWS, "width": width, "block": triton.next_power_of_2(width), "opens": opening is not None, "num_warps": 4}
    return h.numel() // width, shape


def forward(h: Tensor, q: Tensor, k: Tensor, delta: Tensor, temperature: Tensor, opening: Tensor | None) -> Tensor:
    """Rows of q may be part of wider ones; the rest is contiguous."""
    out = torch.empty_like(h)
    rows, shape = _shape(h, opening)
    numbers = temperature, temperature if opening is None else opening
    gate_forward[(triton.cdiv(rows, ROWS),)](h, q, k, delta, *numbers, out, rows, q.stride(-2), **shape)
    return out


def backward(
    grad: Tensor, q: Tensor, k: Tensor, delta: Tensor, temperature: Tensor, opening: Tensor | None, grad_q: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes grad_q, whose rows, as those of q, may be part of wider ones; returns the gradients of k and δ, and those of τ and
    b as one vector."""
    grad_k, grad_delta = torch.empty_like(k), torch.empty_like(delta)
    rows, shape = _shape(grad, opening)
    programs = triton.cdiv(rows, ROWS)
    shares = grad.new_empty(programs, 2, dtype=torch.float32)
    numbers = temperature, temperature if opening is None else opening
    strides = q.stride(-2), grad_q.stride(-2)
    gate_backward[(programs,)](grad, q, k, delta, *numbers, grad_q, grad_k, grad_delta, shares, rows, *strides, **shape)
    return grad_k, grad_delta, shares.sum(0)


@torch.library.custom_op("pnn::gated_update", mutates_args=())
def _update(h: Tensor, q: Tensor, k: Tensor, delta: Tensor, temperature: Tensor, opening: Tensor | None) -> Tensor:
    h, q, k, delta = (x.contiguous() for x in (h, q, k, delta))
    return forward(h, q, k, delta, temperature, opening)


@torch.library.custom_op("pnn::gated_update_backward", mutates_args=())
def _update_backward(
    grad: Tensor, q: Tensor, k: Tensor, delta: Tensor, temperature: Tensor, opening: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, q, k, delta = (x.contiguous() for x in (grad, q, k, delta))
    grad_q = torch.empty_like(q)
    return grad_q, *backward(grad, q, k, delta, temperature, opening, grad_q)


@_update.register_fake
def _(h: Tensor, q: Tensor, k: Tensor, delta: Tensor, temperature: Tensor, opening: Tensor | None) -> Tensor:
    return torch.empty_like(h, memory_format=torch.contiguous_format)


@_update_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, delta: Tensor, temperature: Tensor, opening: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, delta)]
    return like[0], like[1], like[2], grad.new_empty(2, dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    *tensors, opening = inputs[1:]
    ctx.save_for_backward(*tensors, *(() if opening is None else (opening,)))


def _differentiate(ctx, grad):
    q, k, delta, temperature, *opening = ctx.saved_tensors
    grad_q, grad_k, grad_delta, numbers = _update_backward(grad, q, k, delta, temperature, opening[0] if opening else None)
    grad_temperature, grad_opening = numbers.to(temperature.dtype).split(1)
    return grad, grad_q, grad_k, grad_delta, grad_temperature, grad_opening if opening else None


_update.register_autograd(_differentiate, setup_context=_save)


def gated_update(h: Tensor, q: Tensor, k: Tensor, delta: Tensor, temperature: Tensor, opening: Tensor | None = None) -> Tensor:
    """All of one shape (…, d), τ and b: (1,) → the new state, in h's precision."""
    out: Tensor = _update(h, q, k, delta, temperature, opening)
    return out
