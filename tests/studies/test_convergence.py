"""The paper's numbers from its own figure, and every definition against a plain one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pnn.studies.analyses import convergence

# read off the paper's figure (convergence by step 0 … 4): easy, medium, hard
PAPER = np.array([[0, 190, 29, 40, 12], [0, 90, 1717, 572, 122], [0, 270, 1080, 1040, 465]])


def test_the_papers_counts_give_the_papers_numbers():
    summary = convergence.summary_of_counts(PAPER)
    means = [summary[name]["mean_convergence_step"] for name in convergence.CLASSES]
    shares = [100 * summary[name]["share"] for name in convergence.CLASSES]
    assert means == pytest.approx([1.535, 2.290, 2.595], abs=0.005)
    assert shares == pytest.approx([4.8, 44.4, 50.7], abs=0.1)


def test_an_empty_class_has_no_mean():
    summary = convergence.summary_of_counts(np.array([[0, 0], [0, 3], [0, 1]]))
    assert summary["easy"]["mean_convergence_step"] is None
    assert summary["medium"]["share"] == 0.75


def test_answers_that_are_frequent_and_settle_early_make_no_difference_at_equal_frequency():
    """Medium tokens have frequent answers here, hard ones rare answers; within an octave both settle at the same step."""
    counts = np.array([[0, 10, 90], [0, 90, 10]])  # octaves × (easy, medium, hard)
    steps = counts * np.array([[3], [1]])
    pooled = steps.sum(0) / counts.sum(0).clip(1)
    assert pooled[convergence.HARD] - pooled[convergence.MEDIUM] == pytest.approx(1.6)
    assert convergence.later_within_octaves(np.concatenate((steps.ravel(), counts.ravel()))) == pytest.approx(0)


def test_hard_less_medium_within_octaves():
    """An octave counts by m·n/(m + n); one without medium or hard tokens says nothing."""
    counts = np.array([[5, 1, 1], [0, 2, 2], [0, 0, 7]])
    steps = counts * np.array([[1, 1, 2], [1, 1, 4], [1, 1, 9]])
    sums = np.concatenate((steps.ravel(), counts.ravel()))
    assert convergence.later_within_octaves(sums) == pytest.approx((0.5 * 1 + 1 * 3) / 1.5)
    assert convergence.later_within_octaves(np.stack((sums, sums))) == pytest.approx([7 / 3, 7 / 3])
    assert np.isnan(convergence.later_within_octaves(np.zeros(6)))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9), st.integers(0, 3))
def test_steps_of_one_token(predictions, label):
    """Against definitions written as loops."""
    last = len(predictions) - 1
    tensor, labels = torch.tensor(predictions)[:, None], torch.tensor([label])
    converged = next((t for t in range(1, last + 1) if predictions[t] == predictions[t - 1]), last)
    assert int(convergence.convergence_step(tensor)) == converged
    settled = min(t for t in range(last + 1) if all(p == predictions[-1] for p in predictions[t:]))
    assert int(convergence.settled_step(tensor)) == settled
    correct = next((t for t in range(last + 1) if predictions[t] == label), last + 1)
    assert int(convergence.first_correct_step(tensor, labels)) == correct
    expected = 0 if predictions[0] == label else 1 if predictions[-1] == label else 2
    assert int(convergence.classes(tensor, labels)) == expected
