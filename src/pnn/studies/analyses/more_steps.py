"""Is refinement an iteration toward something? What happens to states that are refined more often than in training.

    moved(t) = ‖hᵗ⁺¹ − hᵗ‖,   contraction(t) = moved(t) / moved(t − 1),   remaining(t) = ‖hᵗ − h^far‖

over masked tokens of held-out text, t counted in rounds: a round is one step of a model with one refiner, else the part of the
schedule that repeats. hᵗ is the state that the head reads after t rounds, behind the refiners that a schedule leaves through.

An iteration toward a point moves less in every round and comes nearer to where it ends; if the point is a good one, predictions
do not suffer on the way. The end is the state after many more rounds. Whatever moves comes near to where it ends: steps of one
size in one direction from 4 to 8 of 32 rounds get 0.14 nearer, a random walk 0.07. Hence the margin, and the untrained control.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pnn.analysis.subject import Subject, with_refiners
from pnn.analysis.totals import Array, Smallest, Totals, finding, ratio, ratios
from pnn.analysis.trace import Batch, read
from pnn.evaluation.passes import states_at, to_device
from pnn.models.base import MaskedLMBase
from pnn.models.precision import undisturbed
from pnn.results import Finding
from pnn.schedule import rounds
from pnn.studies.registry import Analysis

SEEN = 8  # rounds that are followed, at least; twice the trained ones where those are more
FAR = 32  # rounds until the far state, at least; eight times the trained ones where those are more
ACCURACY_MARGIN = 0.005  # of accuracy: a smaller loss is not worth a claim
LOSS_MARGIN = 0.05  # nats
CONTRACTION_MARGIN = 0.02
NEARER = 0.5  # of what remained after the trained rounds, gone after as many more

ABOUT = Analysis(
    question="Is refinement an iteration toward something?",
    picture=(
        "If so, accuracy and loss stay where they are on the grey ground, beyond the model's own number of rounds; every "
        "round moves states less than the one before (below one); and what remains of the way to the far state shrinks. "
        "The grey lines are the same model untrained."
    ),
    hypotheses={
        "more_rounds_keep_the_accuracy": "twice as many rounds keep the accuracy",
        "the_far_state_predicts_as_well": "the state after many more rounds predicts as well",
        "every_round_moves_less": "every round moves a state less than the round before",
        "states_near_a_point": "as many rounds again halve the way that remains to the far state",
    },
    needs=(with_refiners,),
)


def run(subject: Subject) -> dict[str, Any]:
    """What analysis/more_steps.json holds."""
    config: Any = subject.model.config
    one_round = rounds(config.schedule, config.repeat, len(config.schedule))
    trained = one_round.index(config.trained_steps or config.num_steps) + 1  # a calibrated model takes fewer
    seen, far = max(SEEN, 2 * trained), max(FAR, 8 * trained)
    steps = rounds(config.schedule, config.repeat, far)
    asked = [*steps[:seen], steps[-1]]
    totals = Totals(len(subject.text))
    for batch in subject.text.batches():
        for name, model in (("", subject.model), ("untrained ", subject.naive)):
            states = after_rounds(model, batch, asked)
            sequence = to_device(batch.sequence[batch.masked.positions], model.device)
            labels = to_device(batch.masked.labels, model.device)
            if model is subject.model:
                readings = [read(model, h, labels) for h in states]
                totals.count("targets", sequence)
                totals.add("loss", sequence, torch.stack([reading.loss for reading in readings], 1))
                totals.add("correct", sequence, torch.stack([reading.correct for reading in readings], 1))
            *path, end = states
            moved = [(after - before).norm(dim=1) for before, after in pairwise(path)]
            totals.add(name + "moved", sequence, torch.stack(moved, 1))
            totals.add(name + "moved before", sequence, torch.stack(moved[:-1], 1))
            totals.add(name + "moved after", sequence, torch.stack(moved[1:], 1))
            totals.add(name + "remaining", sequence, torch.stack([(end - h).norm(dim=1) for h in path], 1))
    return {
        "num_rounds": trained,
        "far_rounds": far,
        "steps_by_round": asked,  # the last is the far state's
        "random_steps": config.random_steps,
        "targets": int(totals.of("targets").sum()),
        "accuracy_by_round": ratios(totals, "correct", "targets", shares=True),
        "loss_by_round": ratios(totals, "loss", "targets"),
        "moved_by_round": ratios(totals, "moved", "targets"),
        "remaining_by_round": ratios(totals, "remaining", "targets"),
        "contraction_by_round": ratios(totals, "moved after", "moved before"),
        "untrained_contraction_by_round": ratios(totals, "untrained moved after", "untrained moved before"),
        "untrained_moved_by_round": ratios(totals, "untrained moved", "targets"),
        "untrained_remaining_by_round": ratios(totals, "untrained remaining", "targets"),
        "findings": _findings(totals, trained),
    }


def after_rounds(model: MaskedLMBase, batch: Batch, steps: list[int]) -> list[Tensor]:
    """At masked tokens, the state that the head reads after each of these numbers of steps. Where steps after the repeated part
    lead out of it, every number is a pass of its own; else they lie on one path."""
    masked, at = replace(batch.packed, input_ids=batch.masked.input_ids), batch.masked.positions
    config: Any = model.config
    longest = config.order(steps[-1])
    with undisturbed(model):
        if all(config.order(number) == longest[:number] for number in steps):
            path = states_at(model, masked, at, steps[-1], every_step=True)
            return [path[number] for number in steps]
        return [states_at(model, masked, at, number)[-1] for number in steps]


def _findings(totals: Totals, trained: int) -> dict[str, Finding]:
    targets = totals.of("targets")

    def gain(name: str, later: int) -> Array:
        """Columns: after the trained rounds, later, targets."""
        return np.concatenate((totals.of(name)[:, [trained - 1, later]], targets), 1)

    def difference(sums: Array) -> Array:
        return ratio(sums[..., [1, 2]]) - ratio(sums[..., [0, 2]])

    movements = np.concatenate([totals.of(name) for name in ("moved", "untrained moved")], 1)
    count = totals.of("moved").shape[1]

    def contractions(sums: Array, first: int) -> Array:
        pairs = range(first, first + count - 1)
        return 1 - np.stack([ratio(sums[..., [t + 1, t]]) for t in pairs], -1)

    distances = [totals.of(name)[:, [trained - 1, 2 * trained - 1]] for name in ("remaining", "untrained remaining")]
    return {
        "more_rounds_keep_the_accuracy": finding(
            ABOUT.hypotheses["more_rounds_keep_the_accuracy"],
            "accuracy after twice the trained rounds less that after the trained ones",
            gain("correct", 2 * trained - 1),
            difference,
            margin=-ACCURACY_MARGIN,
        ),
        "the_far_state_predicts_as_well": finding(
            ABOUT.hypotheses["the_far_state_predicts_as_well"],
            "loss after the trained rounds less that of the far state, nats",
            gain("loss", -1),
            lambda sums: -difference(sums),
            margin=-LOSS_MARGIN,
        ),
        "every_round_moves_less": finding(
            ABOUT.hypotheses["every_round_moves_less"],
            "smallest of 1 − moved(t) / moved(t − 1)",
            movements,
            Smallest(lambda sums: contractions(sums, 0)),
            margin=CONTRACTION_MARGIN,
            control="the same model untrained",
            control_statistic=Smallest(lambda sums: contractions(sums, count)),
        ),
        "states_near_a_point": finding(
            ABOUT.hypotheses["states_near_a_point"],
            "1 − remaining after twice the trained rounds / remaining after the trained ones",
            np.concatenate(distances, 1),
            lambda sums: 1 - ratio(sums[..., [1, 0]]),
            margin=NEARER,
            control="the same model untrained",
            control_statistic=lambda sums: 1 - ratio(sums[..., [3, 2]]),
        ),
    }
