"""1/N Σ KL(softmax(teacher's logits) ‖ softmax(the model's)) from states and vocabulary matrices, a chunk of rows at a time.

A chunk's logits of both, in 16 bit, are read twice: once for the sums of their exponentials, once for the divergence and its
gradient, which replaces the model's logits. So no logits are ever held in fp32, and the backward pass has only to scale.

Rows may be told instead, by a label: there the teacher's probability of it counts as 1, and the loss is −log softmax of it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pnn.kernels.cross_entropy import CHUNK_BYTES, LOG2_E, ROW_MULTIPLE, _add_product, _scores


@triton.jit
def _log_sum(base, vocabulary: tl.constexpr, block: tl.constexpr):
    """log₂ Σ 2^z. Each lane keeps its own maximum and sum; they meet at the end."""
    columns = tl.arange(0, block)
    top, total = tl.full([block], -1e30, tl.float32), tl.zeros([block], tl.float32)
    for first in range(0, vocabulary, 2 * block):  # two at a time: one rescaling of the sum for two numbers
        a = _scores(base, first + columns, vocabulary)
        b = _scores(base, first + block + columns, vocabulary)
        higher = tl.maximum(top, tl.maximum(a, b))
        total = total * tl.exp2(top - higher) + tl.exp2(a - higher) + tl.exp2(b - higher)
        top = higher
    highest = tl.max(top, 0)
    return highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))


@triton.jit
def divergences(
    logits, wanted, told, losses, scale,
    stride: tl.constexpr, vocabulary: tl.constexpr, block: tl.constexpr, has_told: tl.constexpr,
):  # fmt: skip
    """One row: its divergence, and its logits replaced by their gradient, times `scale`. Padding columns get zero. `told` is
    read where `has_told`: a label, or a number below zero where the teacher is asked."""
    row = tl.program_id(0).to(tl.int64)
    of_model, of_teacher = logits + row * stride, wanted + row * stride
    log_sum = _log_sum(of_model, vocabulary, block)
    teachers = _log_sum(of_teacher, vocabulary, block)
    columns = tl.arange(0, block)
    found = tl.zeros([block], tl.float32)
    for first in range(0, stride, block):
        at = first + columns
        log_q = _scores(of_model, at, vocabulary) - log_sum
        log_p = _scores(of_teacher, at, vocabulary) - teachers
        p = tl.exp2(log_p)
        if has_told:
            label = tl.load(told + row)
            p = tl.where(label < 0, p, tl.where(at == label, 1.0, 0.0))
            log_p = tl.where(label < 0, log_p, 0.0)  # of the label; of others it is multiplied by zero
        found += tl.where(at < vocabulary, p * (log_p - log_q), 0.0)
        gradient = tl.where(at < vocabulary, (tl.exp2(log_q) - p) * scale, 0.0)
        tl.store(of_model + at, gradient.to(logits.dtype.element_ty), mask=at < stride)
    tl.store(losses + row, tl.sum(found, 0) / LOG2_E)


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor, wanted_weight: Tensor,
        wanted_bias: Tensor | None, dtype: torch.dtype, told: Tensor | None, chunk: int,
    ) -> Tensor:  # fmt: skip
        rows, vocabulary = len(h), len(weight)
        padded = triton.cdiv(vocabulary, ROW_MULTIPLE) * ROW_MULTIPLE
        matrix, offsets = _filled(weight, bias, padded, dtype)
        teaching, teachings = _filled(wanted_weight, wanted_bias, padded, dtype)
        inputs, targets = h.to(dtype), wanted.to(dtype)
        losses, grad_h = h.new_empty(rows, dtype=torch.float32), torch.empty_like(inputs)
        learns = ctx.needs_input_grad[1]  # not where adapters alone do
        grad_matrix = h.new_zeros(padded if learns else 0, h.shape[1], dtype=torch.float32)
        grad_bias = h.new_zeros(padded, dtype=torch.float32)
        buffers = [h.new_empty(min(chunk, rows), padded, dtype=dtype) for _ in range(2)]
        for first in range(0, rows, chunk):
            part, target = inputs[first : first + chunk], targets[first : first + chunk]
            logits = torch.addmm(offsets, part, matrix.t(), out=buffers[0][: len(part)])
            theirs = torch.addmm(teachings, target, teaching.t(), out=buffers[1][: len(part)])
            shape = {"stride": padded, "vocabulary": vocabulary, "block": 2048, "num_warps": 8}
            labels = losses if told is None else told[first:]
            divergences[(len(part),)](logits, theirs, labels, losses[first:], 1 / rows, **shape, has_told=told is not None)
            torch.mm(logits, matrix, out=grad_h[first : first + chunk])
            if learns:
                _add_product(grad_matrix, logits, part)
            if bias is not None:
                grad_bias += logits.sum(0, dtype=torch.float32)
        ctx.save_for_backward(grad_h, grad_matrix[:vocabulary], grad_bias[:vocabulary])
        ctx.dtypes = h.dtype, weight.dtype if learns else None, None if bias is None else bias.dtype
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*(None if dtype is None else (one * grad).to(dtype) for one, dtype in pairs), *[None] * 6)


def _filled(weight: Tensor, bias: Tensor | None, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A vocabulary matrix and its bias in `dtype`, with rows that matrix units like."""
    matrix, offsets = weight.new_zeros(rows, weight.shape[1], dtype=dtype), weight.new_zeros(rows, dtype=dtype)
    matrix[: len(weight)].copy_(weight)
    if bias is not None:
        offsets[: len(weight)].copy_(bias)
    return matrix, offsets


def linear_divergence(
    h: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor, wanted_weight: Tensor, wanted_bias: Tensor | None,
    dtype: torch.dtype, told: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """h: (rows, d), wanted: (rows, d of the teacher), with the matrices that read them → the mean divergence of the rows. Only
    the model's own get gradients. Products are computed in `dtype`. told: (rows,), labels of rows that learn these instead, −1
    for others."""
    chunk = max(1, CHUNK_BYTES // (len(weight) * dtype.itemsize))
    out: Tensor = _LinearDivergence.apply(h, weight, bias, wanted, wanted_weight, wanted_bias, dtype, told, chunk)
    return out
