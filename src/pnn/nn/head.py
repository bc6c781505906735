"""logits = W h + b, at the rows that are asked for; optionally behind BERT's transform LayerNorm(GELU(W_t h + b_t)),
which also narrows h to the width of the vocabulary's table where that is another (`token_size`)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class VocabularyHead(nn.Module):
    def __init__(self, hidden_size: int, vocab_size: int, *, transform: bool, eps: float, token_size: int | None = None):
        super().__init__()
        token_size = hidden_size if token_size is None else token_size
        self.transform = nn.Linear(hidden_size, token_size) if transform else None
        self.norm = nn.LayerNorm(token_size, eps=eps) if transform else None
        self.decoder = nn.Linear(token_size, vocab_size)

    def features(self, h: Tensor) -> Tensor:
        """What the vocabulary matrix is applied to."""
        if self.transform is not None and self.norm is not None:
            h = self.norm(F.gelu(self.transform(h)))
        return h

    def forward(self, h: Tensor) -> Tensor:
        return self.decoder(self.features(h))
