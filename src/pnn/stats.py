"""Intervals, and the verdict that follows from one. Every interval of the library is an `Estimate` made here.

The unit of resampling is the sequence: tokens of one sequence are not independent. Of few sequences or seeds the interval is as
wide as Student's t makes it. A verdict is computed, never written. The effect is signed so that a positive one speaks for the
claim:

* supported       the effect's interval lies above its margin, and above its control's effect where there is a control;
* not supported   the interval of either lies below;
* undecided       neither.

Each verdict stands alone: of many whose effects lie at their margins, one in forty is "supported" by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pnn.results import EstimateJson

SUPPORTED, NOT_SUPPORTED, UNDECIDED = "supported", "not supported", "undecided"


class Estimate(NamedTuple):
    """A value with its 95 % interval. NaN stands for what could not be computed."""

    value: float
    low: float
    high: float

    def __neg__(self) -> Estimate:
        return Estimate(-self.value, -self.high, -self.low)

    def on_scale(self, change: Callable[[float], float]) -> Estimate:
        """Value and interval after a rising function."""
        return Estimate(*(end if math.isnan(end) else change(end) for end in self))

    def as_json(self) -> EstimateJson:
        """JSON has no NaN: what could not be computed is null."""
        return {"value": finite(self.value), "interval": [finite(self.low), finite(self.high)]}

    @staticmethod
    def from_json(found: EstimateJson) -> Estimate:
        return Estimate(*(math.nan if end is None else end for end in (found["value"], *found["interval"])))


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def verdict(effect: Estimate, margin: float = 0.0, beyond_control: Estimate | None = None) -> str:
    bounds = [(effect, margin)] + ([] if beyond_control is None else [(beyond_control, 0.0)])
    if all(estimate.low > bound for estimate, bound in bounds):
        return SUPPORTED
    if any(estimate.high <= bound for estimate, bound in bounds):
        return NOT_SUPPORTED
    return UNDECIDED


def differs(difference: Estimate) -> bool:
    """Whether the interval leaves out zero: that it is above or that it is below is supported."""
    return SUPPORTED in (verdict(difference), verdict(-difference))


def ratio_interval(hits: NDArray[np.float64], trials: NDArray[np.float64]) -> Estimate:
    """Σ hits / Σ trials over sequences, with its 95 % interval.

    The variance is that of a ratio of sums over independent sequences (linearised): Σ (hᵢ − p·nᵢ)² / (Σ nᵢ)², times
    m/(m−1); m sequences have m − 1 degrees of freedom. `hits` may be any per-sequence total (correct tokens, summed loss, a
    difference of two of them).
    """
    total, m = float(trials.sum()), int((trials > 0).sum())
    if total == 0:
        return Estimate(math.nan, math.nan, math.nan)
    value = float(hits.sum()) / total
    if m < 2:
        return Estimate(value, math.nan, math.nan)
    spread = float(np.square(hits - value * trials).sum()) * m / (m - 1)
    half = t_quantile(0.95, m - 1) * math.sqrt(spread) / total
    return Estimate(value, value - half, value + half)


def of_a_share(found: Estimate, sequences: int) -> Estimate:
    """The interval of a share, which lies between 0 and 1. Where all sequences agree it has no width, though others may not
    agree with them: it then ends where so many would still all agree in 2.5 % of cases. One sequence alone says nothing."""
    value, low, high = found
    if math.isnan(value):
        return found
    if sequences < 2:
        return Estimate(value, 0.0, 1.0)
    if low == high:
        room = 1 - 0.025 ** (1 / sequences)
        low, high = value - room, value + room
    return Estimate(value, max(0.0, low), min(1.0, high))


def independent_difference(one: Estimate, other: Estimate) -> Estimate:
    """One less the other, if nothing is known but their own intervals. Where both were measured on the same sequences,
    what is hard for both cancels and the true interval is as a rule narrower."""
    gap, half = one.value - other.value, math.hypot((one.high - one.low) / 2, (other.high - other.low) / 2)
    return Estimate(gap, gap - half, gap + half)


def student(values: Sequence[float], questions: int = 1) -> Estimate:
    """Mean of independent values and its 95 % interval by Student's t; of one value there is no interval. With several
    `questions`, as wide as is needed for all their intervals to hold at once in 95 % of cases (Bonferroni)."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Estimate(mean, math.nan, math.nan)
    half = t_quantile(1 - 0.05 / questions, count - 1) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half)


