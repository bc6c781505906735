"""The arms of a study: each one cycle, and what came of it.

Every arm of a model and seed makes the same number of updates on the same rows in the same order, and heads are scored on the
same rows: what differs between two arms of a seed is what their settings say, so differences are paired by seed.

    retrained     nothing is pruned; the control for all: learning on the text improves any model
    pruning       {entropy, magnitude, gradient, contribution, combined, random} × {0.1, 0.3, 0.5}, nothing grows
    growth        prune 0.3 by gradient, grow 0.1 by {gradient, entropy_gap, balanced, importance, random}
    multipliers   the same cycle, new heads learning {1, 3, 5} times as fast
    ratios        prune {0.2, 0.3, 0.4, 0.5} × grow {0.1, 0.15, 0.2}

Arms with the same settings are one arm.

Whether it matters where heads grow can be asked only where growing any helps: `growth_control` has a positive control. After
nearly all heads went by gradient it grows nothing, everything from zero (that must help, or updates and rate are too small for
the question) or revived with the weights that the heads had, and some of what went: guided or at random, from zero or revived.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.plasticity.phases import grow_heads, learn_round, measure, prune_heads
from pnn.plasticity.scores import Scores
from pnn.plasticity.settings import CycleSettings, check
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
    init: str = "zero"
    whole_layers: bool = False  # a layer may lose all its heads

    @property
    def name(self) -> str:
        if not self.prune:
            return "retrained"
        pruned = f"{self.prune_by}-{self.prune:g}"
        start = "" if self.init == "zero" else f"-{self.init}"
        return f"{pruned}-{self.grow_by}-{self.grow:g}-x{self.multiplier:g}{start}" if self.grow else pruned


CONTROL = Arm()
CYCLE = Arm(0.3, "gradient", 0.1, "gradient")  # what the others are compared with


def all_arms() -> list[Arm]:
    """In the order in which they are run: what the findings cannot do without comes first."""
    pruning = [Arm(ratio, method) for method in PRUNE_BY for ratio in PRUNE_RATIOS]
    growth = [Arm(CYCLE.prune, CYCLE.prune_by, CYCLE.grow, strategy) for strategy in GROW_BY]
    multipliers = [Arm(CYCLE.prune, CYCLE.prune_by, CYCLE.grow, CYCLE.grow_by, factor) for factor in MULTIPLIERS]
    ratios = [Arm(gone, CYCLE.prune_by, new, CYCLE.grow_by) for gone in GRID_PRUNE for new in GRID_GROW]
    return list(dict.fromkeys([CONTROL, *growth, *multipliers, *ratios, *pruning]))


def growth_control(pruned: float = 0.98, grown: float = 0.2, multiplier: float = 3.0) -> dict[str, Arm]:
    """The arms that a study of growth begins with, by what they are for. `multiplier`: how many times as fast new heads
    learn."""
    without = Arm(pruned, multiplier=multiplier, whole_layers=True)
    everything = replace(without, grow=pruned, grow_by="random")
    arms = {
        "retrained": CONTROL,
        "nothing grows": without,
        "all grow from zero": everything,
        "all revived": replace(everything, init="revive"),
    }
    for init in ("zero", "revive"):
        for strategy in ("gradient", "random"):
            arms[f"{strategy}, {init}"] = replace(without, grow=grown, grow_by=strategy, init=init)
    return arms | {"importance, revive": replace(without, grow=grown, grow_by="importance", init="revive")}


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
                raise UserError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise UserError(f"learning_rate: expected more than 0, got {self.learning_rate}")

    def rows_needed(self) -> int:
        return max(self.score_rows, self.learn_steps * self.batch_rows)


def check_arms(model: PreTrainedModel, name: str) -> None:
    """Whether the model has heads enough for every arm."""
    for arm in all_arms():
        try:
            check(model, CycleSettings(prune=arm.prune, grow=arm.grow))
        except UserError as error:
            raise UserError(f"{name} has too few heads for a study ({error})") from None


def cycle_of(arm: Arm, plan: StudySettings, seed: int) -> CycleSettings:
    """An arm is a cycle of one round: these are its settings."""
    shared = {key: value for key, value in asdict(plan).items() if key != "seeds"}
    own = asdict(arm) if arm.grow else asdict(arm) | {"grow_by": CycleSettings.grow_by}
    return CycleSettings(**shared, **own, seed=seed)


def run_arm(model: PreTrainedModel, text: Text, arm: Arm, plan: StudySettings, seed: int, scores: Scores) -> dict[str, Any]:
    """Prune, measure, grow and learn; the model given stays as it is. `scores` by the arm's measure."""
    settings = cycle_of(arm, plan, seed)
    pruned, gone = prune_heads(model, scores, settings)
    after_pruning = measure(pruned, text)
    grown, new = grow_heads(pruned, text, settings, FIRST_ROUND, scores, model)
    after_growth = measure(grown, text) if new else after_pruning
    curve = [[0, after_growth["loss"]]]
    for step, _, held in learn_round(grown, new, text, settings, FIRST_ROUND, model):
        if held is not None:
            curve.append([step, held["loss"]])
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
        **{key: after_growth[key] for key in ("heads", "head_map", "parameters", "attention_parameters", "flops_per_token")},
    }


def initial(model: PreTrainedModel, text: Text) -> dict[str, Any]:
    """The model before anything is done to it."""
    found = measure(model, text)
    worth = ("loss", "loss_interval", "perplexity", "targets", "rows", "row_tokens")
    cost = ("heads", "parameters", "attention_parameters", "flops_per_token")
    return {
        "architecture": model.config.model_type,
        "text": text.source,
        **{key: found[key] for key in (*worth, *cost)},
        "layers": len(found["head_map"]),
        "width": model.config.hidden_size,
    }
