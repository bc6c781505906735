"""What is analysed: a masked model, its text, its untrained twin, and interventions measured once each; or a decoder and rows
of its text.

An intervention's result is (sequences, 3): targets, right predictions and summed loss at the last step, for every sequence of
the same text under the same masks. So any two conditions can be compared pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pnn.analysis.controls import untrained
from pnn.analysis.totals import Array, Totals, ratio
from pnn.analysis.trace import Edit, Place, Text, has_gates, predict, trace_batch, trace_text
from pnn.models.base import MaskedLMBase
from pnn.models.ddl import DDLForCausalLM
from pnn.models.registry import kind_of
from pnn.numbers import several
from pnn.stats import bootstrap, finite

EASY, MEDIUM, HARD = range(3)
DIFFICULTIES = ("easy", "medium", "hard")
WHAT_IS_HARD = (
    "Easy is a token here if the model gives its right answer more than 70 % in the end, hard if at most 30 %, medium between."
)
TARGETS, CORRECT, LOSS = range(3)


def difficulty(probability: Tensor) -> Tensor:
    """The experiments' classes, by the final probability p of the right token: easy p > 0.7, hard p ≤ 0.3."""
    return torch.where(probability > 0.7, EASY, torch.where(probability > 0.3, MEDIUM, HARD))


@dataclass
class Subject:
    model: MaskedLMBase
    text: Text
    tokenizer: Any = None  # says what kinds of words there are, where somebody asks
    _measured: dict[str, Array] = field(default_factory=dict)

    @cached_property
    def naive(self) -> MaskedLMBase:
        return untrained(self.model)

    @property
    def num_steps(self) -> int:
        return steps_of(self.model)

    @cached_property
    def components(self) -> list[str]:
        """In the order of the published figures."""
        return ["attention", "gate", "ffn"] if has_gates(self.model) else ["attention", "ffn"]

    def measure(self, label: str, *edits: Edit, model: MaskedLMBase | None = None) -> Array:
        """The model under these edits; `label` names the condition, which is measured once."""
        if label not in self._measured:
            self._measured[label] = measure(self.model if model is None else model, self.text, edits)
        return self._measured[label]

    @property
    def baseline(self) -> Array:
        return self.measure("baseline")

    @cached_property
    def means(self) -> dict[tuple[str, int], Tensor]:
        return part_means(self.model, self.text)

    @cached_property
    def naive_means(self) -> dict[tuple[str, int], Tensor]:
        return part_means(self.naive, self.text)

    def suppressed(self, component: str, rate: float) -> Array:
        """The published intervention: the part's output times 1 − rate, at all steps."""
        return self.measure(f"{component} × {1 - rate}", Edit(component, scaled(1 - rate)))

    def ablated(self, component: str, step: int | None = None) -> Array:
        """The part's output replaced by its mean over all tokens, at all steps or at one: what it says about this token is
        gone, its usual size and direction stay."""
        steps = None if step is None else frozenset({step})
        return self.measure(f"{component} mean at {step}", Edit(component, replaced_by(component, self.means), steps))

    def naive_baseline(self) -> Array:
        return self.measure("untrained", model=self.naive)

    def naive_ablated(self, component: str) -> Array:
        edit = Edit(component, replaced_by(component, self.naive_means))
        return self.measure(f"untrained, {component} mean", edit, model=self.naive)


@dataclass(frozen=True)
class Decoder:
    """A decoder and token ids of its held-out text, (number of rows, length)."""

    model: DDLForCausalLM
    rows: Tensor
    tokenizer: Any
    batch_rows: int = 8


# What an analysis may need of a model: why it cannot be done, or None --------------------------------------------------


def with_gates(model: MaskedLMBase) -> str | None:
    return None if has_gates(model) else "the model has no gates"


def with_gates_by_dimension(model: MaskedLMBase) -> str | None:
    each = getattr(model.config, "gate", "none") == "token"
    return with_gates(model) or ("the model has one gate for each token, not for each dimension" if each else None)


def with_refiners(model: MaskedLMBase) -> str | None:
    path = "a BERT baseline's layers are not steps of one refiner: there is no path to follow"
    return None if kind_of(model).has_steps else path


def with_steps(fewest: int) -> Callable[[MaskedLMBase], str | None]:
    def need(model: MaskedLMBase) -> str | None:
        steps = steps_of(model)
        return None if steps >= fewest else f"the model has {several(steps, 'step')}, and it takes {fewest}"

    return need


def steps_of(model: MaskedLMBase) -> int:
    config: Any = model.config
    return int(config.num_steps if hasattr(config, "num_steps") else config.num_hidden_layers)


# Interventions ----------------------------------------------------------------------------------------------------------


def measure(model: MaskedLMBase, text: Text, edits: Sequence[Edit] = ()) -> Array:
    totals = Totals(len(text))
    for batch in text.batches():
        if edits:
            trace = trace_batch(model, batch, edits)
            sequence, last = trace.target_sequence, trace.last
        else:
            found = predict(model, batch)
            sequence, last = found.sequence, found.last
        totals.add("all", sequence, torch.stack((torch.ones_like(last.loss), last.correct.float(), last.loss), 1))
    return totals.of("all")


def part_means(model: MaskedLMBase, text: Text) -> dict[tuple[str, int], Tensor]:
    """Mean output of each part at each step over all tokens."""
    sums: dict[tuple[str, int], Tensor] = {}
    tokens = 0
    for trace in trace_text(model, text):
        tokens += len(trace.sequence)
        for at_step, step in enumerate(trace.steps, 1):
            for part, out in (("attention", step.attention), ("ffn", step.ffn), ("delta", step.raw), ("gate", step.gate)):
                if out is not None:
                    at = (part, at_step)
                    sums[at] = sums.get(at, torch.zeros(())) + out.double().sum(0).cpu()
    return {at: (total / tokens).float() for at, total in sums.items()}


def scaled(factor: float) -> Any:
    return lambda out, place: out * factor


def replaced_by(part: str, means: dict[tuple[str, int], Tensor]) -> Any:
    def change(out: Tensor, place: Place) -> Tensor:
        return means[part, place.step].to(out.device).expand_as(out)

    return change


def plain_metrics(measured: Array) -> dict[str, Any]:
    """As the published script reports a condition."""
    targets, correct, loss = measured.sum(0)
    return {"loss": finite(loss / targets), "accuracy": finite(correct / targets), "total_tokens": int(targets)}


def drop_of(baseline: Array, condition: Array) -> dict[str, Any]:
    """How much accuracy falls and loss rises from the baseline, with paired intervals."""
    both = np.concatenate((baseline, condition), 1)
    accuracy = bootstrap(both, lambda s: (s[..., CORRECT] - s[..., 3 + CORRECT]) / s[..., TARGETS])
    loss = bootstrap(both, lambda s: (s[..., 3 + LOSS] - s[..., LOSS]) / s[..., TARGETS])
    return {**plain_metrics(condition), "accuracy_drop": accuracy.as_json(), "loss_increase": loss.as_json()}


def accuracy_drop(sums: Array, baseline: int, condition: int) -> Array:
    """Of conditions laid side by side in `sums`, three columns each."""
    targets = sums[..., 3 * baseline + TARGETS]
    return ratio(np.stack((sums[..., 3 * baseline + CORRECT] - sums[..., 3 * condition + CORRECT], targets), -1))
