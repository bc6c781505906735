"""Multi-head self-attention over padded or packed sequences.

    Attn(h) = W_o · concat_i softmax(q_i k_iᵀ / √d_head) v_i,   (q, k, v) = split(W_qkv h)

Tokens come in one of two layouts, and this file is the only place that tells them apart:

* padded: `h` is (sequences, length, d) with an optional mask of real tokens (1) and padding (0);
* packed: `h` is (1, tokens, d), sequences end to end, `cu_seqlens` their borders. No token sees another sequence.

Packed attention has three forms of the same function. `packed_attention` runs everywhere. On a GPU in 16 bit our own
kernel takes over for short sequences, and torch's variable-length flash attention, which has no dropout, for longer ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pnn.kernels import short_rows
from pnn.nn.pointwise import for_kernels, product, untouched

ROW_MULTIPLE = 16  # what a CPU takes at once: torch's attention over rows of 31 is half as fast as over rows of 32


@dataclass(frozen=True)
class Rows:
    """Packed sequences laid out as padded rows, for attention alone: where everything goes, worked out once for a batch.

    What moves is one token's q, k or v in one head, a row of the (tokens · 3 · heads, d_head) that a projection gives.
    """

    heads: int
    keep: Tensor  # (sequences, length) bool, True at real tokens
    spread: Tensor  # which of them lies in each place of (3, sequences, heads, length); padding repeats its last token
    gather: Tensor  # the way back: in which place each of them lies, (tokens · 3 · heads,)
    collect: Tensor  # in which place of (sequences, heads, length) each token's attention is found, (tokens · heads,)

    @staticmethod
    def of(cu_seqlens: Tensor, tokens: int, heads: int) -> Rows:
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        filled = lengths.clamp(min=1)  # an empty sequence sees one token, whose weight goes nowhere: no NaN
        sequences, length = len(starts), math.ceil(int(lengths.max()) / ROW_MULTIPLE) * ROW_MULTIPLE

        def count(n: int) -> Tensor:
            return torch.arange(n, device=cu_seqlens.device)

        token = (starts[:, None] + count(length).minimum(filled[:, None] - 1)).clamp(max=tokens - 1)
        spread = token[:, None] * (3 * heads) + count(3 * heads).view(3, 1, heads, 1)
        # a token's place in head 0 is its own number, moved on by what its row begins with less its sequence's first token
        moved = count(sequences) * (heads * length) - starts
        place = count(tokens) + moved.repeat_interleave(lengths, output_size=tokens)
        collect = place[:, None] + count(heads) * length
        gather = collect[:, None] + count(3)[:, None] * (sequences * heads * length)
        return Rows(heads, count(length) < filled[:, None], spread.flatten(), gather.flatten(), collect.flatten())


@dataclass(frozen=True)
class Layout:
    """How the tokens of a batch lie in memory: padded (`keep`, may be None) or packed (`cu_seqlens`)."""

    keep: Tensor | None = None  # (sequences, length) bool, True at real tokens
    cu_seqlens: Tensor | None = None  # (sequences + 1,) int32, borders of packed sequences
    max_seqlen: int = 0  # an upper bound on the packed sequences' lengths; a constant keeps compiled graphs stable
    rows: Rows | None = None  # the packed sequences as rows, where attention will need them

    def sequence_starts(self, tokens: int) -> Tensor:
        """For each packed token, the index at which its sequence begins."""
        assert self.cu_seqlens is not None
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(self.cu_seqlens[:-1].long(), lengths, output_size=tokens)


def only_at(h: Tensor, at: Tensor | None) -> Tensor:
    """The states of these tokens, (1, len(at), d); `at` counts through all sequences. All states for None."""
    return h if at is None else h.flatten(0, 1).index_select(0, at)[None]


def padded_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, dropout: float = 0.0) -> Tensor:
    """(sequences, length, heads, d_head) ×3 → the same shape; padding is never attended to."""
    mask = None if keep is None else keep[:, None, None, :]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout).transpose(1, 2)


def packed_attention(qkv: Tensor, layout: Layout, dropout: float = 0.0) -> Tensor:
    """(tokens, 3, heads, d_head) → (tokens, heads, d_head): sequences are laid out as padded rows for attention alone.

    Everything else in a model (nine tenths of its work) stays packed, so only this step pays for uneven lengths.
    """
    rows = rows_of(qkv, layout)
    _, _, heads, width = qkv.shape
    q, k, v = qkv.reshape(-1, width).index_select(0, rows.spread).view(3, -1, heads, rows.keep.shape[1], width)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.keep[:, None, None, :], dropout_p=dropout)
    return out.reshape(-1, width).index_select(0, rows.collect).view(-1, heads, width)


def rows_of(qkv: Tensor, layout: Layout) -> Rows:
    """The batch's rows, or new ones for a module with another number of heads."""
    tokens, _, heads, _ = qkv.shape
    if layout.rows is not None and layout.rows.heads == heads:
        return layout.rows
    assert layout.cu_seqlens is not None
    return Rows.of(layout.cu_seqlens, tokens, heads)


