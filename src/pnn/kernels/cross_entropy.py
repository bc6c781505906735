"""Cross-entropy behind a vocabulary matrix, without ever holding all logits.

    L = Σ_r w_r (log Σ_v exp z_rv − z_{r,y_r}),   z = x Wᵀ + b

Rows are taken in chunks. For each chunk the logits are computed, one kernel turns them into losses and overwrites them with
∂L/∂z = w (softmax(z) − onehot(y)), and two products turn those into the gradients of x and W. So the backward pass has
nothing left to do but to multiply by the incoming gradient, and memory holds one chunk of logits instead of all.

W is copied to the computing precision with its rows padded to a multiple of 128: matrix units read rows of 30,522 numbers
at a fraction of their speed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_BYTES = 896 << 20  # of logits: large enough for the products, small beside the activations of a batch
ROW_MULTIPLE = 128
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _scores(logits, at, vocabulary: tl.constexpr):
    """z log₂ e at these columns, because the chip has 2ˣ and not eˣ; far below everything in the padding."""
    return tl.load(logits + at, mask=at < vocabulary, other=-1e30).to(tl.float32) * LOG2_E


@triton.jit
def _losses_and_gradients(
    logits, labels, row_weights, losses, stride: tl.constexpr, vocabulary: tl.constexpr, block: tl.constexpr
):
    """One row: its loss, and its logits replaced by their gradient. Padding columns get zero."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    base = logits + row * stride
    columns = tl.arange(0, block)
    if label < 0:
        for first in range(0, stride, block):
            tl.store(base + first + columns, tl.zeros([block], logits.dtype.element_ty), mask=first + columns < stride)
        tl.store(losses + row, 0.0)
    else:
        top = tl.full([block], -1e30, tl.float32)  # each lane keeps its own maximum and sum; they meet at the end
        total = tl.zeros([block], tl.float32)
        for first in range(0, vocabulary, 4 * block):  # four at a time: one rescaling of the sum for four numbers
            a = _scores(base, first + columns, vocabulary)
            b = _scores(base, first + block + columns, vocabulary)
            c = _scores(base, first + 2 * block + columns, vocabulary)
            d = _scores(base, first + 3 * block + columns, vocabulary)
            higher = tl.maximum(top, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
            total = total * tl.exp2(top - higher) + tl.exp2(a - higher) + tl.exp2(b - higher)
            total += tl.exp2(c - higher) + tl.exp2(d - higher)
            top = higher
        highest = tl.max(top, 0)
        log_sum = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))
        target = tl.load(base + label).to(tl.float32) * LOG2_E
        tl.store(losses + row, (log_sum - target) / LOG2_E)
        weight = tl.load(row_weights + row)
        tl.debug_barrier()  # every lane has read its target's logit before any is overwritten
        for first in range(0, stride, block):
            at = first + columns
            gradient = tl.exp2(_scores(base, at, vocabulary) - log_sum) - tl.where(at == label, 1.0, 0.0)
            tl.store(base + at, (gradient * weight).to(logits.dtype.element_ty), mask=at < stride)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, row_weights: Tensor, dtype: torch.dtype,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        rows, width = x.shape
        vocabulary = len(weight)
        padded = triton.cdiv(vocabulary, ROW_MULTIPLE) * ROW_MULTIPLE
        matrix = x.new_zeros(padded, width, dtype=dtype)
        matrix[:vocabulary].copy_(weight)
        offsets = x.new_zeros(padded, dtype=dtype)
        if bias is not None:
            offsets[:vocabulary].copy_(bias)
        inputs = x.to(dtype)
        losses = x.new_empty(rows, dtype=torch.float32)
        grad_x = torch.empty_like(inputs)
        grad_matrix = x.new_zeros(padded, width, dtype=torch.float32)
        grad_bias = x.new_zeros(padded, dtype=torch.float32)
        buffer = x.new_empty(min(chunk, rows), padded, dtype=dtype)
        for first in range(0, rows, chunk):
            part = inputs[first : first + chunk]
            logits = torch.addmm(offsets, part, matrix.t(), out=buffer[: len(part)])
            _losses_and_gradients[(len(part),)](
                logits,
                labels[first:],
                row_weights[first:],
                losses[first:],
                padded,
                vocabulary,
                block=2048,
                num_warps=8,
            )
            torch.mm(logits, matrix, out=grad_x[first : first + chunk])
            _add_product(grad_matrix, logits, part)
            if bias is not None:
                grad_bias += logits.sum(0, dtype=torch.float32)
        ctx.save_for_backward(grad_x, grad_matrix[:vocabulary], grad_bias[:vocabulary])
        ctx.x_dtype, ctx.weight_dtype, ctx.bias_dtype = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(losses)
        return (losses * row_weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        return (
            (grad_x * grad).to(ctx.x_dtype),
            (grad_weight * grad).to(ctx.weight_dtype),
            None if ctx.bias_dtype is None else (grad_bias * grad).to(ctx.bias_dtype),
            *[None] * 4,
        )


def _add_product(total: Tensor, gradients: Tensor, inputs: Tensor) -> None:
    """total += gradientsᵀ inputs, accumulated in fp32."""
    if total.is_cuda:
        torch.addmm(total, gradients.t(), inputs, out_dtype=torch.float32, out=total)
    else:
        total += gradients.t().float() @ inputs.float()


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, row_weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x: (rows, d), labels: (rows,), below zero where nothing is predicted, row_weights: (rows,) → the weighted sum of the
    rows' losses, which has gradients, and each row's loss, which has none."""
    chunk = max(256, CHUNK_BYTES // (2 * len(weight)) // 256 * 256)
    chunks = -(-len(x) // chunk)
    even = -(-len(x) // chunks)  # chunks of equal size
    chunk = -(-even // 64) * 64
    total, losses = _LinearCrossEntropy.apply(x, weight, bias, labels, row_weights, dtype, chunk)
    return total, losses
