"""Sums for every sequence, what intervals over sequences are made of; and a hypothesis tested by them (`stats.verdict`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pnn.results import EstimateJson, Finding
from pnn.stats import Estimate, bootstrap, bootstrap_smallest, of_a_share, verdict

Array = NDArray[np.float64]
Statistic = Callable[[Array], Array]


class Totals:
    """Named sums over tokens or targets, one row a sequence: a few numbers a sequence, whatever the model's width."""

    def __init__(self, sequences: int):
        self.sequences = sequences
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, sequence: Tensor, values: Tensor) -> None:
        """`values`: (n,) or (n, k); `sequence`: (n,), to which sequence each belongs."""
        rows = values.double().reshape(len(values), math.prod(values.shape[1:]))
        if name not in self._sums:
            self._sums[name] = torch.zeros(self.sequences, rows.shape[1], dtype=torch.float64, device=rows.device)
        self._sums[name].index_add_(0, sequence, rows)

    def count(self, name: str, sequence: Tensor) -> None:
        self.add(name, sequence, torch.ones(len(sequence), device=sequence.device))

    def of(self, name: str) -> Array:
        """(sequences, k)."""
        return self._sums[name].cpu().numpy()

    def __contains__(self, name: str) -> bool:
        return name in self._sums


def ratios(sums: Totals, above: str, below: str, shares: bool = False) -> list[EstimateJson]:
    """Σ above / Σ below, column by column, each with its interval. One column below serves all above. Shares lie in [0, 1]."""
    top, bottom = sums.of(above), sums.of(below)
    columns = [np.stack((top[:, i], bottom[:, i if bottom.shape[1] > 1 else 0]), 1) for i in range(top.shape[1])]
    found = [(bootstrap(column, ratio), int((column[:, 1] > 0).sum())) for column in columns]
    return [(of_a_share(one, sequences) if shares else one).as_json() for one, sequences in found]


def ratio(sums: Array) -> Array:
    """First over second; nothing over nothing is NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        quotient: Array = sums[..., 0] / sums[..., 1]
    return quotient


def difference_of_ratios(sums: Array) -> Array:
    """a/b − c/d."""
    return ratio(sums[..., :2]) - ratio(sums[..., 2:])


def two_ratios(totals: Totals, above: str, below: str, one: int, other: int) -> Array:
    """What `difference_of_ratios` reads: columns `one` and `other` of Σ above / Σ below, for every sequence."""
    top, bottom = totals.of(above), totals.of(below)
    return np.stack((top[:, one], bottom[:, one], top[:, other], bottom[:, other]), 1)


def nothing(sums: Array) -> Array:
    return np.zeros((*sums.shape[:-1], 1))


@dataclass(frozen=True)
class Smallest:
    """The smallest of several statistics, sums (…, K) → values (…, M), less the smallest of others: what is said of every step
    or of every part is judged part by part (`stats.bootstrap_smallest`)."""

    parts: Statistic
    less: Statistic = nothing

    def __sub__(self, other: Smallest) -> Smallest:
        """(min a − min b) − (min c − min d) = min (a + d) − min (b + c), over all pairs."""
        return Smallest(_added(self.parts, other.less), _added(self.less, other.parts))

    def value(self, sums: Array) -> float:
        return float(self.parts(sums).min() - self.less(sums).min())

    def estimate(self, totals: Array) -> Estimate:
        return bootstrap_smallest(totals, self.parts, self.less)


def _added(one: Statistic, other: Statistic) -> Statistic:
    def pairs(sums: Array) -> Array:
        both: Array = one(sums)[..., None] + other(sums)[..., None, :]
        return both.reshape(*both.shape[:-2], -1)

    return pairs


def _smallest(statistic: Statistic | Smallest) -> Smallest:
    """One statistic is the smallest of one."""
    return statistic if isinstance(statistic, Smallest) else Smallest(lambda sums: statistic(sums)[..., None])


def finding(
    hypothesis: str,
    measure: str,
    totals: Array,
    statistic: Statistic | Smallest,
    *,
    margin: float = 0.0,
    control: str | None = None,
    control_statistic: Statistic | Smallest | None = None,
) -> Finding:
    """One hypothesis, tested: the effect, its control and the verdict. Both statistics read the same per-sequence totals, so
    that their difference is paired."""
    judged = _smallest(statistic)
    effect = judged.estimate(totals)
    found: Finding = {"hypothesis": hypothesis, "measure": measure, "effect": effect.as_json(), "margin": margin}
    beyond = None
    if control is not None and control_statistic is not None:
        compared = _smallest(control_statistic)
        beyond = (judged - compared).estimate(totals)
        found["control"] = {"what": control, **compared.estimate(totals).as_json()}
        found["effect_beyond_control"] = beyond.as_json()
    found["verdict"] = verdict(effect, margin, beyond)
    return found
