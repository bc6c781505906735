"""Packed self-attention for short sequences: one program computes one head of one whole sequence.

    P = softmax(q kᵀ / √d),   out = dropout(P) v

With at most `LONGEST` tokens a sequence, every key fits on the chip. So the softmax needs no running statistics, and the
backward pass no second kernel, no atomics and no saved P: it computes P again and writes dq, dk, dv once. Flash attention is
made for long sequences and pays for that generality on short ones; it also has no dropout on packed batches.

Dropout's mask is drawn again from its seed in the backward pass (`random`): a row is a token's head, a column a key.
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
# (queries of a tile, warps) that were fastest on an H200, without and with dropout
FORWARD_TILES = (64, 4), (128, 8)
BACKWARD_TILES = (128, 4), (128, 8)


def takes(width: int, longest: int) -> bool:
    """Whether this file computes attention for heads of this width and sequences of at most `longest` tokens."""
    return longest <= LONGEST and width in WIDTHS


@triton.jit
def _unnormalised(q, k, columns, length, scale):  # type: ignore[no-untyped-def]
    """exp(scores − row maximum) and the sum of each row. `scale` includes log₂ e, because the chip has 2ˣ and not eˣ."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(columns[None, :] < length, scores, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights, tl.sum(weights, 1)


@triton.jit
def _forward_sequence(  # type: ignore[no-untyped-def]
    qkv,
    out,
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
            p, total = _unnormalised(q, k, columns, length, scale)
            if drops:
                hashes = random.row_hash((start + rows) * heads + head, tl.load(seeds))
                p = tl.where(random.kept(hashes[:, None], random.column_hash(columns)[None, :], threshold), p, 0.0)
            context = tl.dot(p.to(v.dtype), v, input_precision="ieee") * (keep_scale / total)[:, None]
            at = (start + rows[:, None]) * (heads * width) + head * width + dims[None, :]
            tl.store(out + at, context.to(out.dtype.element_ty), mask=real)


@triton.jit
def _backward_sequence(  # type: ignore[no-untyped-def]
    qkv,
    grad,
    grad_qkv,
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
    real_key = columns[:, None] < length
    k = tl.load(base + heads * width + key_at, mask=real_key, other=0.0)
    v = tl.load(base + 2 * heads * width + key_at, mask=real_key, other=0.0)
    dk = tl.zeros([block_k, width], dtype=tl.float32)
    dv = tl.zeros([block_k, width], dtype=tl.float32)
    grad_base = grad_qkv + start * (3 * heads * width) + head * width
    for first in tl.static_range(0, block_k, block_q):
        if first < length:
            rows = first + tl.arange(0, block_q)
            real = rows[:, None] < length
            q = tl.load(base + rows[:, None] * stride + dims[None, :], mask=real, other=0.0)
            at = (start + rows[:, None]) * (heads * width) + head * width + dims[None, :]
            do = tl.load(grad + at, mask=real, other=0.0)
            p, total = _unnormalised(q, k, columns, length, scale)
            p = p * (1 / total)[:, None]
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            dropped = p
            if drops:
                hashes = random.row_hash((start + rows) * heads + head, tl.load(seeds))
                kept = random.kept(hashes[:, None], random.column_hash(columns)[None, :], threshold)
                dropped = tl.where(kept, p * keep_scale, 0.0)
                dp = tl.where(kept, dp * keep_scale, 0.0)
            dv += tl.dot(tl.trans(dropped.to(do.dtype)), do, input_precision="ieee")
            ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(k.dtype)
            dq = tl.dot(ds, k, input_precision="ieee") * (scale * LN_2)
            dk += tl.dot(tl.trans(ds), q, input_precision="ieee")
            query_at = rows[:, None] * (3 * heads * width) + dims[None, :]
            tl.store(grad_base + query_at, dq.to(grad_qkv.dtype.element_ty), mask=real)
    key_at = columns[:, None] * (3 * heads * width) + dims[None, :]
    tl.store(grad_base + heads * width + key_at, (dk * (scale * LN_2)).to(grad_qkv.dtype.element_ty), mask=real_key)
    tl.store(grad_base + 2 * heads * width + key_at, dv.to(grad_qkv.dtype.element_ty), mask=real_key)


@triton.jit
def _place(borders, heads: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's sequence and head; a token's heads are neighbours in memory, so they run side by side."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start = tl.load(borders + sequence).to(tl.int64)
    return start, (tl.load(borders + sequence + 1) - start).to(tl.int32), head


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    qkv,
    out,
    borders,
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
    start, length, head = _place(borders, heads)
    half: tl.constexpr = max(16, block_k // 2)
    if length <= half:  # a quarter of the scores
        _forward_sequence(
            qkv, out, start, length, head, seeds, stride, scale, threshold, keep_scale, heads, width, half, half, drops
        )
    else:
        _forward_sequence(
            qkv, out, start, length, head, seeds, stride, scale, threshold, keep_scale, heads, width, block_q, block_k, drops
        )


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    qkv,
    grad,
    grad_qkv,
    borders,
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
    start, length, head = _place(borders, heads)
    half: tl.constexpr = max(16, block_k // 2)
    if length <= half:
        _backward_sequence(
            qkv, grad, grad_qkv, start, length, head, seeds, stride, scale, threshold, keep_scale, heads, width, half, half, drops
        )
    else:
        _backward_sequence(
            qkv, grad, grad_qkv, start, length, head, seeds, stride, scale, threshold, keep_scale, heads, width, block_q, block_k, drops
        )


def _launch(
    kernel: Any, qkv: Tensor, tensors: tuple[Tensor, ...], borders: Tensor, longest: int, dropout: float, seed: Tensor,
    block_q: int, warps: int,
) -> None:  # fmt: skip
    _, _, heads, width = qkv.shape
    block_k = max(16, triton.next_power_of_2(longest))
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
        block_q=min(block_q, block_k),
        block_k=block_k,
        drops=dropout > 0,
        num_warps=warps,
        num_stages=1,
    )


@torch.library.custom_op("pnn::short_attention", mutates_args=())
def _attention(qkv: Tensor, borders: Tensor, longest: int, dropout: float, seed: Tensor) -> Tensor:
    tokens, _, heads, width = qkv.shape
    out = qkv.new_empty(tokens, heads, width)
    _launch(_forward, qkv, (out,), borders, longest, dropout, seed, *FORWARD_TILES[dropout > 0])
    return out


@torch.library.custom_op("pnn::short_attention_backward", mutates_args=())
def _attention_backward(qkv: Tensor, grad: Tensor, borders: Tensor, longest: int, dropout: float, seed: Tensor) -> Tensor:
    grad_qkv = qkv.new_empty(qkv.shape)
    _launch(_backward, qkv, (grad.contiguous(), grad_qkv), borders, longest, dropout, seed, *BACKWARD_TILES[dropout > 0])
    return grad_qkv


@_attention.register_fake
def _(qkv: Tensor, borders: Tensor, longest: int, dropout: float, seed: Tensor) -> Tensor:
    tokens, _, heads, width = qkv.shape
    return qkv.new_empty(tokens, heads, width)


@_attention_backward.register_fake
def _(qkv: Tensor, grad: Tensor, borders: Tensor, longest: int, dropout: float, seed: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    qkv, borders, ctx.longest, ctx.dropout, seed = inputs
    ctx.save_for_backward(qkv, borders, seed)


def _differentiate(ctx, grad):  # type: ignore[no-untyped-def]
    qkv, borders, seed = ctx.saved_tensors
    return _attention_backward(qkv, grad, borders, ctx.longest, ctx.dropout, seed), None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def short_attention(qkv: Tensor, borders: Tensor, longest: int, dropout: float = 0.0) -> Tensor:
    """(tokens, 3, heads, width) → (tokens, heads, width). `borders` (int32) must cover every token."""
    assert qkv.stride(-1) == 1
    assert qkv.stride(1) == qkv.shape[2] * qkv.shape[3]
    return _attention(qkv, borders, longest, dropout, random.seed_for(qkv, dropout))
