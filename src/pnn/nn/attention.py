"""Multi-head self-attention over padded or packed sequences (`packing`).

    Attn(h) = W_o · concat_i softmax(q_i k_iᵀ / √d_head) v_i,   (q, k, v) = split(W_qkv h)

With rotary positions q_i and k_i are first turned by their token's place (`rotary`). In a decoder a token sees what came before
it (`causal`).
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from pnn.nn import fast
from pnn.nn.causal import attention_weights
from pnn.nn.packing import Layout, only_at, rows_of


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
        self.is_plain = type(self) is SelfAttention  # fast forms compute in its stead, and not in a subclass's
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.qkv.parts = 3  # type: ignore[assignment]  # matrices in one: an optimiser that works by the matrix takes them apart
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, h: Tensor, layout: Layout, at: Tensor | None = None) -> Tensor:
        return self.out(only_at(self.context(h, layout), at))

    def context(self, h: Tensor, layout: Layout) -> Tensor:
        """concat_i softmax(q_i k_iᵀ / √d_head) v_i."""
        if layout.context is not None:
            return layout.context
        if layout.watched is not None and layout.past is None:
            layout.watched.append(self.weights(h, layout)[0])
        dropout = self.attention_dropout if self.training else 0.0
        return fast.attention(self.projected(h, layout), layout, dropout).flatten(-2)

    def projected(self, h: Tensor, layout: Layout) -> Tensor:
        """q, k and v of every head, (…, 3, heads, d_head)."""
        qkv = self.qkv(h).view(*h.shape[:-1], 3, self.num_heads, self.head_width)
        if layout.rotation is None:
            return qkv
        return fast.turned(qkv, layout.rotation, 2, alone=fast.plain(self.qkv, nn.Linear))

    def queries(self, h: Tensor, layout: Layout) -> Tensor:
        """q alone, (…, heads, d_head): of tokens whose keys and values are there already."""
        if not fast.plain(self.qkv, nn.Linear):
            return self.projected(h, layout)[..., 0, :, :]
        return self._part(h, layout, slice(0, 1)).squeeze(-3)

    def keys_and_values(self, h: Tensor, layout: Layout) -> Tensor:
        """k and v alone, (…, 2, heads, d_head): of tokens that others read and that ask nothing themselves."""
        if not fast.plain(self.qkv, nn.Linear):
            return self.projected(h, layout)[..., 1:, :, :]
        return self._part(h, layout, slice(1, 3))

    def _part(self, h: Tensor, layout: Layout, part: slice) -> Tensor:
        """Some of q, k and v, the first of them turned: each has so many rows of the matrix."""
        rows = slice(part.start * self.num_heads * self.head_width, part.stop * self.num_heads * self.head_width)
        x = F.linear(h, self.qkv.weight[rows], self.qkv.bias[rows])
        x = x.view(*h.shape[:-1], part.stop - part.start, self.num_heads, self.head_width)
        return x if layout.rotation is None else fast.turned(x, layout.rotation, 1)

    def weights(self, h: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """softmax(q_i k_iᵀ / √d_head), (sequences, heads, length, length), and which tokens are real. For whoever studies
        attention: no fast form has these numbers. A decoder's are of a text without cache."""
        qkv, keep = self.projected(h, layout), layout.keep
        if layout.past is not None:
            q, k, _ = qkv.permute(2, 0, 3, 1, 4)
            return attention_weights(q, k, layout.past.mask), keep
        if layout.cu_seqlens is None:
            q, k, _ = qkv.permute(2, 0, 3, 1, 4)
        else:
            rows = rows_of(qkv[0], layout)
            spread = qkv.reshape(-1, self.head_width).index_select(0, rows.spread)
            q, k, _ = spread.view(3, -1, self.num_heads, rows.keep.shape[1], self.head_width)
            keep = rows.keep
        logits = (q @ k.transpose(-1, -2)).float() / math.sqrt(self.head_width)
        if keep is not None:
            logits = logits.masked_fill(~keep[:, None, None, :], -math.inf)
        return logits.softmax(-1), keep
