"""The arms of a study: each one cycle, and what came of it.

Every arm of a model and seed makes the same number of updates on the same rows in the same order, and heads are scored on the
same rows: what differs between two arms of a seed is what their settings say, so differences are paired by seed.

    retrained     nothing is pruned; the control for all: learning on the text improves any model
    pruning       {entropy, magnitude, gradient, contribution, combined, random} × {0.1, 0.3, 0.5}, nothing grows
    growth        prune 0.3 by gradient, grow 0.1 by {gradient, entropy_gap, balanced, importance, random}
    multipliers   the same cycle, new heads learning {1, 3, 5} times as fast
    ratios        prune {0.2, 0.3, 0.4, 0.5} × grow {0.1, 0.15, 0.2}

Arms with the same settings are one arm.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.plasticity.cycle import CycleSettings, check
from pnn.plasticity.growth import grow, propose
from pnn.plasticity.heads import Head
from pnn.plasticity.learning import learn
from pnn.plasticity.measure import held_out_loss, size
from pnn.plasticity.scores import Scores, choose
from pnn.plasticity.surgery import prune
from pnn.plasticity.text import Text

PRUNE_BY = ("entropy", "magnitude", "gradient", "contribution", "combined", "random")
PRUNE_RATIOS = (0.1, 0.3, 0.5)
GROW_BY = ("gradient", "entropy_gap", "balanced", "importance", "random")
MULTIPLIERS = (1.0, 3.0, 5.0)
GRID_PRUNE, GRID_GROW = (0.2, 0.3, 0.4, 0.5), (0.1, 0.15, 0.2)
FIRST_ROUND = 1  # rows and draws are those of the first round of a cycle with the same seed


@dataclass(frozen=True)
class Arm:
    prune: float = 0.0
    prune_by: str = "gradient"
    grow: float = 0.0
    grow_by: str = "none"
    multiplier: float = 3.0

    @property
    def name(self) -> str:
        if not self.prune:
            return "retrained"
        pruned = f"{self.prune_by}-{self.prune:g}"
        return f"{pruned}-{self.grow_by}-{self.grow:g}-x{self.multiplier:g}" if self.grow else pruned


CONTROL = Arm()
CYCLE = Arm(0.3, "gradient", 0.1, "gradient")  # what the others are compared with


def all_arms() -> list[Arm]:
    """In the order in which they are run: what the findings cannot do without comes first."""
    pruning = [Arm(ratio, method) for method in PRUNE_BY for ratio in PRUNE_RATIOS]
    growth = [Arm(CYCLE.prune, CYCLE.prune_by, CYCLE.grow, strategy) for strategy in GROW_BY]
    multipliers = [Arm(CYCLE.prune, CYCLE.prune_by, CYCLE.grow, CYCLE.grow_by, factor) for factor in MULTIPLIERS]
    ratios = [Arm(gone, CYCLE.prune_by, new, CYCLE.grow_by) for gone in GRID_PRUNE for new in GRID_GROW]
    return list(dict.fromkeys([CONTROL, *growth, *multipliers, *ratios, *pruning]))


@dataclass(frozen=True)
class StudySettings:
    seeds: int = 3
    learn_steps: int = 100
    learning_rate: float = 5e-5
    batch_rows: int = 8
    score_rows: int = 32
    evaluate_every: int = 10

    def __post_init__(self) -> None:
        for name in ("seeds", "learn_steps", "batch_rows", "score_rows", "evaluate_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)}, but it is at least 1")
        if not self.learning_rate > 0:
            raise UserError(f"learning_rate: {self.learning_rate}, but it is above 0")

    def rows_needed(self) -> int:
        return max(self.score_rows, self.learn_steps * self.batch_rows)


def check_arms(model: PreTrainedModel, name: str) -> None:
    """Whether the model has heads enough for every arm."""
    for arm in all_arms():
        try:
            check(model, CycleSettings(prune=arm.prune, grow=arm.grow))
        except UserError as error:
            raise UserError(f"{name} has too few heads for a study ({error})") from None


def calibration(text: Text, plan: StudySettings, seed: int) -> list[dict[str, Tensor]]:
    """The rows that heads are scored on, as a cycle with this seed has them in its first round."""
    return list(text.batches(text.sample(plan.score_rows, seed, FIRST_ROUND), plan.batch_rows))


def run_arm(
    model: PreTrainedModel, text: Text, arm: Arm, plan: StudySettings, seed: int, scores: Scores | None
) -> dict[str, Any]:
    """Prune, grow and learn; the model given stays as it is. `scores` by the arm's measure; the control needs none."""
    gone: list[Head] = []
    new: list[Head] = []
    pruned = grown = model
    if arm.prune:
        assert scores is not None
        gone = choose(scores, arm.prune)
        pruned = grown = prune(model, gone)
    after_pruning = held_out_loss(pruned, text)
    if arm.grow:
        draw = seed + FIRST_ROUND
        new = propose(pruned, arm.grow, arm.grow_by, calibration(text, plan, seed), lost=scores, seed=draw)
        grown = grow(pruned, new, seed=draw)
    after_growth = held_out_loss(grown, text) if new else after_pruning
    learner = copy.deepcopy(grown)
    updates = learn(
        learner,
        new,
        lambda step: text.for_update(step, plan.batch_rows, seed),
        steps=plan.learn_steps,
        peak_rate=plan.learning_rate,
        multiplier=arm.multiplier,
        seed=seed,
    )
    curve = [[0, after_growth["loss"]]]
    for step, _ in updates:
        if step % plan.evaluate_every == 0 or step == plan.learn_steps:
            curve.append([step, held_out_loss(learner, text)["loss"]])
    sizes = size(learner, text.held_out.shape[1])
    return {
        "arm": arm.name,
        "seed": seed,
        **asdict(arm),
        "updates": plan.learn_steps,
        "pruned_heads": [list(head) for head in gone],
        "grown_heads": [list(head) for head in new],
        "loss_pruned": after_pruning["loss"],
        "loss_grown": after_growth["loss"],
        "loss": curve[-1][1],
        "perplexity": math.exp(min(700.0, curve[-1][1])),
        "curve": curve,
        **{key: sizes[key] for key in ("heads", "head_map", "parameters", "attention_parameters", "flops_per_token")},
    }


def initial(model: PreTrainedModel, text: Text) -> dict[str, Any]:
    """The model before anything is done to it."""
    held, sizes = held_out_loss(model, text), size(model, text.held_out.shape[1])
    return {
        "architecture": model.config.model_type,
        "text": text.source,
        **{key: held[key] for key in ("loss", "loss_interval", "perplexity", "targets", "rows", "row_tokens")},
        **{key: sizes[key] for key in ("heads", "parameters", "attention_parameters", "flops_per_token")},
        "layers": len(sizes["head_map"]),
        "width": model.config.hidden_size,
    }
