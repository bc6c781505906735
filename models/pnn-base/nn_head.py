# From plastic-neural-networks 0.1.0, pnn/nn/head.py. MIT licence.
"""logits = W h + b, at the rows that are asked for; optionally behind BERT's transform LayerNorm(GELU(W_t h + b_t))."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class VocabularyHead(nn.Module):
    def __init__(self, hidden_size: int, vocab_size: int, *, transform: bool, eps: float):
        super().__init__()
        self.transform = nn.Linear(hidden_size, hidden_size) if transform else None
        self.norm = nn.LayerNorm(hidden_size, eps=eps) if transform else None
        self.decoder = nn.Linear(hidden_size, vocab_size)

    def features(self, h: Tensor) -> Tensor:
        """What the vocabulary matrix is applied to."""
        if self.transform is not None and self.norm is not None:
            h = self.norm(F.gelu(self.transform(h)))
        return h

    def forward(self, h: Tensor) -> Tensor:
        return self.decoder(self.features(h))
