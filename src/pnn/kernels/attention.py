"""Packed self-attention for short sequences: one program computes one head of one whole sequence.

    P = softmax(q kᵀ / √d),   out = dropout(P) v

With at most `LONGEST` tokens a sequence, every key fits on the chip: the softmax needs no running statistics, and the backward
pass is one kernel without atomics. Flash attention is made for long sequences and pays for that generality on short ones; it
also has no dropout on packed batches.

Saved for the backward pass are the inputs, the output and one number a token and head, log₂ Σ 2^score, from which P is made
again without a reduction. Dropout's mask is drawn again from its seed (`random`): a row is a token's head, a column a key.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pnn.kernels import random

LONGEST = 128  # tokens of a sequence
WIDTHS = (16, 32, 64)  # of a head; at 128 the tiles are too large for some GPUs' shared memory
LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2))


def takes(width: int, longest: int) -> bool:
    """Whether this file computes attention for heads of this width and sequences of at most `longest` tokens."""
    return longest <= LONGEST and width in WIDTHS


@triton.jit
def _forward_sequence(
    qkv,
    out,
    log_sums,
    start,
    length,
    head,
    seeds,
    stride,
    scale,
    threshold,
    keep_scale,
    heads: tl.constexpr,
    width: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
    drops: tl.constexpr,
):
    columns, dims = tl.arange(0, block_k), tl.arange(0, width)
    base = qkv + start * stride + head * width
    key_at = columns[:, None] * stride + dims[None, :]
    k = tl.load(base + heads * width + key_at, mask=columns[:, None] < length, other=0.0)
    v = tl.load(base + 2 * heads * width + key_at, mask=columns[:, None] < length, other=0.0)
    for first in tl.static_range(0, block_k, block_q):
        if first < length:
            rows = first + tl.arange(0, block_q)
            real = rows[:, None] < length
            q = tl.load(base + rows[:, None] * stride + dims[None, :], mask=real, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(columns[None, :] < length, scores, float("-inf"))
            top = tl.max(scores, 1)
            p = tl.exp2(scores - top[:, None])
            total = tl.sum(p, 1)
            tl.store(log_sums + (start + rows) * heads + head, top + tl.log2(total), mask=rows < length)
            if drops:
                hashes = random.row_hash((start + rows) * heads + head, tl.load(seeds))
                p = tl.where(random.kept(hashes[:, None], random.column_hash(columns)[None, :], threshold), p, 0.0)
            context = tl.dot(p.to(v.dtype), v, input_precision="ieee") * (keep_scale / total)[:, None]
            at = (start + rows[:, None]) * (heads * width) + head * width + dims[None, :]
            tl.store(out + at, context.to(out.dtype.element_ty), mask=real)


@triton.jit
def _rows_of(x, start, rows, length, stride, part: tl.constexpr, head, heads: tl.constexpr, width: tl.constexpr):
    """Rows of one head of x: (tokens, parts, heads, width). Zero beyond the sequence."""
    at = (start + rows[:, None]) * stride + (part * heads + head) * width + tl.arange(0, width)[None, :]
    return tl.load(x + at, mask=rows[:, None] < length, other=0.0)


@triton.jit
def _keep_rows(x, value, start, rows, length, stride, part: tl.constexpr, head, heads: tl.constexpr, width: tl.constexpr):
    at = (start + rows[:, None]) * stride + (part * heads + head) * width + tl.arange(0, width)[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=rows[:, None] < length)


@triton.jit
def _of_queries(out, grad, log_sums, start, rows, length, head, heads: tl.constexpr, width: tl.constexpr):
    """∂out of these queries, their log sums, and Σ_k P ∂P, which is Σ out ⊙ ∂out."""
    do = _rows_of(grad, start, rows, length, heads * width, 0, head, heads, width)
    o = _rows_of(out, start, rows, length, heads * width, 0, head, heads, width)
    log_sum = tl.load(log_sums + (start + rows) * heads + head, mask=rows < length, other=0.0)
    return do, log_sum, tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)


@triton.jit
def _backward_sequence(
    qkv,
    out,
    log_sums,
    grad,
    grad_qkv,
    start,
    length,
    head,
    seeds,
    stride,
    grad_stride,
    scale,
    threshold,
    keep_scale,
    heads: tl.constexpr,
    width: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
    drops: tl.constexpr,
):
    """Tiles are (keys, queries), transposed: what the products for dv and dk want on their left."""
    columns = tl.arange(0, block_k)
    k = _rows_of(qkv, start, columns, length, stride, 1, head, heads, width)
    v = _rows_of(qkv, start, columns, length, stride, 2, head, heads, width)
    dk = tl.zeros([block_k, width], tl.float32)
    dv = tl.zeros([block_k, width], tl.float32)
    for first in tl.static_range(0, block_k, block_q):
        if first < length:
            rows = first + tl.arange(0, block_q)
            q = _rows_of(qkv, start, rows, length, stride, 0, head, heads, width)
            do, log_sum, product = _of_queries(out, grad, log_sums, start, rows, length, head, heads, width)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * scale - log_sum[None, :])
            p = tl.where(columns[:, None] < length, p, 0.0)
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            dropped = p
            if drops:
                hashes = random.row_hash((start + rows) * heads + head, tl.load(seeds))
                kept = random.kept(hashes[None, :], random.column_hash(columns)[:, None], threshold)
                dropped = tl.where(kept, p * keep_scale, 0.0)
                dp = tl.where(kept, dp * keep_scale, 0.0)
            dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision="ieee")
            ds = (p * (dp - product[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision="ieee")
            dq = tl.dot(tl.trans(ds), k, input_precision="ieee") * (scale * LN_2)
            _keep_rows(grad_qkv, dq, start, rows, length, grad_stride, 0, head, heads, width)
    _keep_rows(grad_qkv, dk * (scale * LN_2), start, columns, length, grad_stride, 1, head, heads, width)
    _keep_rows(grad_qkv, dv, start, columns, length, grad_stride, 2, head, heads, width)


@triton.jit
def _place(borders, index, heads: tl.constexpr):
    """Sequence and head number `index`; a token's heads are neighbours in memory, so they run side by side."""
    sequence, head = index // heads, index % heads
    start = tl.load(borders + sequence).to(tl.int64)
    return start, (tl.load(borders + sequence + 1) - start).to(tl.int32), head


