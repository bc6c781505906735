"""AdamW on matrices and vectors with their own decay, the learning rate of a step, and a step on one device."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pnn.config import TrainingConfig


def make_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """Weight decay acts on matrices only: not on norms, biases and the gate's temperature."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (training.adam_beta1, training.adam_beta2)
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=betas, fused=True)


def learning_rate(step: int, total: int, training: TrainingConfig) -> float:
    """Linear warm-up, then a cosine that ends at the minimum. `step` counts updates from 0; the first is not wasted on
    a rate of zero."""
    peak, floor, warmup = training.learning_rate, training.min_learning_rate, training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - 1 - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float, clip: float = 1.0) -> None:
    """One step down this loss, gradients clipped. The trainer's own knows of micro-batches, processes and fp16 as well."""
    set_learning_rate(optimizer, rate)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
