"""Dropout, and GELU with dropout behind it, in one pass over memory each way. The mask is drawn again in the backward pass.

    drop(x) = m ⊙ x / (1 − p)        gelu_drop(x, b) = m ⊙ (z Φ(z)) / (1 − p),  z = x + b

b is the bias of the product that made x: adding it here costs nothing, and its gradient is a sum that is at hand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pnn.kernels import random

ROWS = (8, 8, 16)  # of a program, by mode: they share the hashes of their columns, and a sum of the bias's gradient


@triton.jit
def _normal_distribution(x, bell):
    """Φ(x) to 1e-7 from bell = exp(−x²/2), which the gradient needs as well: Abramowitz and Stegun, 7.1.26. The library's
    erf takes half as long again as moving the numbers."""
    t = 1 / (1 + 0.2316418882663604 * tl.abs(x))  # 0.3275911 / √2
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * bell  # 1 − Φ(|x|)
    return tl.where(x >= 0, 1 - tail, tail)


@triton.jit
def pointwise_kernel(
    x,
    bias,
    grad,
    out,
    shares,
    seeds,
    threshold,
    scale,
    rows,
    each: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    mode: tl.constexpr,
    drops: tl.constexpr,
):
    """mode 0: dropout; 1: GELU and dropout; 2: the gradient of 1 at x, and each program's share of the bias's."""
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    if drops:
        hashes = random.column_hash(columns)
        seed = tl.load(seeds)
    if mode > 0:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        share = tl.zeros([block], tl.float32)
    for turn in range(each):
        row = tl.program_id(0).to(tl.int64) * each + turn
        at = row * width + columns
        real = inside & (row < rows)
        value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        if mode > 0:
            z = value + shift
            bell = tl.exp2(z * z * -0.7213475204444817)  # exp(−z²/2)
            below = _normal_distribution(z, bell)
            if mode == 1:
                value = z * below
            else:
                density = bell * 0.3989422804014327  # φ(z)
                value = (below + z * density) * tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
        if drops:
            kept = random.kept(random.row_hash(row, seed), hashes, threshold)
            value = tl.where(kept, value * scale, 0.0)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=real)
        if mode == 2:
            share += value  # zero beyond the last row, where the incoming gradient is
    if mode == 2:
        tl.store(shares + tl.program_id(0).to(tl.int64) * width + columns, share, mask=inside)


def _launch(x: Tensor, bias: Tensor, grad: Tensor, probability: float, seed: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    x, grad = x.contiguous(), grad.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    block = min(1024, triton.next_power_of_2(width))
    programs = triton.cdiv(rows, ROWS[mode])
    shares = x.new_empty(programs if mode == 2 else 0, width, dtype=torch.float32)
    pointwise_kernel[(programs, triton.cdiv(width, block))](
        x,
        bias,
        grad,
        out,
        shares,
        seed,
        random.threshold(probability),
        1 / (1 - probability),
        rows,
        each=ROWS[mode],
        width=width,
        block=block,
        mode=mode,
        drops=probability > 0,
        num_warps=4,
    )
    return out, shares


def dropped(x: Tensor, probability: float, seed: Tensor) -> Tensor:
    return x if probability == 0 else _launch(x, x, x, probability, seed, 0)[0]


def gelu_forward(x: Tensor, bias: Tensor, probability: float, seed: Tensor) -> Tensor:
    return _launch(x, bias, x, probability, seed, 1)[0]


def gelu_backward(x: Tensor, bias: Tensor, grad: Tensor, probability: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the bias."""
    grad_x, shares = _launch(x, bias, grad, probability, seed, 2)
    return grad_x, shares.sum(0)


@torch.library.custom_op("pnn::dropout", mutates_args=())
def _dropout(x: Tensor, probability: float, seed: Tensor) -> Tensor:
    return dropped(x, probability, seed)


@torch.library.custom_op("pnn::gelu_dropout", mutates_args=())
def _gelu_dropout(x: Tensor, bias: Tensor, probability: float, seed: Tensor) -> Tensor:
    return gelu_forward(x, bias, probability, seed)


@torch.library.custom_op("pnn::gelu_dropout_backward", mutates_args=())
def _gelu_dropout_backward(x: Tensor, bias: Tensor, grad: Tensor, probability: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    return gelu_backward(x, bias, grad, probability, seed)


@_dropout.register_fake
def _(x: Tensor, probability: float, seed: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_gelu_dropout.register_fake
def _(x: Tensor, bias: Tensor, probability: float, seed: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_gelu_dropout_backward.register_fake
def _(x: Tensor, bias: Tensor, grad: Tensor, probability: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(x.shape[-1], dtype=torch.float32)


def _save_dropout(ctx, inputs, output) -> None:
    _, ctx.probability, seed = inputs
    ctx.save_for_backward(seed)


def _save_gelu(ctx, inputs, output) -> None:
    x, bias, ctx.probability, seed = inputs
    ctx.save_for_backward(x, bias, seed)


def _differentiate_dropout(ctx, grad):
    (seed,) = ctx.saved_tensors
    return _dropout(grad, ctx.probability, seed), None, None


def _differentiate_gelu(ctx, grad):
    x, bias, seed = ctx.saved_tensors
    grad_x, grad_bias = _gelu_dropout_backward(x, bias, grad, ctx.probability, seed)
    return grad_x, grad_bias.to(bias.dtype), None, None


_dropout.register_autograd(_differentiate_dropout, setup_context=_save_dropout)
_gelu_dropout.register_autograd(_differentiate_gelu, setup_context=_save_gelu)


def dropout(x: Tensor, probability: float) -> Tensor:
    return x if probability == 0 else _dropout(x, probability, random.seed_for(x, probability))


def gelu_dropout(x: Tensor, bias: Tensor, probability: float) -> Tensor:
    """x: (…, d), bias: (d,)."""
    return _gelu_dropout(x, bias, probability, random.seed_for(x, probability))
