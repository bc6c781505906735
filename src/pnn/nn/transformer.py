"""A BERT layer, post-norm:  a = LayerNorm(h + Attn(h)),  h⁺ = LayerNorm(a + FFN(a))."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pnn.nn import fast
from pnn.nn.attention import SelfAttention
from pnn.nn.feed_forward import FEED_FORWARDS
from pnn.nn.packing import Layout, only_at


class TransformerLayer(nn.Module):
    def __init__(self, config: Any):
        """`config`: anything with the fields of a BertBaselineConfig."""
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention = SelfAttention(width, config.num_attention_heads, config.attention_dropout)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.ffn = FEED_FORWARDS[config.ffn](width, config.intermediate_size, config.dropout)
        self.ffn_norm = nn.LayerNorm(width, eps=eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, layout: Layout, at: Tensor | None = None) -> Tensor:
        """With `at` only of these tokens: attention sees all of them, the rest is per token."""
        if fast.for_kernels(h):
            return fast.layer(self, h, layout, at)
        a = self.attention_norm(only_at(h, at) + self.dropout(self.attention(h, layout, at)))
        return self.ffn_norm(a + self.dropout(self.ffn(a)))
