"""Paired differences: none is found where there is none, what is hard for all cancels, and the words follow the numbers."""

import numpy as np
import pytest

from pnn import differences as module
from pnn.differences import differences, paired, sentence
from pnn.errors import UserError
from pnn.runs import short_names
from pnn.stats import Estimate


def simulated(rng, accuracies, sequences=80):
    """Runs that find the same sequences hard, with these accuracies over all."""
    targets = rng.integers(1, 20, sequences)
    difficulty = rng.normal(0, 0.1, sequences)
    runs = [rng.binomial(targets, np.clip(p + difficulty, 0, 1)).astype(float) for p in accuracies]
    return [totals_of(right, 3.0 * targets - right, targets) for right in runs]


def totals_of(correct, loss, targets):
    return {"correct": list(correct), "loss": list(loss), "targets": list(targets)}


def test_of_many_runs_that_are_alike_hardly_ever_one_difference_holds(monkeypatch):
    monkeypatch.setattr(module, "DRAWS", 400)
    rng, rounds, wrong, found = np.random.default_rng(0), 150, 0, 0
    names, pairs = list("abcdef"), [(0, k) for k in range(1, 6)]
    for _ in range(rounds):
        wrong += differences(names, simulated(rng, [0.5] * 6), pairs)["hold"] > 0
        found += differences(names, simulated(rng, [0.5] * 5 + [0.65]), pairs)["rows"][-1]["accuracy"]["verdict"] == "holds"
    assert wrong / rounds < 0.1  # five at 5 % each would come to 20 % or so
    assert found / rounds > 0.9


def test_what_is_hard_for_both_cancels():
    easy = np.repeat([0.0, 10.0], 40)
    totals = [totals_of(np.clip(easy + k, 0, 11), easy, np.full(80, 11.0)) for k in (0, 1)]
    (row,) = differences(["a", "b"], totals, [(0, 1)])["rows"]
    assert row["accuracy"]["interval"] == pytest.approx([1 / 11, 1 / 11])  # each alone: 0.45 ± 0.1


def test_turned_round_an_interval_is_its_negative():
    totals = simulated(np.random.default_rng(2), [0.5, 0.6])
    (there,), (back,) = paired(totals, [(0, 1)], "correct"), paired(totals, [(1, 0)], "correct")
    assert back == pytest.approx(-there)


def test_more_pairs_widen_the_intervals():
    totals = simulated(np.random.default_rng(1), [0.5, 0.55, 0.5, 0.5, 0.5])
    names = list("abcde")
    (alone,) = differences(names, totals, [(0, 1)])["rows"]
    among = differences(names, totals, [(i, j) for i in range(5) for j in range(i + 1, 5)])["rows"][0]
    assert among["accuracy"]["difference"] == alone["accuracy"]["difference"]
    assert among["accuracy"]["interval"][0] < alone["accuracy"]["interval"][0]
    assert among["accuracy"]["interval"][1] > alone["accuracy"]["interval"][1]


def test_totals_of_other_sequences_are_refused():
    rng = np.random.default_rng(0)
    totals = [*simulated(rng, [0.5], 1200), *simulated(rng, [0.5], 30)]
    with pytest.raises(UserError, match="a and b cannot be compared: the same text gives them 1,200 and 30 sequences"):
        differences(["a", "b"], totals, [(0, 1)])


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        ((-0.013, -0.017, -0.009), "b is 1.3 points below a (0.9–1.7): holds"),
        ((0.013, 0.009, 0.017), "b is 1.3 points above a (0.9–1.7): holds"),
        ((0.001, -0.003, 0.005), "b differs from a by 0.1 points (−0.3 to 0.5): undecided"),
        ((-0.0001, -0.004, 0.003), "b differs from a by 0.0 points (−0.4 to 0.3): undecided"),
        ((0.002, 0.0002, 0.0038), "b is 0.20 points above a (0.02–0.38): holds"),
        ((0.0, -0.01, 0.01), "b differs from a by 0.0 points (−1.0 to 1.0): undecided"),
        ((0.0, 0.0, 0.0), "b gets as many right as a in every sequence: equal"),
    ],
)
def test_the_words_follow_from_the_numbers(estimate, said):
    assert sentence("b", "a", Estimate(*estimate)) == said


def test_names_are_as_short_as_tells_runs_apart():
    assert short_names(["runs/x/", "runs/y"]) == ["x", "y"]
    assert short_names(["runs/x/checkpoints/best", "runs/y/checkpoints/best"]) == ["x/checkpoints/best", "y/checkpoints/best"]
    assert short_names(["a/run", "b/run"]) == ["a/run", "b/run"]
