"""Arms with known losses, as a study would have written them, for findings and figures."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from pnn.studies.plasticity.arms import Arm, all_arms

LAYERS, HEADS = 6, 12
STEPS = list(range(0, 101, 10))


def before(parameters: int = 80_000_000, architecture: str = "gpt2", loss: float = 3.0) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "text": "planted",
        "loss": loss,
        "perplexity": math.exp(loss),
        "heads": LAYERS * HEADS,
        "parameters": parameters,
        "attention_parameters": parameters // 5,
        "flops_per_token": 1.0,
    }


def harm(arm: Arm) -> float:
    """What pruning costs in the end, a nat for all heads; growth gives back half of its share."""
    return arm.prune - 0.5 * arm.grow


def speed(arm: Arm) -> float:
    """Time constant of learning, in updates."""
    return 20.0


def planted(
    model: dict[str, Any],
    harm: Callable[[Arm], float] = harm,
    speed: Callable[[Arm], float] = speed,
    seeds: int = 3,
    noise: float = 0.001,
) -> list[dict[str, Any]]:
    """Learning takes 0.1 nats off any model; a seed's own luck is shared by all its arms, `noise` is not."""
    arms = []
    for seed in range(seeds):
        draw = random.Random(seed)
        luck = draw.gauss(0, 0.05)
        for arm in all_arms():
            end = model["loss"] - 0.1 + luck + harm(arm) + draw.gauss(0, noise)
            start = model["loss"] + 2 * arm.prune
            curve = [[step, end + (start - end) * math.exp(-step / speed(arm))] for step in STEPS[:-1]] + [[STEPS[-1], end]]
            heads = model["heads"] - math.floor(arm.prune * model["heads"]) + math.floor(arm.grow * model["heads"])
            attention = model["attention_parameters"] * heads // model["heads"]
            arms.append(
                {
                    "arm": arm.name,
                    "seed": seed,
                    "prune": arm.prune,
                    "prune_by": arm.prune_by,
                    "grow": arm.grow,
                    "grow_by": arm.grow_by,
                    "multiplier": arm.multiplier,
                    "updates": STEPS[-1],
                    "loss_pruned": start,
                    "loss_grown": start,
                    "loss": end,
                    "curve": curve,
                    "heads": heads,
                    "attention_parameters": attention,
                    "parameters": model["parameters"] - model["attention_parameters"] + attention,
                }
            )
    return arms
