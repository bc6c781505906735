"""What a cycle is asked to do, and whether the model has the heads for it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from pnn.config import CHOICES
from pnn.errors import UserError, did_you_mean
from pnn.plasticity.growth import INITS, STRATEGIES, candidates
from pnn.plasticity.heads import heads, original_counts
from pnn.plasticity.scores import METHODS, choose, share_of
from pnn.plasticity.teaching import LESSONS, check_room

TEACHERS = ("none", *LESSONS)
OPTIMIZERS = CHOICES["training.optimizer"]


@dataclass(frozen=True)
class CycleSettings:
    rounds: int = 1
    prune: float = 0.3  # share of the heads that are there
    grow: float = 0.1  # share of the original number; 0 grows none
    prune_by: str = "gradient"
    grow_by: str = "gradient"
    per_layer: bool = False  # prune the same share of every layer
    whole_layers: bool = False  # a layer may lose all its heads
    beyond: int = 0  # heads that a layer may grow beyond its original number, in each round
    init: str = "zero"
    learn_steps: int = 100
    learning_rate: float = 5e-5
    multiplier: float = 3.0  # of new heads' updates
    teacher: str = "none"  # what is learnt of the unpruned model: nothing (the text teaches), logits, or states too
    optimizer: str = "adamw"  # or "muon": the matrices of blocks move by orthogonal steps, the rest by AdamW
    batch_rows: int = 4
    evaluate_every: int = 25
    score_rows: int = 32  # rows of training text that heads are scored on
    seed: int = 0

    def __post_init__(self) -> None:
        for purpose, value, known in (
            ("prune by", self.prune_by, METHODS),
            ("grow by", self.grow_by, STRATEGIES),
            ("start new heads as", self.init, INITS),
            ("learn of a teacher", self.teacher, TEACHERS),
            ("learn by", self.optimizer, OPTIMIZERS),
        ):
            if value not in known:
                raise UserError(f"there is no {value!r} to {purpose}{did_you_mean(value, known)}")
        at_least_one = ("rounds", "batch_rows", "evaluate_every", "score_rows")
        for name in (*at_least_one, "learn_steps", "beyond", "seed"):
            least = int(name in at_least_one)
            if getattr(self, name) < least:
                raise UserError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        for name in ("learning_rate", "multiplier"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}: expected more than 0, got {getattr(self, name)}")
        for name in ("prune", "grow"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"cannot {name} {getattr(self, name):g} of the heads: expected a share between 0 and 1")

    @property
    def floor(self) -> int:
        return 0 if self.whole_layers else 1

    def rows_needed(self) -> int:
        """More training text than this is never read."""
        return max(self.score_rows, self.rounds * self.learn_steps * self.batch_rows)


def check(model: PreTrainedModel, settings: CycleSettings) -> None:
    """What is sure to fail is said before anything is done."""
    if settings.teacher != "none":
        check_room(model, smallest=(1 - settings.prune) ** settings.rounds)
    present, total = heads(model), sum(original_counts(model))
    count, layers = len(present), len({layer for layer, _ in present})
    room = len(candidates(model, settings.beyond))
    wanted = max(1, share_of(total, settings.grow))
    for round_ in range(1, settings.rounds + 1):
        when = "" if round_ == 1 else f"round {round_}: "
        pruned = share_of(count, settings.prune)
        if pruned == count:
            raise UserError(f"{when}pruning {settings.prune:g} of the heads would leave none of {count}: prune fewer")
        if round_ == 1:
            choose(dict.fromkeys(present, 0.0), settings.prune, per_layer=settings.per_layer, floor=settings.floor)
        elif count - pruned < settings.floor * layers:
            raise UserError(
                f"{when}pruning {settings.prune:g} of {count} heads would leave {count - pruned} in {layers} layers that keep "
                "one each: prune fewer, or in fewer rounds"
            )
        count, room = count - pruned, room + pruned
        if settings.grow == 0:
            continue
        if wanted > room:
            after = "after pruning " if pruned else ""
            instead = "grow fewer" if room else "prune first"
            raise UserError(
                f"{when}growing {settings.grow:g} of {total} heads adds {wanted}, but {after}there is room for {room}: "
                f"{instead}, or let layers grow beyond their original number with --beyond"
            )
        # places beyond the original number are there again in every round
        count, room = count + wanted, room if settings.beyond else room - wanted
