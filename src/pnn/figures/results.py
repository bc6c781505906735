"""What the figures and the page have to know about results in order not to compare what cannot be compared."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]


def same_targets(results: Sequence[Json]) -> bool:
    """Whether all were measured on the very same masked tokens: only then may their accuracies be compared."""
    keys = ("source", "text", "sequences", "mask_probability", "mask_seed", "targets")
    return all(all(r.get(key) == results[0].get(key) for key in keys) for r in results)


def median_speed(metrics: Sequence[Json]) -> float | None:
    """Training tokens a second. The median, because rows that follow a start or a pause are slow."""
    speeds = [row["tokens_per_second"] for row in metrics if "tokens_per_second" in row]
    return statistics.median(speeds) if speeds else None
