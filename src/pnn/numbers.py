"""How numbers are written for people, with their units. JSON holds fractions; tables, figures and pages print per cent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pnn.results import EstimateJson

INTERVAL = "95 % interval"
NOTED_UNKNOWN = 0.01  # a share of a text's tokens: more is told
MOST_UNKNOWN = 0.03  # with more, what is measured by words or bytes would be of another text than was read


def written(value: float, digits: int, *, plus: bool = False) -> str:
    """With a real minus sign, never a minus before a zero, and on request a plus before what is not negative."""
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    if plus and not text.startswith("-"):
        text = f"+{text}"
    return text.replace("-", "−")


def bare_per_cent(fraction: float, digits: int = 1) -> str:
    """Without the sign, for table columns and bars whose heading or axis already says per cent."""
    return written(100 * fraction, digits)


def per_cent(fraction: float, digits: int = 1) -> str:
    return f"{bare_per_cent(fraction, digits)} %"


def roughly(fraction: float) -> str:
    """79 %, 2.3 %."""
    return per_cent(fraction, 0 if fraction >= 0.1 else 1)


def several(number: int, what: str) -> str:
    """1 step, 2 steps."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def words_unknown(number: int) -> str:
    """Of a text that a model was given."""
    words = "1 word of it is" if number == 1 else f"{number:,} words of it are"
    return f"{words} not in the model's vocabulary: it read [UNK] there"


def unknown_tokens(share: float, text: str, whose: str = "its") -> str | None:
    """What to know of numbers that were measured on a text that the tokenizer cannot express. None where that hardly
    matters."""
    if share <= NOTED_UNKNOWN:
        return None
    little = "little about this text" if share > MOST_UNKNOWN else "nothing about what these stand for"
    models = "this model" if whose == "its" else "these models"
    return f"{roughly(share)} of the tokens of {text} are [UNK] to {models}: {whose} numbers say {little}"


def halting(halt: Mapping[str, Any]) -> str:
    """When tokens stop, as a model's config says it: by change, 0.1."""
    first = halt.get("min_steps", 1)
    steps = several(first, "step")
    if "threshold" not in halt:
        return f"by {halt['criterion']}, after {steps}"
    return f"by {halt['criterion']}, {halt['threshold']:.9g}" + (f", after {steps} at the earliest" if first > 1 else "")


def points(fraction: float, digits: int = 1) -> str:
    """A difference of two percentages."""
    text = bare_per_cent(fraction, digits)
    return f"{text} point{'' if abs(round(100 * fraction, digits)) == 1 else 's'}"


def interval(ends: Sequence[float], digits: int = 1, *, scale: float = 100) -> str:
    """45.1–49.2; where a dash could be read as a minus, −0.3 to 0.5. Fractions come out in per cent unless `scale` is 1."""
    low, high = (written(scale * end, digits) for end in ends)
    return f"{low}{' to ' if '−' in low + high else '–'}{high}"


def per_cent_interval(ends: Sequence[float]) -> str:
    """An accuracy's interval. Its normal approximation may reach past 0 or 1, where no accuracy is."""
    return f"{interval([min(max(end, 0.0), 1.0) for end in ends])} %"


def estimate(found: EstimateJson, digits: int | None = None, *, scale: float = 1, plus: bool = False) -> str:
    """A value with its interval, in as many digits as the interval calls for unless told: 0.084 (0.083 to 0.085)."""
    value, (low, high) = found["value"], found["interval"]
    if value is None:
        return "not measurable"
    if low is None or high is None:
        return f"{written(scale * value, 3 if digits is None else digits, plus=plus)} (no interval)"
    if digits is None:
        digits = min(max(1 + math.ceil(-math.log10(scale * (high - low))), 2), 4) if high > low else 3
    value_, low_, high_ = (written(scale * one, digits, plus=plus) for one in (value, low, high))
    return f"{value_} ({low_} to {high_})"


def count(value: float) -> str:
    return f"{value:,.0f}"


def short_count(value: float) -> str:
    """60,177 → 60.2K; 53,704,251 → 53.7M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"
