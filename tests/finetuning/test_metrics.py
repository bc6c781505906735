"""Metrics equal scikit-learn's and scipy's, for every task, on random predictions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pnn.finetuning.metrics import interval, measure, measure_sets, pearson, score
from pnn.finetuning.tasks import TASKS

sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed (pip install -e '.[dev]')")
scipy_stats = pytest.importorskip("scipy.stats", reason="scipy is not installed (pip install -e '.[dev]')")


def reference(name, labels, predictions, questions):
    if name == "em":
        whole = {}
        for question, right in zip(questions, labels == predictions, strict=True):
            whole[question] = whole.get(question, True) and bool(right)
        return sum(whole.values()) / len(whole)
    return {
        "accuracy": lambda: sklearn_metrics.accuracy_score(labels, predictions),
        "f1": lambda: sklearn_metrics.f1_score(labels, predictions, zero_division=0.0),
        "f1a": lambda: sklearn_metrics.f1_score(labels, predictions, zero_division=0.0),
        "macro_f1": lambda: sklearn_metrics.f1_score(labels, predictions, average="macro", zero_division=0.0),
        "matthews": lambda: sklearn_metrics.matthews_corrcoef(labels, predictions),
        "pearson": lambda: scipy_stats.pearsonr(labels, predictions).statistic,
        "spearman": lambda: scipy_stats.spearmanr(labels, predictions).statistic,
    }[name]()


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_metrics_equal_scikit_learns(task, data):
    count = data.draw(st.integers(2, 40))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    if task.regression:  # one decimal: many equal values, whose ranks are shared
        labels, predictions = generator.uniform(0, 5, (2, count)).round(1)
        if len(set(labels)) == 1 or len(set(predictions)) == 1:
            return  # undefined: below
    else:
        labels, predictions = generator.integers(0, len(task.labels), (2, count)).astype(float)
    questions = generator.integers(0, max(1, count // 3), count)
    found = measure(task, labels, predictions, questions)
    assert list(found) == list(task.metrics)
    for name, value in found.items():
        assert value == pytest.approx(reference(name, labels, predictions, questions), abs=1e-12), name


def test_what_is_undefined_is_zero():
    same, other = np.full(5, 0.1), np.arange(5.0)
    assert pearson(same, other) == pearson(other, same) == 0
    assert measure(TASKS["cola"], np.ones(4), np.ones(4)) == {"matthews": 0.0}
    assert measure(TASKS["mrpc"], np.zeros(4), np.zeros(4)) == {"accuracy": 1.0, "f1": 0.0}


def test_two_dev_sets_have_metrics_of_their_own_and_the_score_is_their_mean():
    right, wrong = np.array([0.0, 1.0]), np.array([1.0, 0.0])
    sets = {"matched": {"labels": right, "predictions": right}, "mismatched": {"labels": right, "predictions": wrong}}
    found = measure_sets(TASKS["mnli"], sets)
    assert found == {"accuracy_matched": 1.0, "accuracy_mismatched": 0.0}
    assert score(found) == 0.5


def test_intervals_are_as_wide_as_the_binomial_says_and_passages_are_drawn_whole():
    generator = np.random.default_rng(1)
    labels = np.zeros(400)
    predictions = (generator.random(400) < 0.3).astype(float)
    one = {"dev": {"labels": labels, "predictions": predictions}}
    low, high = interval(TASKS["sst2"], [one])
    p = 1 - predictions.mean()
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(p * (1 - p) / 400), rel=0.15)
    assert low < p < high
    # four passages of 100 answers, all right or all wrong: the passages are what varies
    units = np.repeat(np.arange(4), 100)
    clustered = {"labels": np.ones(400), "predictions": (units < 2).astype(float), "questions": units, "units": units}
    low, high = interval(TASKS["multirc"], [{"dev": clustered}])
    assert low < 0.2
    assert high > 0.9
