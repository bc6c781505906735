"""LayerNorm of a residual sum with dropout, one pass over memory each way:

    y = LayerNorm(r + m ⊙ (x + b) / (1 − p)) − s        (r, b and s may be left out)

b is the bias of the product that made x: adding it here costs nothing, and its gradient is a sum that is at hand. Saved are
the inputs and two numbers a row (mean and 1/σ); the sum and the dropout mask are made again in the backward pass. There each
program walks over many rows, so that it can add up its share of the gradients of weight and biases in registers; a column sum
over all shares finishes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pnn.kernels import random

WIDEST = 4096
ROWS = 32  # of a program of the backward pass
EACH_WARP = 1024  # numbers of a row: seven such arrays are what the registers hold in the backward pass


def takes(x: Tensor) -> bool:
    return x.shape[-1] <= WIDEST


@triton.jit
def _summed(
    x,
    shift,
    residual,
    row,
    columns,
    real,
    column_hashes,
    seeds,
    threshold,
    scale,
    width,
    has_residual: tl.constexpr,
    drops: tl.constexpr,
):
    """One row of r + dropout(x + b), and its mask times 1/(1 − p)."""
    value = tl.load(x + row * width + columns, mask=real, other=0.0).to(tl.float32) + shift
    factor = scale
    if drops:
        kept = random.kept(random.row_hash(row, tl.load(seeds)), column_hashes, threshold)
        factor = tl.where(kept, scale, 0.0)
        value = value * factor
    if has_residual:
        value += tl.load(residual + row * width + columns, mask=real, other=0.0).to(tl.float32)
    return value, factor


@triton.jit
def norm_forward(
    x,
    x_bias,
    residual,
    weight,
    bias,
    subtracted,
    out,
    means,
    inverse_deviations,
    seeds,
    threshold,
    scale,
    eps,
    width: tl.constexpr,
    block: tl.constexpr,
    has_residual: tl.constexpr,
    has_bias: tl.constexpr,
    drops: tl.constexpr,
    subtracts: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    real = columns < width
    hashes = random.column_hash(columns)
    shift = 0.0
    if has_bias:
        shift = tl.load(x_bias + columns, mask=real, other=0.0).to(tl.float32)
    z, _ = _summed(x, shift, residual, row, columns, real, hashes, seeds, threshold, scale, width, has_residual, drops)
    mean = tl.sum(z, 0) / width
    centred = tl.where(real, z - mean, 0.0)
    inverse = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    y = centred * inverse * tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    y += tl.load(bias + columns, mask=real, other=0.0).to(tl.float32)
    if subtracts:
        y -= tl.load(subtracted + row * width + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=real)
    tl.store(means + row, mean)
    tl.store(inverse_deviations + row, inverse)


@triton.jit
def norm_backward(
    x,
    x_bias,
    residual,
    weight,
    grad,
    means,
    inverse_deviations,
    passing,
    taken,
    grad_x,
    grad_residual,
    shares,
    seeds,
    threshold,
    scale,
    rows,
    each: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    has_residual: tl.constexpr,
    has_bias: tl.constexpr,
    drops: tl.constexpr,
    adds: tl.constexpr,
    takes_away: tl.constexpr,
):
    columns = tl.arange(0, block)
    hashes = random.column_hash(columns)
    w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    shift = 0.0
    if has_bias:
        shift = tl.load(x_bias + columns, mask=columns < width, other=0.0).to(tl.float32)
    weight_share = tl.zeros([block], tl.float32)
    bias_share = tl.zeros([block], tl.float32)
    x_bias_share = tl.zeros([block], tl.float32)
    for turn in range(each):
        row = tl.program_id(0).to(tl.int64) * each + turn
        real = (columns < width) & (row < rows)
        at = row * width + columns
        z, factor = _summed(x, shift, residual, row, columns, real, hashes, seeds, threshold, scale, width, has_residual, drops)
        dy = tl.load(grad + at, mask=real, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_deviations + row, mask=row < rows, other=0.0)
        normal = tl.where(real, (z - tl.load(means + row, mask=row < rows, other=0.0)) * inverse, 0.0)
        weight_share += dy * normal
        bias_share += dy
        dn = dy * w
        dz = (dn - tl.sum(dn, 0) / width - normal * (tl.sum(dn * normal, 0) / width)) * inverse
        dx = dz * factor
        tl.store(grad_x + at, dx.to(grad_x.dtype.element_ty), mask=real)
        if has_bias:
            x_bias_share += tl.where(real, dx, 0.0)
        if has_residual:
            if adds:
                dz += tl.load(passing + at, mask=real, other=0.0).to(tl.float32)
            if takes_away:
                dz -= tl.load(taken + at, mask=real, other=0.0).to(tl.float32)
            tl.store(grad_residual + at, dz.to(grad_residual.dtype.element_ty), mask=real)
    share = shares + tl.program_id(0).to(tl.int64) * 3 * width + columns
    tl.store(share, weight_share, mask=columns < width)
    tl.store(share + width, bias_share, mask=columns < width)
    tl.store(share + 2 * width, x_bias_share, mask=columns < width)


def _shape(x: Tensor, x_bias: Tensor | None, residual: Tensor | None, probability: float) -> dict[str, int]:
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    return {
        "width": width,
        "block": block,
        "has_residual": residual is not None,
        "has_bias": x_bias is not None,
        "drops": probability > 0,
        "num_warps": max(1, block // EACH_WARP),
    }


def forward(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    probability: float,
    seed: Tensor,
    dtype: torch.dtype,
    subtracted: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and each row's mean and 1/σ."""
    x = x.contiguous()
    rows = x.numel() // x.shape[-1]
    out = torch.empty_like(x, dtype=dtype)
    means, inverse_deviations = x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)
    norm_forward[(rows,)](
        x,
        x if x_bias is None else x_bias,
        x if residual is None else residual.contiguous(),
        weight,
        bias,
        x if subtracted is None else subtracted.contiguous(),
        out,
        means,
        inverse_deviations,
        seed,
        random.threshold(probability),
        1 / (1 - probability),
        eps,
        subtracts=subtracted is not None,
        **_shape(x, x_bias, residual, probability),
    )
    return out, means, inverse_deviations


