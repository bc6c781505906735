"""The ten experiments of the published evidence suite, by their published names, each with a control and a computed verdict.

Every experiment returns what the published script reports (`published`, on real tokens and fixed masks), our measurements
beside it, and a hypothesis with its effect, interval, control and verdict (see `totals`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pnn.analysis.evidence import (
    cross_token,
    difficulty,
    dimensionwise,
    gate_entropy,
    gate_specificity,
    layer_importance,
    layerwise_activity,
    meg,
    modeling,
    optogenetics,
)
from pnn.analysis.evidence.subject import Subject
from pnn.analysis.trace import has_gates
from pnn.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Experiment:
    key: str  # in experimental_results.json
    figure: str  # its file, without .png
    run: Callable[[Subject], dict[str, Any]]
    needs_gates: bool = False
    fewest_steps: int = 1


EXPERIMENTS = {
    "meg": Experiment("meg_analysis", "meg_temporal_patterns", meg.run, fewest_steps=2),
    "optogenetics": Experiment("optogenetics_results", "optogenetics_suppression", optogenetics.run),
    "modeling": Experiment("brain_activity_modeling", "brain_activity_patterns", modeling.run, fewest_steps=3),
    "dimensionwise": Experiment("dimensionwise_analysis", "dimensionwise_patterns", dimensionwise.run, fewest_steps=2),
    "difficulty": Experiment("token_difficulty_analysis", "token_difficulty_analysis", difficulty.run),
    "layer_importance": Experiment("layer_importance_analysis", "layer_importance_analysis", layer_importance.run),
    "gate_specificity": Experiment("gate_specificity", "gate_specificity_tests", gate_specificity.run, needs_gates=True),
    "layerwise_activity": Experiment("layerwise_activity_analysis", "layerwise_activity_analysis", layerwise_activity.run),
    "cross_token": Experiment("cross_token_interference", "cross_token_interference", cross_token.run),
    "gate_entropy": Experiment("gate_entropy_analysis", "gate_entropy_analysis", gate_entropy.run, needs_gates=True),
}


def why_not(experiment: Experiment, subject: Subject) -> str | None:
    """What keeps this experiment from being done on this model."""
    if experiment.needs_gates and not has_gates(subject.model):
        return "the model has no gates"
    if subject.num_steps < experiment.fewest_steps:
        return f"the model has {subject.num_steps} step{'s' * (subject.num_steps != 1)}, and it takes {experiment.fewest_steps}"
    return None


def chosen(names: list[str] | None) -> list[str]:
    """Experiments by name; None or "all" for every one."""
    for name in names or []:
        if name not in EXPERIMENTS and name != "all":
            raise UserError(f"--experiment {name}: no such experiment{did_you_mean(name, EXPERIMENTS)}")
    return list(EXPERIMENTS) if not names or "all" in names else list(dict.fromkeys(names))


@torch.no_grad()
def perform(name: str, subject: Subject) -> dict[str, Any]:
    """The experiment's result. One that cannot be done on this model says why and has no verdict."""
    experiment = EXPERIMENTS[name]
    reason = why_not(experiment, subject)
    found = {"not_done": reason} if reason else experiment.run(subject)
    return {"experiment": name, **found}
