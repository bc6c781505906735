"""E7, gate specificity: does it matter which dimensions a gate opens, or only how much it lets through?

Published interventions on g at all steps: random dropout, 1 − g, noise, shuffling within a token, its mean everywhere, scaling.
Several change the size of Δ as well (1 − g of a gate that is open by 0.6 lets through 0.4; dropout halves what remains), so
each stands beside a version with the token's mean gate restored. The test: gates shuffled among a token's dimensions, which
keeps every value and moves it elsewhere, against gates left in place and scaled so that ‖Δ‖ comes out as after shuffling.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pnn.analysis.controls import generator
from pnn.analysis.subject import Subject, accuracy_drop, drop_of, plain_metrics, scaled, with_gates_by_dimension
from pnn.analysis.totals import finding
from pnn.analysis.trace import Edit, Place
from pnn.studies.registry import Experiment

ABOUT = Experiment(
    number=7,
    key="gate_specificity",
    figure="gate_specificity_tests",
    question="Does it matter which dimensions a gate opens?",
    picture=(
        "Every row is an intervention on all gates. If only the amount mattered, shuffling a gate's values among its "
        "dimensions (orange) would cost no more than scaling it in place to the same effect on size (grey)."
    ),
    hypotheses={"gate_specificity": "which dimensions a gate opens matters, beyond how much it lets through"},
    needs=(with_gates_by_dimension,),
)

DROPOUT = (0.25, 0.5, 0.75)
NOISE = (0.1, 0.3, 0.5)
SCALE = (0.25, 0.5, 0.75, 1.5, 2.0)
MARGIN = 0.01  # of accuracy


def draw(place: Place, like: Tensor, kind: int) -> Tensor:
    """Uniform numbers, the same for the same step of the same batch on every machine."""
    source = generator(int(place.batch.indices[0]), place.step, kind)
    return torch.rand(like.shape, generator=source).to(like.device)


def normal(place: Place, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=generator(int(place.batch.indices[0]), place.step, 2)).to(like.device)


def shuffle(g: Tensor, place: Place) -> Tensor:
    """Another order of the dimensions for every token."""
    return g.gather(1, draw(place, g, 1).argsort(1))


def with_mean_of(g: Tensor, changed: Tensor) -> Tensor:
    """`changed`, scaled so that each token's mean gate is what it was."""
    return changed * g.mean(1, keepdim=True) / changed.mean(1, keepdim=True).clamp(min=1e-6)


def scaled_like_shuffled(g: Tensor, place: Place) -> Tensor:
    """g in place, scaled a token at a time so that ‖g ⊙ δ‖ is what shuffling makes of it."""
    delta = place.inputs[-1]
    wanted = (shuffle(g, place) * delta).norm(dim=1, keepdim=True)
    return g * wanted / (g * delta).norm(dim=1, keepdim=True).clamp(min=1e-12)


def run(subject: Subject) -> dict[str, Any]:
    base = subject.baseline

    def gate(name: str, change: Any) -> Any:
        return subject.measure(f"gate: {name}", Edit("gate", change))

    def kept(rate: float) -> Any:
        return lambda g, place: g * (draw(place, g, 0) > rate)

    def noisy(size: float) -> Any:
        return lambda g, place: (g + size * normal(place, g)).clamp(0, 1)

    per_cent = {r: round(100 * r) for r in (*DROPOUT, *NOISE, *SCALE)}
    conditions = {
        **{f"selective_suppression.dropout_{per_cent[r]}": gate(f"dropout {r}", kept(r)) for r in DROPOUT},
        "anti_gate": gate("1 − g", lambda g, place: 1 - g),
        **{f"noise_injection.noise_{per_cent[s]}": gate(f"noise {s}", noisy(s)) for s in NOISE},
        "pattern_shuffling": gate("shuffled", shuffle),
        "uniform_gate": gate("mean", lambda g, place: g.mean(1, keepdim=True).expand_as(g)),
        **{f"magnitude_scaling.scale_{per_cent[c]}": gate(f"× {c}", scaled(c)) for c in SCALE},
    }
    matched = {
        **{
            f"dropout_{per_cent[r]}_mean_restored": gate(
                f"dropout {r}, mean restored", lambda g, place, r=r: with_mean_of(g, kept(r)(g, place))
            )
            for r in DROPOUT
        },
        "anti_gate_mean_restored": gate("1 − g, mean restored", lambda g, place: with_mean_of(g, 1 - g)),
        "scaled_like_shuffled": gate("scaled like shuffled", scaled_like_shuffled),
    }
    plain = plain_metrics(base)
    published: dict[str, Any] = {"baseline": plain}
    for name, measured in conditions.items():
        *group, leaf = name.split(".")
        holder = published.setdefault(group[0], {}) if group else published
        metrics = plain_metrics(measured)
        holder[leaf] = {"metrics": metrics, "accuracy_drop": plain["accuracy"] - metrics["accuracy"]}
    return {
        "published": published,
        "interventions": {name: drop_of(base, measured) for name, measured in conditions.items()},
        "magnitude_matched": {name: drop_of(base, measured) for name, measured in matched.items()},
        **finding(
            ABOUT.hypotheses["gate_specificity"],
            "drop of accuracy when gates are shuffled among a token's dimensions",
            np.concatenate((base, conditions["pattern_shuffling"], matched["scaled_like_shuffled"]), 1),
            lambda sums: accuracy_drop(sums, 0, 1),
            margin=MARGIN,
            control="gates in place, scaled to the ‖Δ‖ that shuffling gives",
            control_statistic=lambda sums: accuracy_drop(sums, 0, 2),
        ),
    }
