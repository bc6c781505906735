"""How numbers are written for people. JSON holds fractions; figures and pages print per cent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

NO_BREAK = "\u00a0"  # keeps a number and its sign on one line
INTERVAL = f"95{NO_BREAK}% interval"


def per_cent(fraction: float, digits: int = 1) -> str:
    return f"{bare_per_cent(fraction, digits)}{NO_BREAK}%"


def bare_per_cent(fraction: float, digits: int = 1) -> str:
    """Without the sign, for table columns and bars whose heading or axis already says per cent."""
    return signed(100 * fraction, digits)


def per_cent_interval(interval: Sequence[float]) -> str:
    """An accuracy's interval. Its normal approximation may reach past 0 or 1, where no accuracy is."""
    low, high = (min(max(end, 0.0), 1.0) for end in interval)
    return f"{bare_per_cent(low)}–{per_cent(high)}"


def points(fraction: float) -> str:
    """A difference of two percentages."""
    text = bare_per_cent(fraction)
    return f"{text}{NO_BREAK}point{'' if text in ('1.0', '−1.0') else 's'}"


def points_interval(interval: Sequence[float]) -> str:
    low, high = interval
    return f"{bare_per_cent(low)} to {bare_per_cent(high)}"


def count(number: float) -> str:
    return f"{number:,.0f}"


def short_count(number: float) -> str:
    """60,177 → 60.2K; 53,704,251 → 53.7M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def estimate(found: Mapping[str, Any]) -> str:
    """A value with its interval, as the analyses write them, in as many digits as the interval calls for:
    0.084 (0.083 to 0.085)."""
    value, (low, high) = found["value"], found["interval"]
    if value is None:
        return "not measurable"
    if low is None or high is None:
        return f"{signed(value, 3)} (no interval)"
    digits = min(max(1 + math.ceil(-math.log10(high - low)), 2), 4) if high > low else 3
    return f"{signed(value, digits)} ({signed(low, digits)} to {signed(high, digits)})"


def signed(value: float, digits: int) -> str:
    """With a real minus sign, and never a minus before a zero."""
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−")
