# From plastic-neural-networks 0.1.0, pnn/nn/embeddings.py. MIT licence.
"""h⁰ = dropout(LayerNorm(E_token[x] + E_position[p])): what PNN and the BERT baseline both start from. With rotary positions,
which attention sees, there is no E_position."""

from __future__ import annotations

from torch import Tensor, nn

from .nn_fast import __doc__ as _fast  # noqa: F401
from . import nn_fast as fast


class TokenPositionEmbeddings(nn.Module):
    def __init__(self, vocab_size: int, max_positions: int | None, hidden_size: int, dropout: float, eps: float):
        super().__init__()
        self.token = nn.Embedding(vocab_size, hidden_size)
        self.position = None if max_positions is None else nn.Embedding(max_positions, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, token_embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """Takes looked-up token embeddings, so that a caller may pass its own (`inputs_embeds`)."""
        places = None if self.position is None else self.position(position_ids)
        if fast.for_kernels(token_embeddings):
            return fast.embed(self, token_embeddings, places)
        return self.dropout(self.norm(token_embeddings if places is None else token_embeddings + places))
