"""Losses over masked tokens.

    L = Σ_t w_t · CE(head(hᵗ), y),   t = 1 … T        (equation 10; w = 0.1, 0.2, 0.3, 0.4 for T = 4)

Every cross-entropy is a sum over targets divided by `num_items`, the number of targets in the whole update (all
micro-batches of all processes). Averaging each micro-batch by itself would weight a token by how many others happened to
be masked beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # label of a position that is not predicted


def step_weights(num_steps: int) -> list[float]:
    """Weights that grow linearly with the step and sum to one: four steps give 0.1, 0.2, 0.3, 0.4."""
    total = num_steps * (num_steps + 1) // 2
    return [step / total for step in range(1, num_steps + 1)]


def count_targets(labels: Tensor) -> Tensor:
    return (labels != IGNORE).sum()


def cross_entropy(logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Σ over targets of −log p(label), divided by `num_items` (the targets at hand if not given). Zero without targets."""
    if num_items is None:
        num_items = count_targets(labels)
    num_items = num_items.clamp(min=1) if isinstance(num_items, Tensor) else max(1, num_items)
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum") / num_items


def weighted_sum(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    if len(losses) != len(weights):
        raise ValueError(f"{len(losses)} losses but {len(weights)} weights")
    return torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum()