@triton.jit
def attention_forward(
    qkv,
    out,
    log_sums,
    borders,
    seeds,
    stride,
    scale,
    threshold,
    keep_scale,
    heads: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    drops: tl.constexpr,
    block_q: tl.constexpr,
):
    start, length, head = _place(borders, tl.program_id(0), heads)
    if length <= half:  # a quarter of the scores
        _forward_sequence(
            qkv, out, log_sums, start, length, head, seeds, stride, scale, threshold, keep_scale,
            heads, width, half, half, drops,
        )  # fmt: skip
    else:
        _forward_sequence(
            qkv, out, log_sums, start, length, head, seeds, stride, scale, threshold, keep_scale,
            heads, width, block_q, 2 * half, drops,
        )  # fmt: skip


@triton.jit
def attention_backward(
    qkv,
    out,
    log_sums,
    grad,
    grad_qkv,
    borders,
    seeds,
    stride,
    grad_stride,
    scale,
    threshold,
    keep_scale,
    heads: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    drops: tl.constexpr,
    block_q: tl.constexpr,
):
    start, length, head = _place(borders, tl.program_id(0), heads)
    if length <= half:
        _backward_sequence(
            qkv, out, log_sums, grad, grad_qkv, start, length, head, seeds, stride, grad_stride, scale, threshold, keep_scale,
            heads, width, half, half, drops,
        )  # fmt: skip
    else:
        _backward_sequence(
            qkv, out, log_sums, grad, grad_qkv, start, length, head, seeds, stride, grad_stride, scale, threshold, keep_scale,
            heads, width, block_q, 2 * half, drops,
        )  # fmt: skip


