"""How the tokens of a batch lie in memory, and attention over each layout in plain torch.

* padded: states are (sequences, length, d), with an optional mask of real tokens (1) and padding (0);
* packed: states are (1, tokens, d), sequences end to end, `cu_seqlens` their borders. No token sees another sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pnn.nn.causal import Attend, Past

ROW_MULTIPLE = 16  # what a CPU takes at once: torch's attention over rows of 31 is half as fast as over rows of 32
SMALLEST = 64  # tokens of a bucket; four sizes for each doubling: at most a quarter is computed in vain


def bucket(count: int) -> int:
    """The next of 64, 80, 96, 112, 128, 160, …: few shapes, where each is prepared for."""
    count = max(count, SMALLEST)
    return round_up(count, 1 << ((count - 1).bit_length() - 3))


def round_up(count: int, unit: int) -> int:
    return max(1, math.ceil(count / unit)) * unit


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
    rotation: tuple[Tensor, Tensor] | None = None  # cos and sin of rotary positions, where a model has them
    watched: list[Tensor] | None = None  # attention leaves its weights here, where somebody asked for them
    past: Past | None = None  # in a decoder, whose rows are padded by its mask and not by `keep`
    context: Tensor | None = None  # what attention gives for these tokens, where that was computed before

    def at_step(self, step: int) -> Layout:
        """A decoder's cache has keys and values of every step."""
        return self if self.past is None or self.past.cache is None else replace(self, past=replace(self.past, place=step))

    def sequence_starts(self, tokens: int) -> Tensor:
        """For each packed token, the index at which its sequence begins."""
        assert self.cu_seqlens is not None
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(self.cu_seqlens[:-1].long(), lengths, output_size=tokens)


def only_at(h: Tensor, at: Tensor | None) -> Tensor:
    """The states of these tokens, (1, len(at), d); `at` counts through all sequences. All states for None."""
    return h if at is None else h.flatten(0, 1).index_select(0, at)[None]


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, dropout: float = 0.0, attend: Attend = F.scaled_dot_product_attention
) -> Tensor:
    """(sequences, length, heads, d_head) ×3 → the same shape; padding is never attended to."""
    mask = None if keep is None else keep[:, None, None, :]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, attn_mask=mask, dropout_p=dropout).transpose(1, 2)


def packed_attention(
    qkv: Tensor, layout: Layout, dropout: float = 0.0, attend: Attend = F.scaled_dot_product_attention
) -> Tensor:
    """(tokens, 3, heads, d_head) → (tokens, heads, d_head): sequences are laid out as padded rows for attention alone.

    Everything else in a model (nine tenths of its work) stays packed, so only this step pays for uneven lengths.
    """
    rows = rows_of(qkv, layout)
    _, _, heads, width = qkv.shape
    q, k, v = qkv.reshape(-1, width).index_select(0, rows.spread).view(3, -1, heads, rows.keep.shape[1], width)
    out = attend(q, k, v, attn_mask=rows.keep[:, None, None, :], dropout_p=dropout)
    return out.reshape(-1, width).index_select(0, rows.collect).view(-1, heads, width)


def rows_of(qkv: Tensor, layout: Layout) -> Rows:
    """The batch's rows, or new ones for a module with another number of heads."""
    tokens, _, heads, _ = qkv.shape
    if layout.rows is not None and layout.rows.heads == heads:
        return layout.rows
    assert layout.cu_seqlens is not None
    return Rows.of(layout.cu_seqlens, tokens, heads)
