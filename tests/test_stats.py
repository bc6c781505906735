"""Intervals over sequences: right in a formula that is known, and by simulation where tokens of a sequence are alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pnn.stats import (
    NOT_SUPPORTED,
    SUPPORTED,
    UNDECIDED,
    Estimate,
    bootstrap,
    bootstrap_smallest,
    bootstrap_together,
    independent_difference,
    of_a_share,
    ratio_interval,
    resampled_sums,
    student,
    t_quantile,
    verdict,
)

Z95 = 1.959963984540054


def test_a_verdict_follows_from_the_whole_interval():
    effect, nothing = Estimate(0.5, 0.2, 0.8), Estimate(math.nan, math.nan, math.nan)
    assert verdict(effect) == verdict(effect, margin=0.1) == SUPPORTED
    assert verdict(effect, margin=0.3) == UNDECIDED
    assert verdict(effect, margin=0.7) == UNDECIDED  # the value is below, the interval reaches above
    assert verdict(effect, margin=0.8) == NOT_SUPPORTED
    assert verdict(effect, beyond_control=Estimate(0.2, 0.1, 0.3)) == SUPPORTED
    assert verdict(effect, beyond_control=Estimate(0.1, -0.1, 0.3)) == UNDECIDED  # the control may have as large an effect
    assert verdict(effect, beyond_control=Estimate(-0.2, -0.4, 0.0)) == NOT_SUPPORTED
    assert verdict(nothing) == verdict(effect, beyond_control=nothing) == UNDECIDED


def test_the_interval_of_three_seeds_by_hand():
    assert student([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), rel=1e-6)


def test_independent_intervals_add_like_the_sides_of_a_right_angle():
    assert independent_difference(Estimate(5, 2, 8), Estimate(1, -3, 5)) == (4, -1, 9)


def test_one_trial_a_sequence_is_the_binomial_interval_with_students_t():
    hits = np.array([1.0] * 30 + [0.0] * 70)
    value, low, high = ratio_interval(hits, np.ones(100))
    half = 1.984217 * math.sqrt(0.3 * 0.7 / 99)  # t of 99 degrees of freedom, from a table
    assert (value, low, high) == pytest.approx((0.3, 0.3 - half, 0.3 + half), abs=1e-6)


def test_a_small_case_by_hand():
    # p = 4/6; residuals 1 − 2·2/3 = −1/3, 3 − 4·2/3 = 1/3; Σr² = 2/9, times 2/1, root 2/3, over 6 trials
    value, low, high = ratio_interval(np.array([1.0, 3.0]), np.array([2.0, 4.0]))
    assert value == pytest.approx(2 / 3)
    assert high - value == pytest.approx(12.7062 * (2 / 3) / 6, rel=1e-5)
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
    shrink = math.sqrt((m - 1) / (many - 1)) * t_quantile(0.95, many - 1) / t_quantile(0.95, m - 1)
    assert high_of_copies - value == pytest.approx((high - value) * shrink, abs=1e-12)


# The bootstrap --------------------------------------------------------------------------------------------------------


def ratio(sums):
    return sums[..., 0] / sums[..., 1]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(100, 400))
def test_the_bootstrap_of_a_ratio_agrees_with_the_formula(seed, sequences):
    hits, trials = clustered(np.random.default_rng(seed), sequences)
    value, low, high = ratio_interval(hits, trials)
    found = bootstrap(np.stack([hits, trials], axis=1), ratio, seed=seed)
    assert found.value == pytest.approx(value)
    half = high - value
    assert abs(found.low - low) < 0.2 * half  # 2,000 draws find the ends within a few per cent; skewness adds some
    assert abs(found.high - high) < 0.2 * half


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=40), st.integers(0, 100), st.floats(0.01, 10))
def test_what_is_the_same_in_every_sequence_has_an_interval_of_no_width(trials, seed, share):
    trials = np.array(trials, dtype=float)
    found = bootstrap(np.stack([share * trials, trials], axis=1), ratio, draws=50, seed=seed)
    assert found == pytest.approx((share, share, share))


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=2, max_size=30), st.integers(0, 100))
def test_the_bootstrap_repeats_follows_scale_and_keeps_pairs(rows, seed):
    totals = np.array(rows, dtype=float)
    found = bootstrap(totals, ratio, draws=100, seed=seed)
    assert found == bootstrap(totals, ratio, draws=100, seed=seed)
    scaled = bootstrap(totals * [10, 1], ratio, draws=100, seed=seed)
    assert scaled == pytest.approx(tuple(10 * x for x in found))
    copied = np.concatenate([totals, totals[:, :1]], axis=1) / 3  # the same totals twice: no difference, however drawn
    assert bootstrap(copied, lambda s: (s[..., 0] - s[..., 2]) / s[..., 1], draws=100) == (0, 0, 0)


def test_fewer_draws_are_the_first_of_more():
    totals = np.random.default_rng(0).normal(size=(30, 2)) + 5
    np.testing.assert_array_equal(resampled_sums(totals, 170, 3)[:70], resampled_sums(totals, 70, 3))
    assert len(np.unique(resampled_sums(totals, 170, 3), axis=0)) == 170  # no draw comes twice
    assert not np.array_equal(resampled_sums(totals, 70, 4), resampled_sums(totals, 70, 3))


def test_the_bootstrap_of_too_little_data_has_no_interval():
    assert bootstrap(np.array([[2.0, 4.0]]), ratio)[0] == 0.5
    assert all(map(math.isnan, bootstrap(np.array([[2.0, 4.0]]), ratio)[1:]))
    assert all(map(math.isnan, bootstrap(np.zeros((5, 2)), ratio)))
    rare = bootstrap(np.array([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]), ratio)  # one sequence alone says something
    assert rare.value == 0.5
    assert all(map(math.isnan, rare[1:]))


@pytest.mark.parametrize(("sequences", "least"), [(4, 0.85), (6, 0.93), (10, 0.93)])
def test_few_sequences_are_covered_as_often_as_many(sequences, least):
    """Plain percentiles of four draws cover 0.79, of ten 0.90; z instead of t 0.85 and 0.92."""
    rng, rounds, by_draws, by_formula = np.random.default_rng(2), 1500, 0, 0
    for _ in range(rounds):
        values = rng.normal(size=sequences)  # the true mean is 0
        found = bootstrap(np.stack((values, np.ones(sequences)), 1), ratio, draws=400)
        _, low, high = ratio_interval(values, np.ones(sequences))
        by_draws += found.low <= 0 <= found.high
        by_formula += low <= 0 <= high
    assert by_formula / rounds == pytest.approx(0.95, abs=0.015)
    assert least < by_draws / rounds < 0.985  # no draw lies beyond the most extreme of four


def test_a_share_on_which_all_sequences_agree_has_room_for_one_that_does_not():
    for right in (0.0, 1.0):
        alone = ratio_interval(np.full(50, right), np.ones(50))
        assert alone == (right, right, right)
        value, low, high = of_a_share(alone, 50)
        assert value == right
        assert high - low == pytest.approx(1 - 0.025 ** (1 / 50))
        assert (1 - (high - low)) ** 50 == pytest.approx(0.025)
        assert 0 <= low <= high <= 1
    assert of_a_share(Estimate(0.9, 0.7, 1.1), 9) == (0.9, 0.7, 1.0)
    assert of_a_share(Estimate(0.9, 0.7, 0.95), 9) == (0.9, 0.7, 0.95)
    assert of_a_share(Estimate(0.9, math.nan, math.nan), 1) == (0.9, 0.0, 1.0)  # one sequence says nothing
    assert all(map(math.isnan, of_a_share(Estimate(math.nan, math.nan, math.nan), 0)))


# The smallest of several ----------------------------------------------------------------------------------------------


def nothing(sums):
    return np.zeros((*sums.shape[:-1], 1))


def share_covered(truth, others=(0.0,), rounds=400, sequences=60):
    """How often the interval of min(truth) − min(others) covers it, and how often it is said to lie below."""
    rng, columns = np.random.default_rng(7), np.array((*truth, *others))
    smallest = min(truth) - min(others)
    covered = below = 0
    for _ in range(rounds):
        totals = rng.normal(size=(sequences, len(columns))) + columns
        less = (lambda sums: sums[..., len(truth) :] / sequences) if len(others) > 1 else nothing
        found = bootstrap_smallest(totals, lambda sums: sums[..., : len(truth)] / sequences, less, draws=400)
        covered += found.low <= smallest <= found.high
        below += verdict(found, smallest - 1e-9) == NOT_SUPPORTED
    return covered / rounds, below / rounds


@pytest.mark.parametrize("truth", [(0.0,) * 4, (0.0, 0.3, 0.3, 0.3), (0.0, 0.05, 0.1, 5.0)])
def test_the_smallest_of_several_is_covered_also_where_they_tie(truth):
    """The draws of the minimum itself cover 0.48 of four that tie, and lie below it more often than not."""
    covered, below = share_covered(truth)
    assert covered >= 0.94
    assert below < 0.05


def test_the_smallest_less_the_smallest_of_others_is_covered():
    for truth, others in (((0.5,) * 3, (0.0,) * 3), ((0.5, 1.0), (0.0, 0.0, 2.0)), ((0.0, 2.0), (0.0, 2.0))):
        covered, below = share_covered(truth, others)
        assert covered >= 0.94
        assert below < 0.05


def test_the_smallest_of_one_is_the_plain_bootstrap():
    totals = np.random.default_rng(0).normal(size=(50, 2)) + 5
    one = bootstrap_smallest(totals, lambda sums: ratio(sums)[..., None], nothing)
    assert one == pytest.approx(bootstrap(totals, ratio))
    alone = bootstrap_smallest(totals[:1], lambda sums: ratio(sums)[..., None], nothing)
    assert math.isnan(alone.low)


def test_intervals_together_are_wider_and_cover_together():
    rng = np.random.default_rng(3)
    rounds, questions, alone, together = 300, 8, 0, 0

    def means(sums):
        return sums / 60

    for seed in range(rounds):
        totals = rng.normal(size=(60, questions))  # every true mean is 0
        single = [ratio_interval(column, np.ones(60)) for column in totals.T]
        joint = bootstrap_together(totals, means, draws=400, seed=seed)
        alone += all(low <= 0 <= high for _, low, high in single)
        together += all(one.low <= 0 <= one.high for one in joint)
        assert [one.value for one in joint] == pytest.approx([value for value, _, _ in single])
    assert alone / rounds < 0.8  # 0.95⁸ = 0.66
    assert 0.9 < together / rounds < 0.98


def test_one_interval_together_is_the_plain_one_and_a_constant_widens_nothing():
    hits, trials = clustered(np.random.default_rng(5), 300)
    totals = np.stack([hits, trials], axis=1)
    plain = bootstrap(totals, ratio)
    (one,) = bootstrap_together(totals, lambda s: ratio(s)[..., None])
    assert one == pytest.approx(plain, abs=0.1 * (plain.high - plain.low))
    with_constant = bootstrap_together(totals, lambda s: np.stack([ratio(s), 0 * ratio(s)], axis=-1))
    assert with_constant == [one, (0, 0, 0)]


@pytest.mark.parametrize(
    ("share", "freedom", "t"),  # printed tables
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.3027),
        (0.95, 3, 3.1824),
        (0.95, 8, 2.3060),
        (0.95, 9, 2.2622),
        (0.99, 5, 4.0321),
        (0.9, 30, 1.6973),
    ],
)
def test_quantiles_of_students_t(share, freedom, t):
    assert t_quantile(share, freedom) == pytest.approx(t, abs=1e-4)


@pytest.mark.parametrize("share", [0.9, 0.95, 0.999])
def test_the_expansion_for_many_degrees_of_freedom_joins_the_sum(share):
    assert t_quantile(share, 1001) == pytest.approx(t_quantile(share, 1000), abs=1e-4)


def test_many_degrees_of_freedom_are_the_normal_distribution():
    assert t_quantile(0.95, 100_001) == pytest.approx(Z95, abs=1e-4)


def test_intervals_of_several_questions_hold_at_once():
    """Simulated: eight means of three values, all truly zero. One question's interval misses more often."""
    draws = np.random.default_rng(0).standard_normal((2000, 8, 3))
    for questions, expected in ((8, 0.05), (1, 1 - 0.95**8)):
        missed = [any(not low <= 0 <= high for _, low, high in (student(row, questions) for row in family)) for family in draws]
        assert np.mean(missed) == pytest.approx(expected, abs=0.02)
