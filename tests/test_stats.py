"""Intervals over sequences: right in a formula that is known, and by simulation where tokens of a sequence are alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pnn.stats import Z95, ratio_interval


def test_z_leaves_five_per_cent_outside():
    assert math.erf(Z95 / math.sqrt(2)) == pytest.approx(0.95, abs=1e-12)


def test_one_trial_a_sequence_is_the_binomial_interval():
    hits = np.array([1.0] * 30 + [0.0] * 70)
    value, low, high = ratio_interval(hits, np.ones(100))
    half = 1.959963984540054 * math.sqrt(0.3 * 0.7 / 99)
    assert (value, low, high) == pytest.approx((0.3, 0.3 - half, 0.3 + half), abs=1e-12)


def test_a_small_case_by_hand():
    # p = 4/6; residuals 1 − 2·2/3 = −1/3, 3 − 4·2/3 = 1/3; Σr² = 2/9, times 2/1, root 2/3, over 6 trials
    value, low, high = ratio_interval(np.array([1.0, 3.0]), np.array([2.0, 4.0]))
    assert value == pytest.approx(2 / 3)
    assert high - value == pytest.approx(Z95 * (2 / 3) / 6)
    assert value - low == pytest.approx(high - value)


def test_sequences_without_trials_change_nothing():
    hits, trials = np.array([1.0, 3.0, 2.0]), np.array([2.0, 4.0, 5.0])
    with_empty = ratio_interval(np.array([1.0, 0.0, 3.0, 2.0, 0.0]), np.array([2.0, 0.0, 4.0, 5.0, 0.0]))
    assert with_empty == pytest.approx(ratio_interval(hits, trials))


def test_too_little_data_has_no_interval():
    assert all(map(math.isnan, ratio_interval(np.zeros(3), np.zeros(3))))
    value, low, high = ratio_interval(np.array([2.0]), np.array([4.0]))
    assert value == 0.5
    assert math.isnan(low)
    assert math.isnan(high)


def clustered(rng, sequences=150):
    """Tokens of a sequence share its difficulty; expected share 0.5."""
    trials = rng.integers(1, 30, sequences)
    hits = rng.binomial(trials, rng.beta(2, 2, sequences))
    return hits.astype(float), trials.astype(float)


def test_coverage_of_clustered_data_is_about_95_per_cent_where_the_binomial_fails():
    rng = np.random.default_rng(0)
    rounds, covered, naive = 2000, 0, 0
    for _ in range(rounds):
        hits, trials = clustered(rng)
        value, low, high = ratio_interval(hits, trials)
        covered += low <= 0.5 <= high
        half = Z95 * math.sqrt(value * (1 - value) / trials.sum())
        naive += abs(value - 0.5) <= half
    assert 0.93 < covered / rounds < 0.965
    assert naive / rounds < 0.75


def test_coverage_of_independent_tokens_is_about_95_per_cent_too():
    rng = np.random.default_rng(1)
    rounds, covered = 2000, 0
    for _ in range(rounds):
        trials = rng.integers(1, 30, 150).astype(float)
        _, low, high = ratio_interval(rng.binomial(trials.astype(int), 0.2).astype(float), trials)
        covered += low <= 0.2 <= high
    assert 0.93 < covered / rounds < 0.965


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=2, max_size=20), st.integers(2, 5))
def test_the_interval_follows_scale_order_and_copies(rows, copies):
    hits, trials = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    value, low, high = ratio_interval(hits, trials)
    assert low <= value <= high
    assert ratio_interval(10 * hits, trials) == pytest.approx((10 * value, 10 * low, 10 * high))
    assert ratio_interval(hits[::-1], trials[::-1]) == pytest.approx((value, low, high))
    m, many = len(rows), len(rows) * copies
    value_of_copies, _, high_of_copies = ratio_interval(np.tile(hits, copies), np.tile(trials, copies))
    assert value_of_copies == pytest.approx(value)
    shrink = math.sqrt((m - 1) / (many - 1))
    assert high_of_copies - value == pytest.approx((high - value) * shrink, abs=1e-12)
