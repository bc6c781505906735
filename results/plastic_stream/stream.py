"""A model that meets domain after domain, a round at each: it may replace some heads, then it learns. What a round does is
chosen from a grid of share, score and rate: always the same, at random, or by a controller that looks at the rounds before.

A round takes out a share of the heads, grows as many from zero in the same places (so every way to choose places is one), and
learns. With a share of 0 it is plain fine-tuning. Every arm of a seed learns from the same rows in the same order, by the same
number of updates. Held-out rows are of two kinds: a controller sees its gains on one, results are measured on the other.

    adaptation   the loss on a round's own domain, right after the round
    forgetting   how far the loss on a domain met earlier has risen since the end of its last round
    overall      the mean loss over the domains met so far
                                                                             each a mean over rounds (and earlier domains)
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from pnn.plasticity import CycleSettings, Text, heads
from pnn.plasticity.measure import held_out_nats
from pnn.plasticity.phases import grow_heads, learn_round, prune_heads, score_heads

M = TypeVar("M", bound=PreTrainedModel)


@dataclass(frozen=True)
class Choice:
    share: float  # of the heads, taken out and grown again
    score: str  # which go
    rate: float

    def __str__(self) -> str:
        done = f"replace {100 * self.share:g} % by {self.score}" if self.share else "plain"
        return f"{done}, rate {self.rate:g}"


@dataclass(frozen=True)
class Plan:
    passes: int = 3  # through all domains
    updates: int = 8  # per round
    batch_rows: int = 4
    score_rows: int = 4
    seen_rows: int = 4  # of each domain's held-out rows: a controller's gains are measured on them, results on the others


SHARE, SCORES, RATES = 0.1, ("gradient", "entropy"), (1e-4, 3e-4)
PLAIN = {rate: Choice(0.0, SCORES[0], rate) for rate in RATES}
CYCLES = {rate: Choice(SHARE, SCORES[0], rate) for rate in RATES}
GRID = (*PLAIN.values(), *CYCLES.values(), *(Choice(SHARE, SCORES[1], rate) for rate in RATES))


# Who chooses ----------------------------------------------------------------------------------------------------------


class Chooser(Protocol):
    def choose(self, loss: float) -> Choice:
        """What to do in a round. `loss`: on its domain, before it."""

    def see(self, gain: float) -> None:
        """By how much the loss fell in that round, over the domains met so far."""


class Always:
    def __init__(self, choice: Choice):
        self.choice = choice

    def choose(self, loss: float) -> Choice:
        return self.choice

    def see(self, gain: float) -> None:
        pass


class AtRandom:
    """The control of a controller: it looks at nothing."""

    def __init__(self, grid: Sequence[Choice], seed: int):
        self.grid, self.draw = grid, random.Random(seed)

    def choose(self, loss: float) -> Choice:
        return self.draw.choice(self.grid)

    def see(self, gain: float) -> None:
        pass


class Controller:
    """A linear bandit with upper confidence bounds. The gain of a round is taken to be

        w · x,   x = (1, the domain's loss before, whether heads go, by which score, at which rate)    the last three ±1

    and w is fitted by ridge regression to the rounds so far, A = λ I + Σ x xᵀ, w = A⁻¹ Σ gain · x. What is chosen has the
    highest  w · x + α √(xᵀ A⁻¹ x): the best guess, and the more the less is known. The loss before is there because a new
    domain gives a large gain whatever is done; without it, what was tried on one would look good for ever."""

    RIDGE, BONUS = 0.1, 0.05  # λ; α in nats, about what two ways to do a round differ by

    def __init__(self, grid: Sequence[Choice]):
        self.grid = grid
        self.rates, self.scores = (sorted({getattr(one, knob) for one in grid}) for knob in ("rate", "score"))
        self.A, self.b = self.RIDGE * np.eye(5), np.zeros(5)
        self.x = np.zeros(5)

    def _features(self, choice: Choice, loss: float) -> np.ndarray:
        def sign(of: bool) -> float:
            return 1.0 if of else -1.0

        score = sign(choice.score == self.scores[-1]) if choice.share else 0.0  # where nothing goes, none is asked
        return np.array([1.0, loss, sign(choice.share > 0), score, sign(choice.rate == self.rates[-1])])

    def choose(self, loss: float) -> Choice:
        inverse = np.linalg.inv(self.A)
        w = inverse @ self.b
        x = {one: self._features(one, loss) for one in self.grid}
        best = max(self.grid, key=lambda one: w @ x[one] + self.BONUS * np.sqrt(x[one] @ inverse @ x[one]))
        self.x = x[best]
        return best

    def see(self, gain: float) -> None:
        self.A += np.outer(self.x, self.x)
        self.b += gain * self.x


# The stream -----------------------------------------------------------------------------------------------------------


def play(
    model: PreTrainedModel, domains: Mapping[str, Text], chooser: Chooser, plan: Plan, seed: int, *, grows: bool = True
) -> dict[str, Any]:
    """One arm: what was chosen in each round, and the held-out loss on every domain after it. The model given stays."""
    model = copy.deepcopy(model)
    losses, seen = _losses(model, domains, plan)
    record: dict[str, Any] = {"initial": losses, "rounds": []}
    for number, (name, text) in enumerate(list(domains.items()) * plan.passes):
        visit = 1 + number // len(domains)
        before, met = seen, list(domains)[: number + 1]
        choice = chooser.choose(before[name])
        settings = CycleSettings(
            prune=choice.share,
            prune_by=choice.score,
            grow=choice.share if grows else 0.0,
            grow_by="balanced",
            learn_steps=plan.updates,
            learning_rate=choice.rate,
            batch_rows=plan.batch_rows,
            score_rows=plan.score_rows,
            evaluate_every=plan.updates,
            seed=seed,
        )
        new = []
        if choice.share:
            scores = score_heads(model, text, settings, visit)
            model, _ = prune_heads(model, scores, settings)
            model, new = grow_heads(model, text, settings, visit, scores, model)
        for _ in learn_round(model, new, text, settings, visit, model):
            pass
        losses, seen = _losses(model, domains, plan)
        gain = float(np.mean([before[one] - seen[one] for one in met]))
        chooser.see(gain)
        record["rounds"].append(
            {"domain": name, "choice": asdict(choice), "losses": losses, "gain": gain, "heads": len(heads(model))}
        )
    return record


def _losses(model: PreTrainedModel, domains: Mapping[str, Text], plan: Plan) -> tuple[dict[str, float], dict[str, float]]:
    """Nats per token on every domain: on the rows for results, and on those that a controller sees."""
    found = {name: held_out_nats(model, text) for name, text in domains.items()}
    result, controller = (
        {name: float(nats[rows].sum() / targets[rows].sum()) for name, (nats, targets) in found.items()}
        for rows in (slice(plan.seen_rows, None), slice(plan.seen_rows))
    )
    return result, controller


def cut_vocabulary(model: M, domains: Mapping[str, Text]) -> tuple[M, dict[str, Text]]:
    """A copy that knows no tokens but those of the texts, and the texts in its numbers: most of a small model's work is its
    vocabulary."""
    texts = [rows for text in domains.values() for rows in (text.train, text.held_out)]
    kept = torch.cat([rows.flatten() for rows in texts]).unique()
    smaller = copy.deepcopy(model)
    with torch.no_grad():
        matrix = smaller.get_input_embeddings().weight
        matrix[: len(kept)] = matrix[kept].clone()
    smaller.resize_token_embeddings(len(kept))
    return smaller, {
        name: Text(*(torch.searchsorted(kept, rows) for rows in (text.train, text.held_out)), source=text.source)
        for name, text in domains.items()
    }


# What came of it ------------------------------------------------------------------------------------------------------


def adaptation(record: Mapping[str, Any]) -> float:
    return float(np.mean([one["losses"][one["domain"]] for one in record["rounds"]]))


def forgetting(record: Mapping[str, Any]) -> float:
    rises, last = [], {}
    for one in record["rounds"]:
        rises += [one["losses"][name] - loss for name, loss in last.items() if name != one["domain"]]
        last[one["domain"]] = one["losses"][one["domain"]]
    return float(np.mean(rises))


def overall(record: Mapping[str, Any]) -> float:
    means, met = [], []
    for one in record["rounds"]:
        met = [*met, one["domain"]] if one["domain"] not in met else met
        means.append(np.mean([one["losses"][name] for name in met]))
    return float(np.mean(means))


MEASURES = {"adaptation": adaptation, "forgetting": forgetting, "overall": overall}
