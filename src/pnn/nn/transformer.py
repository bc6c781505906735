"""A BERT layer, post-norm:  a = LayerNorm(h + Attn(h)),  h⁺ = LayerNorm(a + FFN(a))."""

from __future__ import annotations

from torch import Tensor, nn

from pnn.nn.attention import Layout, SelfAttention, only_at
from pnn.nn.feed_forward import FeedForward
from pnn.nn.pointwise import drop_add_norm


class TransformerLayer(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        *,
        dropout: float,
        attention_dropout: float,
        eps: float,
    ):
        super().__init__()
        self.attention = SelfAttention(hidden_size, num_heads, attention_dropout)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.ffn = FeedForward(hidden_size, intermediate_size, dropout)
        self.ffn_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, layout: Layout, at: Tensor | None = None) -> Tensor:
        """With `at` only of these tokens: attention sees all of them, the rest is per token."""
        h = drop_add_norm(*self.attention.unbiased(h, layout, at), self.dropout, only_at(h, at), self.attention_norm)
        return drop_add_norm(*self.ffn.unbiased(h), self.dropout, h, self.ffn_norm)
