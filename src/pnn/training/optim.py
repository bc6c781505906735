"""The optimiser of a run, the learning rate of a step, and a step on one device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pnn.config import TrainingConfig
from pnn.errors import UserError
from pnn.models.registry import distinct_blocks
from pnn.training.muon import Muon
from pnn.training.widths import carried, of_adamw, of_muon, sums_over_width, times_as_wide

DECAYED = 0.2  # of a run, at the end of a flat schedule


def make_optimizer(model: PreTrainedModel, training: TrainingConfig) -> torch.optim.Optimizer:
    """Weight decay acts on matrices only: not on norms, biases and the gate's temperature. With `base_width`, matrices have
    rates of their own (`training/widths`)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    muon = block_matrices(model) if training.optimizer == "muon" else {}
    if training.optimizer == "muon" and not muon:
        raise UserError(
            f"training.optimizer: muon, but the blocks of a {type(model).__name__} have no linear layers: take adamw"
        )
    m = times_as_wide(model, training)
    summing = sums_over_width(model) if m != 1 else set()
    matrices = [p for p in trained if p.dim() > 1 and p not in muon]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in matrices if p not in summing], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if summing:
        groups.append({"params": [p for p in matrices if p in summing], **carried(of_adamw(m), training.weight_decay)})
    betas = (training.adam_beta1, training.adam_beta2)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=betas, fused=True)
    if muon:
        optimizer = Muon(muon.items(), optimizer, training.learning_rate, training.weight_decay)  # type: ignore[arg-type]
        optimizer.param_groups[0].update(carried(of_muon(m), training.weight_decay))
    set_learning_rate(optimizer, training.learning_rate)
    return optimizer


def block_matrices(model: PreTrainedModel) -> dict[Tensor, int]:
    """The matrices of a model's blocks that are trained, and how many lie in each parameter."""
    layers = [one for block in distinct_blocks(model) for one in block.modules() if isinstance(one, nn.Linear)]
    chosen = [layer for layer in layers if layer.weight.requires_grad and min(layer.weight.shape) > 1]
    return {layer.weight: getattr(layer, "parts", 1) for layer in chosen}


def learning_rate(step: int, total: int, training: TrainingConfig) -> float:
    """Linear warm-up, then a cosine that ends at the minimum; or flat, and a straight line to the minimum over the last fifth.
    `step` counts updates from 0; the first is not wasted on a rate of zero."""
    peak, floor, warmup = training.learning_rate, training.min_learning_rate, training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if training.schedule == "flat":
        left = (total - 1 - step) / max(1.0, DECAYED * total)
        return floor + (peak - floor) * min(1.0, left)
    progress = (step - warmup) / max(1, total - 1 - warmup)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def average_weights(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """ā ← decay · ā + (1 − decay) · w after every update, beginning with w. It is part of the optimiser's state, so that it is
    saved and resumed with it."""
    moved = [p for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)]
    if not moved:  # in fp16 the first updates may be skipped
        return
    for p in moved:
        optimizer.state[p].setdefault("average", p.detach().clone())
    torch._foreach_lerp_([optimizer.state[p]["average"] for p in moved], [p.detach() for p in moved], 1 - decay)


@contextmanager
def with_average(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Meanwhile the model has its averaged weights."""
    moved = [p for group in optimizer.param_groups for p in group["params"] if "average" in optimizer.state[p]]
    last = [p.detach().clone() for p in moved]
    _copy(moved, [optimizer.state[p]["average"] for p in moved])
    try:
        yield
    finally:
        _copy(moved, last)


@torch.no_grad()
def _copy(parameters: list[Tensor], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Running averages of a parameter's gradient and of its square; Muon keeps the first, whose square stands for the second.
    Zeros before the first update."""
    state = optimizer.state.get(parameter) or {}
    if "exp_avg" in state:
        return state["exp_avg"], state["exp_avg_sq"]
    first = state.get("momentum_buffer", torch.zeros_like(parameter))
    return first, first.square()


def replace_parameters(optimizer: torch.optim.Optimizer, new: Mapping[Tensor, tuple[nn.Parameter, dict[str, Tensor]]]) -> None:
    """Put each parameter's successor, with its state, in its place."""
    for group in optimizer.param_groups:
        group["params"][:] = [new[p][0] if p in new else p for p in group["params"]]
    for old, (parameter, state) in new.items():
        optimizer.state.pop(old, None)
        if state:
            optimizer.state[parameter] = state
        if isinstance(optimizer, Muon) and old in optimizer.parts:
            optimizer.parts[parameter] = optimizer.parts.pop(old)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """One step down this loss, gradients clipped at 1. The trainer's own knows of micro-batches, processes and fp16 as well."""
    loss.backward()
    step_down(model, optimizer, rate)
    optimizer.zero_grad()


def step_down(model: nn.Module, optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The step alone: the gradients are there, and stay."""
    set_learning_rate(optimizer, rate)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
