"""Each task's official metric. They equal scikit-learn's and scipy's (tests), which are not needed to run.

    matthews    correlation of two yes-no answers                            CoLA
    f1          of the class 1                                               MRPC, QQP
    macro_f1    the mean of the classes' F1                                  CB
    f1a, em     F1 over all answers; share of questions with every answer right      MultiRC
    pearson, spearman                                                        STS-B

Where a metric is undefined (one class only, predictions that are all alike) it is 0: nothing was told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pnn.finetuning.tasks import Task
from pnn.stats import Estimate, middle, of_a_share

Numbers = NDArray[np.float64]
Groups = NDArray[np.int64]
Metrics = dict[str, float]
DRAWS = 500  # of dev examples, for an interval


def accuracy(labels: Numbers, predictions: Numbers) -> float:
    return float((labels == predictions).mean())


def f1(labels: Numbers, predictions: Numbers, of: float = 1) -> float:
    both = float(((labels == of) & (predictions == of)).sum())
    either = float((labels == of).sum() + (predictions == of).sum())
    return 2 * both / either if either else 0.0


def macro_f1(labels: Numbers, predictions: Numbers) -> float:
    """Over the classes that occur."""
    return float(np.mean([f1(labels, predictions, of) for of in np.union1d(labels, predictions)]))


def matthews(labels: Numbers, predictions: Numbers) -> float:
    return pearson(labels, predictions)  # which it is, for answers 0 and 1


def pearson(labels: Numbers, predictions: Numbers) -> float:
    x, y = labels - labels.mean(), predictions - predictions.mean()
    x_norm, y_norm = np.linalg.norm(x), np.linalg.norm(y)
    # the mean of equal numbers may miss them by a rounding
    if x_norm <= 1e-13 * np.linalg.norm(labels) or y_norm <= 1e-13 * np.linalg.norm(predictions):
        return 0.0
    return float(np.clip((x / x_norm) @ (y / y_norm), -1, 1))


def ranks(values: Numbers) -> Numbers:
    """From 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(labels: Numbers, predictions: Numbers) -> float:
    return pearson(ranks(labels), ranks(predictions))


def exact_match(labels: Numbers, predictions: Numbers, groups: Groups) -> float:
    """Share of groups (questions) in which every prediction is right."""
    _, inverse = np.unique(groups, return_inverse=True)
    return float((np.bincount(inverse, weights=labels != predictions) == 0).mean())


PLAIN: dict[str, Callable[[Numbers, Numbers], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "f1a": f1,
    "macro_f1": macro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def measure(task: Task, labels: Numbers, predictions: Numbers, questions: Groups | None = None) -> Metrics:
    """The task's metrics on one set. `questions`: of each answer its question, where the task has such."""
    found: Metrics = {}
    for name in task.metrics:
        if name == "em":
            assert questions is not None
            found[name] = exact_match(labels, predictions, questions)
        else:
            found[name] = PLAIN[name](labels, predictions)
    return found


def measure_sets(task: Task, sets: dict[str, dict[str, Any]]) -> Metrics:
    """The metrics on every dev set; where there are several, a metric's name ends with the set's."""
    found: Metrics = {}
    for set_name, one in sets.items():
        for name, value in measure(task, one["labels"], one["predictions"], one.get("questions")).items():
            found[name if len(sets) == 1 else f"{name}_{set_name}"] = value
    return found


def score(metrics: Metrics) -> float:
    """The one number by which epochs and learning rates are chosen, the benchmark's own: the mean of the task's metrics."""
    return float(np.mean(list(metrics.values())))


def interval(task: Task, runs: list[dict[str, dict[str, Any]]]) -> list[float]:
    """The middle 95 % of the score when dev examples are drawn again, with replacement; the mean over runs (seeds) on the same
    draws. MultiRC's unit is the passage: its questions share a text."""
    drawn = []
    for draw in range(DRAWS):
        generator = np.random.default_rng([0, draw])
        chosen: dict[str, Any] = {}
        for name, one in runs[0].items():
            units = one.get("units")
            if units is None:
                chosen[name] = (generator.integers(0, len(one["labels"]), len(one["labels"])), None)
            else:
                chosen[name] = _draw_units(units, generator)
        drawn.append(float(np.mean([score(measure_sets(task, _drawn(sets, chosen))) for sets in runs])))
    units = min(len(one["labels"]) if one.get("units") is None else len(np.unique(one["units"])) for one in runs[0].values())
    low, high = middle(drawn, units)
    return list(of_a_share(Estimate(low, low, high), units)[1:] if low == high else (low, high))


def _draw_units(units: Groups, generator: np.random.Generator) -> tuple[NDArray[np.int64], Groups]:
    """Places of the drawn units' members, and a number for each drawn unit: one that is drawn twice counts twice."""
    members = [np.flatnonzero(units == unit) for unit in np.unique(units)]
    drawn = generator.integers(0, len(members), len(members))
    places = np.concatenate([members[unit] for unit in drawn])
    return places, np.repeat(np.arange(len(drawn)), [len(members[unit]) for unit in drawn])


def _drawn(sets: dict[str, dict[str, Any]], chosen: dict[str, Any]) -> dict[str, dict[str, Any]]:
    out = {}
    for name, one in sets.items():
        places, copies = chosen[name]
        out[name] = {"labels": one["labels"][places], "predictions": one["predictions"][places]}
        if copies is not None:
            out[name]["questions"] = copies * (int(one["questions"].max()) + 1) + one["questions"][places]
    return out
