"""How numbers are written for people. JSON holds fractions; figures and pages print per cent."""

from __future__ import annotations

from collections.abc import Sequence

NO_BREAK = "\u00a0"  # keeps a number and its sign on one line
INTERVAL = f"95{NO_BREAK}% interval"


def per_cent(fraction: float, digits: int = 1) -> str:
    return f"{bare_per_cent(fraction, digits)}{NO_BREAK}%"


def bare_per_cent(fraction: float, digits: int = 1) -> str:
    """Without the sign, for table columns and bars whose heading or axis already says per cent."""
    return _signed(100 * fraction, digits)


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


def _signed(value: float, digits: int) -> str:
    """With a real minus sign, and never a minus before a zero."""
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "−")
