"""What lies between the products of a Llama block, each in one pass over memory each way:

    rms_norm(x, w)   w ⊙ x / √(mean(x²) + ε)         from the state in fp32 to what products read
    swiglu(g, u)     g σ(g) ⊙ u
    rotate(x)        the pairs (x_i, x_{i + w/2}) of every head, turned by their token's angles

Written in single operations of torch they are most of a training step's time: each is read and written several times, in fp32
where the state is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a program in the norm's backward pass: they share a sum of the weight's gradient
FLAT = 1024  # numbers of a program that knows no rows


def takes_width(width: int) -> bool:
    """Of a state: a program holds a row in registers."""
    return width <= 8192


def takes_heads(width: int) -> bool:
    """Of this width: Triton's arrays have powers of two for lengths."""
    return width > 1 and width & (width - 1) == 0


# Norm -----------------------------------------------------------------------------------------------------------------


@triton.jit
def norm_forward(x, weight, out, inverses, eps, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    value = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (value * inverse * scale).to(out.dtype.element_ty), mask=inside)
    tl.store(inverses + row, inverse)


@triton.jit
def norm_backward(
    x, weight, inverses, grad, grad_x, shares, rows, each: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):
    """dx = r (w ⊙ dy − x̂ mean(w ⊙ dy ⊙ x̂)), x̂ = r x; each program's share of dw = Σ dy ⊙ x̂."""
    columns = tl.arange(0, block)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros([block], tl.float32)
    for turn in range(each):
        row = tl.program_id(0).to(tl.int64) * each + turn
        real = inside & (row < rows)
        inverse = tl.load(inverses + row, mask=row < rows, other=0.0)
        normed = tl.load(x + row * width + columns, mask=real, other=0.0).to(tl.float32) * inverse
        incoming = tl.load(grad + row * width + columns, mask=real, other=0.0).to(tl.float32)
        scaled = incoming * scale
        along = tl.sum(scaled * normed, 0) / width
        tl.store(grad_x + row * width + columns, (inverse * (scaled - normed * along)).to(grad_x.dtype.element_ty), mask=real)
        share += incoming * normed
    tl.store(shares + tl.program_id(0).to(tl.int64) * width + columns, share, mask=inside)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        width = x.shape[-1]
        x = x.contiguous()
        out, inverses = torch.empty_like(x, dtype=dtype), x.new_empty(x.numel() // width, dtype=torch.float32)
        shape = {"width": width, "block": triton.next_power_of_2(width), "num_warps": 4}
        norm_forward[(len(inverses),)](x, weight, out, inverses, eps, **shape)
        ctx.save_for_backward(x, weight, inverses)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverses = ctx.saved_tensors
        width, rows = x.shape[-1], len(inverses)
        programs = triton.cdiv(rows, ROWS)
        grad_x, shares = torch.empty_like(x), x.new_empty(programs, width, dtype=torch.float32)
        shape = {"each": ROWS, "width": width, "block": triton.next_power_of_2(width), "num_warps": 4}
        norm_backward[(programs,)](x, weight, inverses, grad.contiguous(), grad_x, shares, rows, **shape)
        return grad_x, shares.sum(0).to(weight.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x: (…, d) → the same shape in `dtype`."""
    out: Tensor = _Norm.apply(x, weight, eps, dtype)
    return out


# Gate -----------------------------------------------------------------------------------------------------------------


@triton.jit
def gate_forward(gate, up, out, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = at < count
    g = tl.load(gate + at, mask=real, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=real)


@triton.jit
def gate_backward(gate, up, grad, grad_gate, grad_up, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    real = at < count
    g = tl.load(gate + at, mask=real, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=real, other=0.0).to(tl.float32)
    incoming = tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
    opened = 1 / (1 + tl.exp(-g))
    tl.store(grad_up + at, (incoming * g * opened).to(grad_up.dtype.element_ty), mask=real)
    slope = opened * (1 + g * (1 - opened))
    tl.store(grad_gate + at, (incoming * u * slope).to(grad_gate.dtype.element_ty), mask=real)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        gate_forward[(triton.cdiv(gate.numel(), FLAT),)](gate, up, out, gate.numel(), block=FLAT, num_warps=4)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        programs = (triton.cdiv(gate.numel(), FLAT),)
        gate_backward[programs](gate, up, grad.contiguous(), grad_gate, grad_up, gate.numel(), block=FLAT, num_warps=4)
        return grad_gate, grad_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = _Gate.apply(gate, up)
    return out


# Positions ------------------------------------------------------------------------------------------------------------


@triton.jit
def turn(
    x, cos, sin, out, row_stride, head_stride, token_stride, angle_stride, tokens, heads, half: tl.constexpr,
    block: tl.constexpr, back: tl.constexpr,
):  # fmt: skip
    """One token of one row: all of its heads. The result lies token by token, whatever the order of what is read."""
    row, token = tl.program_id(0).to(tl.int64) // tokens, tl.program_id(0).to(tl.int64) % tokens
    head, column = tl.arange(0, block)[:, None], tl.arange(0, half)[None, :]
    real = (head < heads) & (column < half)
    at = x + row * row_stride + token * token_stride + head * head_stride + column
    angle = row * angle_stride + token * (2 * half) + column
    c, other_c = tl.load(cos + angle).to(tl.float32), tl.load(cos + angle + half).to(tl.float32)
    s, other_s = tl.load(sin + angle).to(tl.float32), tl.load(sin + angle + half).to(tl.float32)
    a = tl.load(at, mask=real, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=real, other=0.0).to(tl.float32)
    if back:
        first, second = a * c + b * other_s, b * other_c - a * s
    else:
        first, second = a * c - b * s, b * other_c + a * other_s
    to = out + (tl.program_id(0).to(tl.int64) * heads + head) * (2 * half) + column
    tl.store(to, first.to(out.dtype.element_ty), mask=real)
    tl.store(to + half, second.to(out.dtype.element_ty), mask=real)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    rows, heads, tokens, width = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    out = x.new_empty(rows, tokens, heads, width)
    strides = (x.stride(0), x.stride(1), x.stride(2), 0 if len(cos) == 1 else tokens * width)
    shape = {"half": width // 2, "block": triton.next_power_of_2(heads), "back": back, "num_warps": 2}
    turn[(rows * tokens,)](x, cos, sin, out, *strides, tokens, heads, **shape)
    return out.transpose(1, 2)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, back=True), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (rows, heads, tokens, width); cos and sin: (rows or 1, tokens, width), without gradients."""
    out: Tensor = _Rotate.apply(x, cos.contiguous(), sin.contiguous())
    return out