@lru_cache(maxsize=256)
def t_quantile(share: float, freedom: int) -> float:
    """The t for which Student's distribution has this share between −t and t, by halving: the share grows with t."""
    if freedom > MANY:
        z = NormalDist().inv_cdf((1 + share) / 2)
        return z + (z**3 + z) / (4 * freedom)
    low, high = 0.0, math.pi / 2  # t = √freedom · tan(angle)
    for _ in range(100):
        angle = (low + high) / 2
        low, high = (angle, high) if _share_within(angle, freedom) < share else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _share_within(angle: float, freedom: int) -> float:
    """A finite sum, for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def seeds_and_sequences(gains: NDArray[np.float64], trials: NDArray[np.float64], draws: int = 2000, seed: int = 0) -> Estimate:
    """Σ gains / Σ trials, mean over seeds, with the middle 95 % of what it is when seeds and sequences are drawn again, both
    with replacement. `gains`: (seeds, sequences), what one run's totals are above another's; `trials`: (sequences,)."""
    count = len(gains)
    sums = resampled_sums(np.column_stack((gains.T, trials)), draws, seed)
    chosen = np.random.default_rng([seed, count]).integers(0, count, (draws, count))
    drawn = np.take_along_axis(sums[:, :count], chosen, axis=1).mean(axis=1) / sums[:, count]
    return Estimate(float(gains.mean(axis=0).sum() / trials.sum()), *middle(drawn, len(trials)))


MANY = 1000  # degrees of freedom, above which the first term of an expansion around the normal distribution is exact to 1e-4
Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
BLOCK = 50  # draws at a time: memory for so many times the number of sequences


def middle(draws: Sequence[float] | NDArray[np.float64], units: int) -> tuple[float, float]:
    """The ends of the middle 95 % of draws of so many units, or somewhat more where they are few; NaN without draws."""
    if not len(draws) or units < 2:
        return math.nan, math.nan
    low, high = np.quantile(draws, [tail(units), 1 - tail(units)])
    return float(low), float(high)


def tail(units: int, questions: int = 1) -> float:
    """The share of draws beyond an end that is right in 97.5 % of cases, or beyond any of several. Resampling n units finds a
    spread too small by √((n−1)/n), and knows nothing of t: the share is what is beyond t·√(n/(n−1)) in a normal distribution
    (Hesterberg, 2015: expanded percentiles)."""
    t = t_quantile(1 - 0.05 / questions, units - 1)
    return NormalDist().cdf(-t * math.sqrt(units / (units - 1)))


def bootstrap(totals: NDArray[np.float64], statistic: Statistic, draws: int = 2000, seed: int = 0) -> Estimate:
    """`statistic` of the sums over sequences, with its 95 % interval: the middle 95 % of what it is when as many sequences
    are drawn again, with replacement.

    `totals` is (sequences, K), K totals a sequence; `statistic` takes sums (…, K) to values (…), for a difference of two
    accuracies say `lambda s: (s[..., 0] - s[..., 1]) / s[..., 2]`. Draws for which it is undefined (0/0) are left out.
    What is the same in every sequence has an interval of no width (`of_a_share`).
    """
    value, drawn = _drawn(totals, lambda sums: np.asarray(statistic(sums))[..., None], draws, seed)
    return Estimate(float(value[0]), *middle(drawn[:, 0], len(totals)))


def bootstrap_smallest(
    totals: NDArray[np.float64], parts: Statistic, less: Statistic, draws: int = 2000, seed: int = 0
) -> Estimate:
    """The smallest of several statistics, sums (…, K) → values (…, M), less the smallest of others.

    The draws of a minimum are no guide to it: they lie below it, the further the more parts come close to one another. So each
    part is judged by itself. Every one has to lie above a bound for the smallest to do so, and none helps another: the interval
    begins at the lowest of their lower ends. That one lies below it is easier the more there are: the interval ends at the
    lowest of their upper ends, each moved out so that none of M is wrong in 97.5 % of cases (Bonferroni). Less others all pairs
    are judged, min a − min b = max over b of min over a of (a − b), and the lower ends are moved out for as many as are b.
    """

    def pairs(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        apart: NDArray[np.float64] = parts(sums)[..., None] - less(sums)[..., None, :]
        return apart.reshape(*apart.shape[:-2], -1)

    count = parts(totals.sum(axis=0)).shape[-1]
    values, drawn = _drawn(totals, pairs, draws, seed)
    value = float(values.reshape(count, -1).min(axis=0).max())
    if not len(drawn):
        return Estimate(value, math.nan, math.nan)
    below, above = tail(len(totals), len(values) // count), tail(len(totals), count)
    lows, highs = (np.quantile(drawn, at, axis=0).reshape(count, -1) for at in (below, 1 - above))
    return Estimate(value, float(lows.min(axis=0).max()), float(highs.max(axis=1).min()))


def bootstrap_together(totals: NDArray[np.float64], statistics: Statistic, draws: int = 2000, seed: int = 0) -> list[Estimate]:
    """Several statistics, sums (…, K) → values (…, M), with intervals that are all right at once in 95 % of cases.

    The more questions, the likelier that one of 95 % is answered wrongly; so all intervals are widened alike: value ± c·s,
    s the statistic's standard deviation over the draws and c such that in 95 % of the draws none of the M statistics is
    further than c·s from its value (for one statistic c ≈ 2, for ten independent ones c ≈ 2.8).
    """
    values, drawn = _drawn(totals, statistics, draws, seed)
    if not len(drawn):
        return [Estimate(float(value), math.nan, math.nan) for value in values]
    away = np.abs(drawn - values)
    s = np.sqrt(np.square(away).mean(axis=0))
    c = np.quantile((away / np.where(s > 0, s, 1)).max(axis=-1), 1 - 2 * tail(len(totals)))
    return [Estimate(float(v), float(v - c * one), float(v + c * one)) for v, one in zip(values, s, strict=True)]


def _drawn(
    totals: NDArray[np.float64], statistics: Statistic, draws: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The M statistics, and (draws, M) of them where all are defined; no draws where fewer than two sequences say anything."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistics(totals.sum(axis=0))
        if totals.any(axis=1).sum() < 2:
            return values, np.empty((0, len(values)))
        drawn = statistics(resampled_sums(totals, draws, seed))
    return values, drawn[np.isfinite(drawn).all(axis=-1)]


def resampled_sums(totals: NDArray[np.float64], draws: int, seed: int) -> NDArray[np.float64]:
    """(draws, K): the sums of K totals over sequences drawn with replacement, as many as there are. The same sequences are
    drawn for the same seed and number of sequences, so that what is compared stays paired."""
    columns = np.ascontiguousarray(totals.T)
    parts = []
    for block in range(math.ceil(draws / BLOCK)):
        weights = _weights(len(totals), seed, block).astype(np.float64)
        # a product a column: columns that are equal then have equal sums, to the last bit
        parts.append(np.stack([weights @ column for column in columns], axis=-1))
    return np.concatenate(parts)[:draws]


@lru_cache(maxsize=64)  # an analysis asks for dozens of intervals over the same sequences
def _weights(n: int, seed: int, block: int) -> NDArray[np.uint16]:
    """How often each of n sequences is drawn, (BLOCK, n)."""
    chosen = np.random.default_rng([seed, block]).integers(0, n, (BLOCK, n)) + np.arange(BLOCK)[:, None] * n
    return np.bincount(chosen.ravel(), minlength=BLOCK * n).reshape(BLOCK, n).astype(np.uint16)
