"""Whether the fast path learns what the naive one does: loss curves of both, from the same weights on the same masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pnn.bench.naive import NaivePNN, NaiveTrainer
from pnn.bench.timing import clean_slate
from pnn.bench.training import device_of, host_trainer_of, padded_updates, trainer_of, updates_of
from pnn.config import RunConfig
from pnn.training.optim import learning_rate


def loss_curves(run: RunConfig, updates: int, precision: str = "fp32") -> dict[str, Any]:
    """The training loss of every update, ours and naive, and the largest difference. With dropout in the config the two draw
    different dropout and can only agree within the spread of seeds."""
    run = replace(run, training=replace(run.training, precision=precision))
    device = device_of(run)
    clean_slate(device)
    with trainer_of(run) as trainer:
        naive = NaiveTrainer(NaivePNN.from_pnn(trainer.model), run.training, trainer.plan.updates, device, precision)
        trainer.wrapped.train()
        losses = []
        for update in updates_of(trainer, updates):
            losses.append(trainer.apply(update, learning_rate(trainer.step, trainer.plan.updates, run.training))[0])
            trainer.step += 1
        ours = torch.stack(losses).tolist()
    clean_slate(device)
    with host_trainer_of(run) as host:
        theirs = [naive.update(batches) for batches, _ in padded_updates(host, updates)]
    return {
        "config": run.name,
        "precision": precision,
        "updates": updates,
        "largest_difference": max(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
        "last_difference": abs(ours[-1] - theirs[-1]),
        "ours": ours,
        "naive": theirs,
    }
