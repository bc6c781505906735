"""Intervals. The unit of resampling is the sequence: tokens of one sequence are not independent."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959963984540054


def ratio_interval(hits: NDArray[np.float64], trials: NDArray[np.float64]) -> tuple[float, float, float]:
    """Σ hits / Σ trials over sequences, with its 95 % interval: (value, low, high).

    The variance is that of a ratio of sums over independent sequences (linearised): Σ (hᵢ − p·nᵢ)² / (Σ nᵢ)², times
    m/(m−1). `hits` may be any per-sequence total (correct tokens, summed loss, a difference of two of them).
    """
    total, m = float(trials.sum()), int((trials > 0).sum())
    if total == 0:
        return math.nan, math.nan, math.nan
    value = float(hits.sum()) / total
    if m < 2:
        return value, math.nan, math.nan
    spread = float(np.square(hits - value * trials).sum()) * m / (m - 1)
    half = Z95 * math.sqrt(spread) / total
    return value, value - half, value + half
