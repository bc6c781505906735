"""An image as tokens: x = [c, W p₁ + b, …, W p_N + b], where p_i are its square patches in reading order, and c is one
learnt token that sees them all and is read in the end (what [CLS] is to a text)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PatchTokens(nn.Module):
    def __init__(self, patch_size: int, num_channels: int, hidden_size: int):
        super().__init__()
        self.patch_size = patch_size
        self.project = nn.Linear(num_channels * patch_size**2, hidden_size)

    def forward(self, pixels: Tensor, first: Tensor) -> Tensor:
        """(B, channels, height, width), (1, d) → (B, 1 + patches, d)."""
        tokens = self.project(patches(pixels, self.patch_size))
        return torch.cat([first.expand(len(pixels), 1, -1).to(tokens.dtype), tokens], dim=1)


def patches(pixels: Tensor, size: int) -> Tensor:
    """(B, channels, height, width) → (B, patches, channels · size²): row by row, each patch channel by channel."""
    batch, channels, height, width = pixels.shape
    cut = pixels.reshape(batch, channels, height // size, size, width // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * size**2)