def flash_packed_attention(qkv: Tensor, layout: Layout) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # exists for CUDA builds; imported where it is used

    borders = layout.cu_seqlens
    assert borders is not None
    q, k, v = qkv.unbind(1)
    out = varlen_attn(q, k, v, borders, borders, layout.max_seqlen, layout.max_seqlen)
    assert isinstance(out, Tensor)
    return out


def attend_packed(qkv: Tensor, layout: Layout, dropout: float = 0.0) -> Tensor:
    """(tokens, 3, heads, d_head) → (tokens, heads, d_head), by the fastest form that computes it."""
    if for_kernels(qkv):
        from pnn.kernels import attention as kernel

        width = qkv.shape[-1]
        if kernel.takes(width, layout.max_seqlen):
            assert layout.cu_seqlens is not None
            return kernel.short_attention(qkv, layout.cu_seqlens, layout.max_seqlen, dropout)
        if dropout == 0 and width <= 256 and width % 8 == 0:
            return flash_packed_attention(qkv, layout)
    rows = rows_of(qkv, layout)
    if dropout == 0 and short_rows.takes(qkv, rows.keep.shape[1]):
        return short_rows.attention(qkv, rows.keep, rows.spread, rows.gather, rows.collect)
    return packed_attention(qkv, layout, dropout)


class SelfAttention(nn.Module):
    """Multi-head self-attention with biases (as `nn.MultiheadAttention`), its three input projections in one matrix.

    Heads may have been taken away or added since (see `plasticity/`): `num_heads` times `head_width` need not be `hidden_size`.
    """

    def __init__(self, hidden_size: int, num_heads: int, attention_dropout: float = 0.0):
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"num_attention_heads={num_heads} does not divide hidden_size={hidden_size}")
        self.num_heads, self.head_width = num_heads, hidden_size // num_heads
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, h: Tensor, layout: Layout, at: Tensor | None = None) -> Tensor:
        return self.out(only_at(self.context(h, layout), at))

    def unbiased(self, h: Tensor, layout: Layout, at: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Attn(h) without the bias of W_o, and that bias, where the next kernel adds it; elsewhere (Attn(h), None)."""
        return product(self.out, only_at(self.context(h, layout), at)) if untouched(self) else (self(h, layout, at), None)

    def context(self, h: Tensor, layout: Layout) -> Tensor:
        """concat_i softmax(q_i k_iᵀ / √d_head) v_i."""
        batch = h.shape[:-1]
        if self.num_heads == 0:
            return h.new_zeros(*batch, 0)  # W_o of nothing is its bias
        qkv = self.qkv(h)
        parts = (3, self.num_heads, self.head_width)
        dropout = self.attention_dropout if self.training else 0.0
        if layout.cu_seqlens is None:
            q, k, v = qkv.view(*batch, *parts).unbind(-3)
            out = padded_attention(q, k, v, layout.keep, dropout)
        else:
            out = attend_packed(qkv.view(-1, *parts), layout, dropout)
        return out.reshape(*batch, self.num_heads * self.head_width)

    def weights(self, h: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """softmax(q_i k_iᵀ / √d_head), (sequences, heads, length, length), and which tokens are real. For whoever studies
        attention: no fast form has these numbers."""
        qkv = self.qkv(h)
        if layout.cu_seqlens is None:
            q, k, _ = qkv.view(*h.shape[:-1], 3, self.num_heads, self.head_width).permute(2, 0, 3, 1, 4)
            keep = layout.keep
        else:
            rows = rows_of(qkv.view(-1, 3, self.num_heads, self.head_width), layout)
            spread = qkv.reshape(-1, self.head_width).index_select(0, rows.spread)
            q, k, _ = spread.view(3, -1, self.num_heads, rows.keep.shape[1], self.head_width)
            keep = rows.keep
        logits = (q @ k.transpose(-1, -2)).float() / math.sqrt(self.head_width)
        if keep is not None:
            logits = logits.masked_fill(~keep[:, None, None, :], -math.inf)
        return logits.softmax(-1), keep
