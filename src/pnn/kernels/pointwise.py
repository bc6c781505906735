"""Dropout, and GELU with dropout behind it, in one pass over memory each way. The mask is drawn again in the backward pass.

    drop(x) = m ⊙ x / (1 − p)        gelu_drop(x) = m ⊙ (x Φ(x)) / (1 − p)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pnn.kernels import random

ROWS = 8  # of a program: they share the hashes of their columns


@triton.jit
def _normal_distribution(x, bell):  # type: ignore[no-untyped-def]
    """Φ(x) to 1e-7 from bell = exp(−x²/2), which the gradient needs as well: Abramowitz and Stegun, 7.1.26. The library's
    erf takes half as long again as moving the numbers."""
    t = 1 / (1 + 0.2316418882663604 * tl.abs(x))  # 0.3275911 / √2
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * bell  # 1 − Φ(|x|)
    return tl.where(x >= 0, 1 - tail, tail)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    x,
    grad,
    out,
    seeds,
    threshold,
    scale,
    rows,
    each: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    mode: tl.constexpr,
):
    """mode 0: dropout; 1: GELU and dropout; 2: the gradient of 1 at x."""
    columns = tl.program_id(1) * block + tl.arange(0, block)
    hashes = random.column_hash(columns)
    seed = tl.load(seeds)
    for turn in range(each):
        row = tl.program_id(0).to(tl.int64) * each + turn
        at = row * width + columns
        real = (columns < width) & (row < rows)
        value = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
        if mode > 0:
            bell = tl.exp2(value * value * -0.7213475204444817)  # exp(−x²/2)
            below = _normal_distribution(value, bell)
            if mode == 1:
                value = value * below
            else:
                density = bell * 0.3989422804014327  # φ(x)
                value = (below + value * density) * tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
        kept = random.kept(random.row_hash(row, seed), hashes, threshold)
        tl.store(out + at, tl.where(kept, value * scale, 0.0).to(out.dtype.element_ty), mask=real)


def _launch(x: Tensor, grad: Tensor, probability: float, seed: Tensor, mode: int) -> Tensor:
    x, grad = x.contiguous(), grad.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    block = min(1024, triton.next_power_of_2(width))
    _kernel[(triton.cdiv(rows, ROWS), triton.cdiv(width, block))](
        x,
        grad,
        out,
        seed,
        random.threshold(probability),
        1 / (1 - probability),
        rows,
        each=ROWS,
        width=width,
        block=block,
        mode=mode,
        num_warps=4,
    )
    return out


@torch.library.custom_op("pnn::dropout", mutates_args=())
def _dropout(x: Tensor, probability: float, seed: Tensor) -> Tensor:
    return _launch(x, x, probability, seed, 0)


@torch.library.custom_op("pnn::gelu_dropout", mutates_args=())
def _gelu_dropout(x: Tensor, probability: float, seed: Tensor) -> Tensor:
    return _launch(x, x, probability, seed, 1)


@torch.library.custom_op("pnn::gelu_dropout_backward", mutates_args=())
def _gelu_dropout_backward(x: Tensor, grad: Tensor, probability: float, seed: Tensor) -> Tensor:
    return _launch(x, grad, probability, seed, 2)


@_dropout.register_fake
def _(x: Tensor, probability: float, seed: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_gelu_dropout.register_fake
def _(x: Tensor, probability: float, seed: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_gelu_dropout_backward.register_fake
def _(x: Tensor, grad: Tensor, probability: float, seed: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_dropout(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, ctx.probability, seed = inputs
    ctx.save_for_backward(seed)


def _save_gelu(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, ctx.probability, seed = inputs
    ctx.save_for_backward(x, seed)


def _differentiate_dropout(ctx, grad):  # type: ignore[no-untyped-def]
    (seed,) = ctx.saved_tensors
    return _dropout(grad, ctx.probability, seed), None, None


def _differentiate_gelu(ctx, grad):  # type: ignore[no-untyped-def]
    x, seed = ctx.saved_tensors
    return _gelu_dropout_backward(x, grad, ctx.probability, seed), None, None


_dropout.register_autograd(_differentiate_dropout, setup_context=_save_dropout)
_gelu_dropout.register_autograd(_differentiate_gelu, setup_context=_save_gelu)


def dropout(x: Tensor, probability: float) -> Tensor:
    return x if probability == 0 else _dropout(x, probability, random.seed_for(x, probability))


def gelu_dropout(x: Tensor, probability: float) -> Tensor:
    return _gelu_dropout(x, probability, random.seed_for(x, probability))