def backward(
    grad: Tensor,
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    means: Tensor,
    inverse_deviations: Tensor,
    probability: float,
    seed: Tensor,
    passing: Tensor | None = None,
    taken: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the residual (empty without one), and of weight, bias and x's bias, one a row. `passing` is what
    reaches the residual by another way and is added to its gradient, `taken` what reaches it where it is subtracted."""
    x, grad = x.contiguous(), grad.contiguous()
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    grad_x = torch.empty_like(x)
    grad_residual = x.new_empty(0) if residual is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    programs = triton.cdiv(rows, ROWS)
    shares = x.new_empty(programs, 3, width, dtype=torch.float32)
    norm_backward[(programs,)](
        x,
        x if x_bias is None else x_bias,
        x if residual is None else residual.contiguous(),
        weight,
        grad,
        means,
        inverse_deviations,
        x if passing is None else passing,
        x if taken is None else taken,
        grad_x,
        grad_residual,
        shares,
        seed,
        random.threshold(probability),
        1 / (1 - probability),
        rows,
        each=ROWS,
        adds=passing is not None,
        takes_away=taken is not None,
        **_shape(x, x_bias, residual, probability),
    )
    return grad_x, grad_residual, shares.sum(0)


@torch.library.custom_op("pnn::dropout_add_norm", mutates_args=())
def _norm(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    probability: float,
    seed: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return forward(x, x_bias, residual, weight, bias, eps, probability, seed, dtype)


@torch.library.custom_op("pnn::dropout_add_norm_backward", mutates_args=())
def _norm_backward(
    grad: Tensor,
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    means: Tensor,
    inverse_deviations: Tensor,
    probability: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return backward(grad, x, x_bias, residual, weight, means, inverse_deviations, probability, seed)


@_norm.register_fake
def _(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    probability: float,
    seed: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return out, x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


@_norm_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    means: Tensor,
    inverse_deviations: Tensor,
    probability: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_residual = x.new_empty(0) if residual is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, grad_residual, x.new_empty(3, x.shape[-1], dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    x, x_bias, residual, weight, _, _, ctx.probability, seed, _ = inputs
    _, means, inverse_deviations = output
    ctx.given = x_bias is not None, residual is not None
    optional = [given for given in (x_bias, residual) if given is not None]
    ctx.save_for_backward(x, weight, means, inverse_deviations, seed, *optional)


def _differentiate(ctx, grad, _means, _inverse):
    x, weight, means, inverse_deviations, seed, *optional = ctx.saved_tensors
    x_bias, residual = (optional.pop(0) if given else None for given in ctx.given)
    grad_x, grad_residual, sums = _norm_backward(
        grad, x, x_bias, residual, weight, means, inverse_deviations, ctx.probability, seed
    )
    sums = sums.to(weight.dtype)
    grad_x_bias = None if x_bias is None else sums[2]
    return grad_x, grad_x_bias, None if residual is None else grad_residual, sums[0], sums[1], None, None, None, None


_norm.register_autograd(_differentiate, setup_context=_save)


def dropout_add_norm(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    probability: float,
    dtype: torch.dtype,
) -> Tensor:
    out: Tensor = _norm(x, x_bias, residual, weight, bias, eps, probability, random.seed_for(x, probability), dtype)[0]
    return out
