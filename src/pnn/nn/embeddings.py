"""h⁰ = dropout(LayerNorm(E_token[x] + E_position[p])): what PNN and the BERT baseline both start from. With rotary positions,
which attention sees, there is no E_position. A table of tokens may be narrower than the state: then W E_token[x] stands in its
place."""

from __future__ import annotations

from torch import Tensor, nn

from pnn.nn import fast


class TokenPositionEmbeddings(nn.Module):
    def __init__(
        self,
        vocab_size: int,
        max_positions: int | None,
        hidden_size: int,
        dropout: float,
        eps: float,
        token_size: int | None = None,
    ):
        super().__init__()
        token_size = hidden_size if token_size is None else token_size
        self.token = nn.Embedding(vocab_size, token_size)
        self.widen = None if token_size == hidden_size else nn.Linear(token_size, hidden_size, bias=False)
        if self.widen is not None:  # W E[x] starts at the scale of E[x]
            self.widen.start_std = token_size**-0.5
        self.position = None if max_positions is None else nn.Embedding(max_positions, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, token_embeddings: Tensor, position_ids: Tensor) -> Tensor:
        """Takes looked-up token embeddings, so that a caller may pass its own (`inputs_embeds`)."""
        if self.widen is not None:
            token_embeddings = self.widen(token_embeddings)
        places = None if self.position is None else self.position(position_ids)
        if fast.for_kernels(token_embeddings):
            return fast.embed(self, token_embeddings, places)
        return self.dropout(self.norm(token_embeddings if places is None else token_embeddings + places))
