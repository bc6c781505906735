"""The four phases of a round: prune, measure, grow, learn. A cycle with its journal and an arm of a study call the same
functions, so an arm is a cycle, bit for bit.

Which rows heads are scored on, what is drawn at random, the batches and the dropout of updates follow from (seed, round). Only
learning changes the model that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from pnn.plasticity.growth import grow, propose
from pnn.plasticity.heads import Head
from pnn.plasticity.learning import learn
from pnn.plasticity.measure import held_out_loss, size
from pnn.plasticity.scores import Scores, choose, score
from pnn.plasticity.settings import CycleSettings
from pnn.plasticity.surgery import prune
from pnn.plasticity.teaching import Teacher
from pnn.plasticity.text import Text

M = TypeVar("M", bound=PreTrainedModel)


def calibration(text: Text, plan: CycleSettings, round_: int) -> list[dict[str, Tensor]]:
    """The training text that heads are scored on, other rows in every round."""
    return list(text.batches(text.sample(plan.score_rows, plan.seed, round_), plan.batch_rows))


def score_heads(model: PreTrainedModel, text: Text, plan: CycleSettings, round_: int) -> Scores:
    return score(model, calibration(text, plan, round_), plan.prune_by, seed=plan.seed + round_)


def prune_heads(model: M, scores: Scores, plan: CycleSettings) -> tuple[M, list[Head]]:
    """A copy without the heads that are worth least, and which these were."""
    gone = choose(scores, plan.prune, per_layer=plan.per_layer, floor=plan.floor)
    return prune(model, gone, whole_layers=plan.whole_layers), gone


def measure(model: PreTrainedModel, text: Text) -> dict[str, Any]:
    """What the model is worth on held-out text, and what it costs."""
    return held_out_loss(model, text) | size(model, text.held_out.shape[1])


def grow_heads(
    model: M, text: Text, plan: CycleSettings, round_: int, lost: Scores, original: PreTrainedModel
) -> tuple[M, list[Head]]:
    """The model with new heads, and which these are; the model itself where none shall grow. `lost`: scores of heads that were
    pruned; `original` has the weights of those that are revived."""
    if plan.grow == 0:
        return model, []
    seed = plan.seed + round_
    batches = calibration(text, plan, round_)
    new = propose(model, plan.grow, plan.grow_by, batches, lost=lost, beyond=plan.beyond, seed=seed)
    return grow(model, new, plan.init, seed=seed, original=original), new


def learn_round(
    model: PreTrainedModel, new: list[Head], text: Text, plan: CycleSettings, round_: int, original: PreTrainedModel
) -> Iterator[tuple[int, float, dict[str, Any] | None]]:
    """Train the model in place. After each update: how many are done, the loss of its batch, and from time to time and at the
    end the held-out loss. `original` teaches, if the plan says so."""

    def batch_at(step: int) -> dict[str, Tensor]:
        batch = text.for_update(step, plan.batch_rows, plan.seed)
        if plan.teacher == "none":
            batch.pop("told", None)  # the text tells all
        return batch

    updates = learn(
        model,
        new,
        batch_at,
        steps=plan.learn_steps,
        peak_rate=plan.learning_rate,
        multiplier=plan.multiplier,
        seed=plan.seed,
        first=(round_ - 1) * plan.learn_steps,
        teacher=None if plan.teacher == "none" else Teacher(original, plan.teacher),
        optimizer=plan.optimizer,
    )
    for step, loss in updates:
        due = step % plan.evaluate_every == 0 or step == plan.learn_steps
        yield step, loss, held_out_loss(model, text) if due else None
