"""h⁰ = dropout(LayerNorm(E_token[x] + E_position[p])): what PNN and the BERT baseline both start from."""

from __future__ import annotations

from torch import Tensor, nn

from pnn.nn.pointwise import drop, drop_add_norm


class TokenPositionEmbeddings(nn.Module):
    def __init__(self, vocab_size: int, max_positions: int, hidden_size: int, dropout: float, eps: float):
        super().__init__()
        self.token = nn.Embedding(vocab_size, hidden_size)
        self.position = nn.Embedding(max_positions, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, token_embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """Takes looked-up token embeddings, so that a caller may pass its own (`inputs_embeds`)."""
        return drop(drop_add_norm(token_embeddings, None, None, self.position(position_ids), self.norm), self.dropout)