def _launch(
    kernel: Any,
    qkv: Tensor,
    tensors: tuple[Tensor, ...],
    borders: Tensor,
    longest: int,
    dropout: float,
    seed: Tensor,
    strides: tuple[int, ...],
    **tile: int,
) -> None:
    _, _, heads, width = qkv.shape
    kernel[((len(borders) - 1) * heads,)](
        qkv,
        *tensors,
        borders,
        seed,
        *strides,
        width**-0.5 * LOG2_E,
        random.threshold(dropout),
        1 / (1 - dropout),
        heads=heads,
        width=width,
        half=half_of(longest),
        drops=dropout > 0,
        num_stages=1,
        **tile,
    )


def half_of(longest: int) -> int:
    return max(16, triton.next_power_of_2(longest) // 2)


def forward(qkv: Tensor, borders: Tensor, longest: int, dropout: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and log₂ Σ 2^score of each token and head."""
    tokens, _, heads, width = qkv.shape
    out, log_sums = qkv.new_empty(tokens, heads, width), qkv.new_empty(tokens, heads, dtype=torch.float32)
    tile = {"block_q": half_of(longest), "num_warps": 4}  # what was fastest on an H200, as in the backward pass
    _launch(attention_forward, qkv, (out, log_sums), borders, longest, dropout, seed, (qkv.stride(0),), **tile)
    return out, log_sums


def backward(
    qkv: Tensor,
    out: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    grad_qkv: Tensor,
    borders: Tensor,
    longest: int,
    dropout: float,
    seed: Tensor,
) -> None:
    """Writes grad_qkv, whose rows, as those of qkv, may be part of wider ones."""
    strides = qkv.stride(0), grad_qkv.stride(0)
    tensors = out, log_sums, grad.contiguous(), grad_qkv
    # two programs fit on a multiprocessor at 128 registers a thread, and run faster than one that has all it asks for
    tile = {"block_q": max(16, half_of(longest) // 2), "num_warps": 8, "maxnreg": 128}
    _launch(attention_backward, qkv, tensors, borders, longest, dropout, seed, strides, **tile)


@torch.library.custom_op("pnn::short_attention", mutates_args=())
def _attention(qkv: Tensor, borders: Tensor, longest: int, dropout: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    return forward(qkv, borders, longest, dropout, seed)


@torch.library.custom_op("pnn::short_attention_backward", mutates_args=())
def _attention_backward(
    qkv: Tensor, out: Tensor, log_sums: Tensor, grad: Tensor, borders: Tensor, longest: int, dropout: float, seed: Tensor
) -> Tensor:
    grad_qkv = qkv.new_empty(qkv.shape)
    backward(qkv, out, log_sums, grad, grad_qkv, borders, longest, dropout, seed)
    return grad_qkv


@_attention.register_fake
def _(qkv: Tensor, borders: Tensor, longest: int, dropout: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    tokens, _, heads, width = qkv.shape
    return qkv.new_empty(tokens, heads, width), qkv.new_empty(tokens, heads, dtype=torch.float32)


@_attention_backward.register_fake
def _(
    qkv: Tensor, out: Tensor, log_sums: Tensor, grad: Tensor, borders: Tensor, longest: int, dropout: float, seed: Tensor
) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx, inputs, output) -> None:
    qkv, borders, ctx.longest, ctx.dropout, seed = inputs
    ctx.save_for_backward(qkv, *output, borders, seed)


def _differentiate(ctx, grad, _log_sums):
    qkv, out, log_sums, borders, seed = ctx.saved_tensors
    grad_qkv = _attention_backward(qkv, out, log_sums, grad, borders, ctx.longest, ctx.dropout, seed)
    return grad_qkv, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def short_attention(qkv: Tensor, borders: Tensor, longest: int, dropout: float = 0.0) -> Tensor:
    """(tokens, 3, heads, width) → (tokens, heads, width). `borders` (int32) must cover every token."""
    assert qkv.stride(-1) == 1
    assert qkv.stride(1) == qkv.shape[2] * qkv.shape[3]
    out: Tensor = _attention(qkv, borders, longest, dropout, random.seed_for(qkv, dropout))[0]
    return out
