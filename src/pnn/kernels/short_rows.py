"""Attention over short padded rows on a CPU as batched products, in training.

torch's CPU attention takes one head of one sequence after the other, in blocks. Over a few dozen tokens it is busy with the
blocks; there all heads of all sequences in one batched product, with the weights kept for the backward pass, are twice as fast.
Over longer rows the weights no longer fit into the cache, and torch's is better. In bf16 its backward pass does not use a CPU's
instructions for that, and batched products do: they are 9 times as fast over 36 tokens, 5 over 128 and 2.8 over 512.
The price is rounding: scores and weights have 8 bits, where torch's function has 24 inside. A query's gradient is 0.6 % off
instead of 0.5 where scores are of usual size, 2.9 instead of 1.6 % where they are nine times as large (128 random tokens).

`attention` takes packed sequences, forward and backward pass written out. `by_products` takes what torch's function takes.

A token's q, k and v of one head are a row of `qkv` as (tokens · 3 · heads, d_head), and move as one: `spread` says which of
them lies in each place of (3, sequences, heads, length), `gather` where each of them went, `collect` where each token's
attention is found in (sequences, heads, length). Every move is a copy of rows, backwards as well: padding takes no part.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LONGEST = {torch.float64: 64, torch.float32: 64, torch.bfloat16: 512}
MOST_BYTES = 256 << 20  # of one step's weights, which wait for the backward pass


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, keep: Tensor, spread: Tensor, gather: Tensor, collect: Tensor) -> Tensor:
        tokens, _, heads, width = qkv.shape
        sequences, length = keep.shape
        rows = qkv.reshape(-1, width).index_select(0, spread).view(3, sequences * heads, length, width)
        q, k, v = rows
        q.mul_(width**-0.5)
        scores = torch.bmm(q, k.transpose(1, 2))
        hidden = torch.zeros(sequences, 1, 1, length, dtype=qkv.dtype).masked_fill_(~keep[:, None, None], -math.inf)
        scores.view(sequences, heads, length, length).add_(hidden)
        weights = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(rows, weights, gather, collect)
        return torch.bmm(weights, v).view(-1, width).index_select(0, collect).view(tokens, heads, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, gather, collect = ctx.saved_tensors
        tokens, heads, width = grad.shape
        q, k, v = rows
        grad_out = torch.zeros_like(v)  # nothing comes back from padding
        grad_out.view(-1, width).index_copy_(0, collect, grad.reshape(-1, width))
        grad_rows = torch.empty_like(rows)
        torch.bmm(weights.transpose(1, 2), grad_out, out=grad_rows[2])
        grad_weights = torch.bmm(grad_out, v.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        torch.bmm(grad_scores, k, out=grad_rows[0]).mul_(width**-0.5)
        torch.bmm(grad_scores.transpose(1, 2), q, out=grad_rows[1])  # q has its factor already
        grad_qkv = grad_rows.view(-1, width).index_select(0, gather).view(tokens, 3, heads, width)
        return grad_qkv, None, None, None, None


def takes(x: Tensor, dtype: torch.dtype, rows: int, length: int) -> bool:
    """Training on a CPU, in this precision, rows that are short enough, and nobody compiling: a compiler has its own way.
    `rows`: sequences times heads."""
    fits = x.device.type == "cpu" and length <= LONGEST.get(dtype, 0) and rows * length**2 * dtype.itemsize <= MOST_BYTES
    return fits and x.requires_grad and not torch.compiler.is_compiling()


def attention(qkv: Tensor, keep: Tensor, spread: Tensor, gather: Tensor, collect: Tensor) -> Tensor:
    """(tokens, 3, heads, d_head) → (tokens, heads, d_head); `keep`: (sequences, length), True at real tokens."""
    out: Tensor = _Attention.apply(qkv, keep, spread, gather, collect)
    return out


def by_products(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """`F.scaled_dot_product_attention` of (…, length, d_head). `attn_mask`: True where a token is seen."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)  # finite: a row that sees nothing is no NaN
    return F.dropout(torch.softmax(scores, dim=-1), dropout_p) @ v
