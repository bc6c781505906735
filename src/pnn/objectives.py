"""Losses over masked tokens, and over next ones.

    L = Σ_t w_t · CE(head(hᵗ), y),   t = 1 … T        (equation 10; w = 0.1, 0.2, 0.3, 0.4 for T = 4)

Every cross-entropy is a sum over targets divided by `num_items`, the number of targets in the whole update (all
micro-batches of all processes). Averaging each micro-batch by itself would weight a token by how many others happened to
be masked beside it.

`step_weighted_loss` has a plain form. On a GPU in 16 bit a kernel takes over that never holds the logits of all steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pnn.nn.fast import computed_in, for_kernels, untouched

IGNORE = -100  # label of a position that is not predicted


def step_weights(num_steps: int) -> list[float]:
    """Weights that grow linearly with the step and sum to one: four steps give 0.1, 0.2, 0.3, 0.4."""
    total = num_steps * (num_steps + 1) // 2
    return [step / total for step in range(1, num_steps + 1)]


def weights_at(weights: Sequence[float], num_steps: int) -> list[float]:
    """Chosen weights for another number of steps: they stay where they are, counted from the last step, and sum to the same.
    What reads the last step alone goes on reading the last alone; fewer steps lose the first weights."""
    taken = ([0.0] * num_steps + list(weights))[-num_steps:]
    return list(weights) if num_steps == len(weights) else [weight * sum(weights) / sum(taken) for weight in taken]


def count_targets(labels: Tensor) -> Tensor:
    return (labels != IGNORE).sum()


def cross_entropy(logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Σ over targets of −log p(label), divided by `num_items` (the targets at hand if not given). Zero without targets."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum") / divisor(num_items, labels)


def divisor(num_items: Tensor | int | None, labels: Tensor) -> Tensor | int:
    """The targets that a sum of losses is divided by; one where there are none."""
    if num_items is None:
        num_items = count_targets(labels)
    return num_items.clamp(min=1) if isinstance(num_items, Tensor) else max(1, num_items)


def weighted_sum(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    if len(losses) != len(weights):
        raise ValueError(f"{len(losses)} losses but {len(weights)} weights")
    return torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum()


def step_weighted_loss(
    features: Sequence[Tensor],
    decoder: nn.Linear,
    labels: Tensor,
    weights: Sequence[float],
    num_items: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:
    """features: one (rows, d) tensor a step; labels: (rows,) → (the loss L, each step's own loss without gradient)."""
    x = features[0]
    if for_kernels(x) and x.requires_grad and type(decoder) is nn.Linear and untouched(decoder):
        from pnn.kernels import cross_entropy as kernel

        steps = len(features)
        row_weights = torch.cat([labels.new_full((len(x),), weight, dtype=torch.float32) for weight in weights])
        rows, labels_of_rows = torch.cat(tuple(features)), labels.repeat(steps)
        total, losses = kernel.linear_cross_entropy(
            rows, decoder.weight, decoder.bias, labels_of_rows, row_weights, computed_in(x)
        )
        targets = divisor(num_items, labels)
        return total / targets, losses.view(steps, -1).sum(1) / targets
    losses_by_step = [cross_entropy(decoder(step), labels, num_items) for step in features]
    return weighted_sum(losses_by_step, weights), torch.stack([loss.detach() for loss in losses_by_step])


def next_tokens(labels: Tensor) -> Tensor:
    """What each token of these rows predicts: the next one, and the last of a row nothing. labels: (B, T), −100 where nothing
    is predicted."""
    targets = torch.full_like(labels, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    return targets


def next_token_loss(h: Tensor, head: nn.Linear, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """h: (B, T, d); labels: the tokens themselves, (B, T)."""
    loss, _ = step_weighted_loss([h.flatten(0, 1)], head, next_tokens(labels).flatten(), [1.0], num_items)
    return loss
