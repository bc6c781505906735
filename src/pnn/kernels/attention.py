"""Packed self-attention for short sequences: one program computes one head of one whole sequence.

    (q, k, v) = x + b,   P = softmax(q kᵀ / √d),   out = dropout(P) v

With at most `LONGEST` tokens a sequence, all of it fits on the chip: the forward pass needs no running statistics, and the
backward pass is one kernel without atomics that writes dq, dk and dv once. Flash attention is made for long sequences and pays
for that generality on short ones; it also has no dropout on packed batches.

Sequences of more than half of that are taken apart into two blocks of queries and two of keys, shorter ones are one of each.
Saved for the backward pass: inputs, output, and one number a token and head, log₂ Σ 2^score. Dropout's mask is drawn again from
its seed (`random`): a row is a token's head, a column a key. The bias of the projection that made x is added here, where it
costs nothing, and its gradient is a sum that the backward pass has at hand.
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
WIDTHS = (16, 32, 64, 128)  # of a head
LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2))


def takes(width: int, longest: int) -> bool:
    """Whether this file computes attention for heads of this width and sequences of at most `longest` tokens."""
    return longest <= LONGEST and width in WIDTHS


@triton.jit
def _load(qkv, bias, start, rows, length, stride, part, head, heads: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of q (part 0), k (1) or v (2) of one head, bias added; zero beyond the sequence."""
    dims = (part * heads + head) * width + tl.arange(0, width)
    real = rows[:, None] < length
    x = tl.load(qkv + (start + rows[:, None]) * stride + dims[None, :], mask=real, other=0.0)
    shifted = x.to(tl.float32) + tl.load(bias + dims)[None, :].to(tl.float32)
    return tl.where(real, shifted, 0.0).to(x.dtype)


@triton.jit
def _scores(q, k, columns, length, scale):  # type: ignore[no-untyped-def]
    """q kᵀ · `scale`, which includes log₂ e, because the chip has 2ˣ and not eˣ."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    return tl.where(columns[None, :] < length, scores, float("-inf"))


@triton.jit
def _kept(start, rows, columns, head, seed, threshold, heads: tl.constexpr):  # type: ignore[no-untyped-def]
    hashes = random.row_hash((start + rows) * heads + head, seed)
    return random.kept(hashes[:, None], random.column_hash(columns)[None, :], threshold)


@triton.jit
def _forward_block(  # type: ignore[no-untyped-def]
    qkv,
    bias,
    out,
    log_sums,
    start,
    length,
    head,
    seed,
    stride,
    scale,
    threshold,
    keep_scale,
    first: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
    drops: tl.constexpr,
):
    """`block_q` queries from `first` on, against all keys."""
    rows, columns, dims = first + tl.arange(0, block_q), tl.arange(0, block_k), tl.arange(0, width)
    q = _load(qkv, bias, start, rows, length, stride, 0, head, heads, width)
    k = _load(qkv, bias, start, columns, length, stride, 1, head, heads, width)
    v = _load(qkv, bias, start, columns, length, stride, 2, head, heads, width)
    scores = _scores(q, k, columns, length, scale)
    top = tl.max(scores, 1)
    p = tl.exp2(scores - top[:, None])
    total = tl.sum(p, 1)
    if drops:
        p = tl.where(_kept(start, rows, columns, head, seed, threshold, heads), p, 0.0)
    context = tl.dot(p.to(v.dtype), v, input_precision="ieee") * (keep_scale / total)[:, None]
    at = (start + rows) * heads + head
    tl.store(out + at[:, None] * width + dims[None, :], context.to(out.dtype.element_ty), mask=rows[:, None] < length)
    tl.store(log_sums + at, top + tl.log2(total), mask=rows < length)


@triton.jit
def _queries(  # type: ignore[no-untyped-def]
    qkv,
    bias,
    out,
    grad,
    log_sums,
    start,
    length,
    head,
    stride,
    first: tl.constexpr,
    heads: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """What the backward pass needs of a block of queries: their rows, q, ∂out, log sums, and Σ ∂out ⊙ out."""
    rows, dims = first + tl.arange(0, block), tl.arange(0, width)
    at = (start + rows) * heads + head
    real = rows < length
    do = tl.load(grad + at[:, None] * width + dims[None, :], mask=real[:, None], other=0.0)
    o = tl.load(out + at[:, None] * width + dims[None, :], mask=real[:, None], other=0.0)
    product = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    q = _load(qkv, bias, start, rows, length, stride, 0, head, heads, width)
    return rows, q, do, tl.load(log_sums + at, mask=real, other=0.0), product


@triton.jit
def _backward_tile(  # type: ignore[no-untyped-def]
    rows,
    q,
    do,
    log_sum,
    product,
    columns,
    k,
    v,
    dq,
    dk,
    dv,
    start,
    length,
    head,
    seed,
    scale,
    threshold,
    keep_scale,
    heads: tl.constexpr,
    drops: tl.constexpr,
):
    """One block of queries against one of keys: dq, dk and dv with their part added (dq and dk still without the scale)."""
    p = tl.exp2(_scores(q, k, columns, length, scale) - log_sum[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    dropped = p
    if drops:
        kept = _kept(start, rows, columns, head, seed, threshold, heads)
        dropped = tl.where(kept, p * keep_scale, 0.0)
        dp = tl.where(kept, dp * keep_scale, 0.0)
    dv = tl.dot(tl.trans(dropped.to(do.dtype)), do, dv, input_precision="ieee")
    ds = (p * (dp - product[:, None])).to(k.dtype)
    dq = tl.dot(ds, k, dq, input_precision="ieee")
    dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
    return dq, dk, dv


@triton.jit
def _store(
    grad_qkv, bias_share, x, start, rows, length, part, head, heads: tl.constexpr, width: tl.constexpr, adds: tl.constexpr
):  # type: ignore[no-untyped-def]
    """Rows of dq, dk or dv, and their sum, this sequence's share of the bias's gradient."""
    dims = (part * heads + head) * width + tl.arange(0, width)
    at = (start + rows[:, None]) * (3 * heads * width) + dims[None, :]
    tl.store(grad_qkv + at, x.to(grad_qkv.dtype.element_ty), mask=rows[:, None] < length)
    share = tl.sum(x, 0)  # rows beyond the sequence are zero
    if adds:
        share += tl.load(bias_share + dims)
    tl.store(bias_share + dims, share)


@triton.jit
def _place(borders, heads: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's sequence and head; a token's heads are neighbours in memory, so they run side by side."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start = tl.load(borders + sequence).to(tl.int64)
    return sequence, start, (tl.load(borders + sequence + 1) - start).to(tl.int32), head


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    qkv,
    bias,
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
    drops: tl.constexpr,
    half: tl.constexpr,
    long_q: tl.constexpr,
):
    _, start, length, head = _place(borders, heads)
    seed = tl.load(seeds)
    if length <= half:
        if length > 0:
            _forward_block(
                qkv, bias, out, log_sums, start, length, head, seed, stride, scale, threshold, keep_scale,
                0, heads, width, half, half, drops,
            )  # fmt: skip
    else:
        for first in tl.static_range(0, 2 * half, long_q):
            _forward_block(
                qkv, bias, out, log_sums, start, length, head, seed, stride, scale, threshold, keep_scale,
                first, heads, width, long_q, 2 * half, drops,
            )  # fmt: skip


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    qkv,
    bias,
    out,
    grad,
    log_sums,
    grad_qkv,
    bias_shares,
    borders,
    seeds,
    stride,
    scale,
    threshold,
    keep_scale,
    heads: tl.constexpr,
    width: tl.constexpr,
    drops: tl.constexpr,
    half: tl.constexpr,
):
    sequence, start, length, head = _place(borders, heads)
    seed = tl.load(seeds)
    share = bias_shares + sequence.to(tl.int64) * (3 * heads * width)
    zeros = tl.zeros([half, width], tl.float32)
    rows, q, do, log_sum, product = _queries(qkv, bias, out, grad, log_sums, start, length, head, stride, 0, heads, width, half)
    k = _load(qkv, bias, start, rows, length, stride, 1, head, heads, width)
    v = _load(qkv, bias, start, rows, length, stride, 2, head, heads, width)
    dq, dk, dv = _backward_tile(
        rows, q, do, log_sum, product, rows, k, v, zeros, zeros, zeros,
        start, length, head, seed, scale, threshold, keep_scale, heads, drops,
    )  # fmt: skip
    if length <= half:
        _store(grad_qkv, share, dq * (scale * LN_2), start, rows, length, 0, head, heads, width, False)
        _store(grad_qkv, share, dk * (scale * LN_2), start, rows, length, 1, head, heads, width, False)
        _store(grad_qkv, share, dv, start, rows, length, 2, head, heads, width, False)
    else:
        rows2, q2, do2, log_sum2, product2 = _queries(
            qkv, bias, out, grad, log_sums, start, length, head, stride, half, heads, width, half
        )
        dq2, dk, dv = _backward_tile(
            rows2, q2, do2, log_sum2, product2, rows, k, v, zeros, dk, dv,
            start, length, head, seed, scale, threshold, keep_scale, heads, drops,
        )  # fmt: skip
        _store(grad_qkv, share, dk * (scale * LN_2), start, rows, length, 1, head, heads, width, False)
        _store(grad_qkv, share, dv, start, rows, length, 2, head, heads, width, False)
        k = _load(qkv, bias, start, rows2, length, stride, 1, head, heads, width)
        v = _load(qkv, bias, start, rows2, length, stride, 2, head, heads, width)
        dq, dk, dv = _backward_tile(
            rows, q, do, log_sum, product, rows2, k, v, dq, zeros, zeros,
            start, length, head, seed, scale, threshold, keep_scale, heads, drops,
        )  # fmt: skip
        dq2, dk, dv = _backward_tile(
            rows2, q2, do2, log_sum2, product2, rows2, k, v, dq2, dk, dv,
            start, length, head, seed, scale, threshold, keep_scale, heads, drops,
        )  # fmt: skip
        _store(grad_qkv, share, dq * (scale * LN_2), start, rows, length, 0, head, heads, width, False)
        tl.debug_barrier()  # the share just stored is read again below
        _store(grad_qkv, share, dq2 * (scale * LN_2), start, rows2, length, 0, head, heads, width, True)
        _store(grad_qkv, share, dk * (scale * LN_2), start, rows2, length, 1, head, heads, width, True)
        _store(grad_qkv, share, dv, start, rows2, length, 2, head, heads, width, True)


def _launch(
    kernel: Any,
    qkv: Tensor,
    tensors: tuple[Tensor, ...],
    borders: Tensor,
    longest: int,
    dropout: float,
    seed: Tensor,
    **more: int,
) -> None:
    _, _, heads, width = qkv.shape
    kernel[((len(borders) - 1) * heads,)](
        qkv,
        *tensors,
        borders,
        seed,
        qkv.stride(0),
        width**-0.5 * LOG2_E,
        random.threshold(dropout),
        1 / (1 - dropout),
        heads=heads,
        width=width,
        drops=dropout > 0,
        half=max(16, triton.next_power_of_2(longest) // 2),
        num_stages=1,
        **more,
    )


@torch.library.custom_op("pnn::short_attention", mutates_args=())
def _attention(qkv: Tensor, bias: Tensor, borders: Tensor, longest: int, dropout: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    tokens, _, heads, width = qkv.shape
    out = qkv.new_empty(tokens, heads, width)
    log_sums = qkv.new_empty(tokens, heads, dtype=torch.float32)
    half = max(16, triton.next_power_of_2(longest) // 2)
    _launch(_forward, qkv, (bias, out, log_sums), borders, longest, dropout, seed, long_q=half, num_warps=4)
    return out, log_sums


@torch.library.custom_op("pnn::short_attention_backward", mutates_args=())
def _attention_backward(
    qkv: Tensor,
    bias: Tensor,
    out: Tensor,
    grad: Tensor,
    log_sums: Tensor,
    borders: Tensor,
    longest: int,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    grad_qkv = qkv.new_empty(qkv.shape)
    shares = qkv.new_empty(len(borders) - 1, *bias.shape, dtype=torch.float32)
    tensors = (bias, out, grad.contiguous(), log_sums, grad_qkv, shares)
    _launch(_backward, qkv, tensors, borders, longest, dropout, seed, num_warps=4)
    return grad_qkv, shares.sum(0)


@_attention.register_fake
def _(qkv: Tensor, bias: Tensor, borders: Tensor, longest: int, dropout: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    tokens, _, heads, width = qkv.shape
    return qkv.new_empty(tokens, heads, width), qkv.new_empty(tokens, heads, dtype=torch.float32)


@_attention_backward.register_fake
def _(
    qkv: Tensor,
    bias: Tensor,
    out: Tensor,
    grad: Tensor,
    log_sums: Tensor,
    borders: Tensor,
    longest: int,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), bias.new_empty(bias.shape, dtype=torch.float32)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    qkv, bias, borders, ctx.longest, ctx.dropout, seed = inputs
    ctx.save_for_backward(qkv, bias, *output, borders, seed)


def _differentiate(ctx, grad, _log_sums):  # type: ignore[no-untyped-def]
    qkv, bias, out, log_sums, borders, seed = ctx.saved_tensors
    grad_qkv, grad_bias = _attention_backward(qkv, bias, out, grad, log_sums, borders, ctx.longest, ctx.dropout, seed)
    return grad_qkv, grad_bias.to(bias.dtype), None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def short_attention(qkv: Tensor, bias: Tensor, borders: Tensor, longest: int, dropout: float = 0.0) -> Tensor:
    """qkv: (tokens, 3, heads, width), bias: (3 · heads · width,) → (tokens, heads, width). `borders` (int32) must cover every
    token."""
    assert qkv.stride(-1) == 1
    assert qkv.stride(1) == qkv.shape[2] * qkv.shape[3]
    out: Tensor = _attention(qkv, bias, borders, longest, dropout, random.seed_for(qkv, dropout))[0]
    return out
