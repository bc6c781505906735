"""How far runs are from one another that were asked for the same tokens, and which of the differences hold.

    accuracy(run) = Σ correct / Σ targets over sequences,     difference(b, a) = accuracy(b) − accuracy(a)

Decoders are judged by their loss, Σ loss / Σ targets, in the same way.

Differences are *paired*: sequences are drawn again (with replacement) for all runs at once, and what is hard for every run
cancels. Of a list of differences, the 95 % intervals are right all at once in 95 % of cases (`stats.bootstrap_together`), so a
long list does not make a chance hit more likely; a difference holds when its interval leaves out zero. Intervals speak of the
text and the masks, not of the spread between seeds; `losses_apart`, for arms of several seeds, speaks of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pnn.errors import UserError
from pnn.numbers import bare_per_cent, estimate, interval
from pnn.results import Difference, DifferenceRow, Differences, SequenceTotals
from pnn.stats import Estimate, bootstrap_together, differs, seeds_and_sequences, student

DRAWS = 2000
HOLDS, UNDECIDED, EQUAL = "holds", "undecided", "equal"
Pairs = Sequence[tuple[int, int]]


def paired(totals: Sequence[SequenceTotals], pairs: Pairs, measure: Literal["correct", "loss"]) -> list[Estimate]:
    """How much each pair's second run is above its first, with intervals that hold together."""
    n, base, against = len(totals), [a for a, _ in pairs], [b for _, b in pairs]

    def apart(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        means = sums[..., :n] / sums[..., n:]
        return np.asarray(means[..., against] - means[..., base])

    columns = [*(one[measure] for one in totals), *(one["targets"] for one in totals)]
    return bootstrap_together(np.array(columns, dtype=np.float64).T, apart, DRAWS)


def differences(
    names: Sequence[str], totals: Sequence[SequenceTotals], pairs: Pairs, judged: Literal["accuracy", "loss"] = "accuracy"
) -> Differences:
    """The same in accuracy and loss, with names and verdicts; what they are judged by, also in words."""
    for name, one in zip(names, totals, strict=True):
        if len(one["targets"]) != len(totals[0]["targets"]):
            raise UserError(
                f"{names[0]} and {name} cannot be compared: the same text gives them {len(totals[0]['targets']):,} and "
                f"{len(one['targets']):,} sequences"
            )
    found = zip(pairs, paired(totals, pairs, "correct"), paired(totals, pairs, "loss"), strict=True)
    rows: list[DifferenceRow] = [
        {
            "run": names[b],
            "against": names[a],
            "accuracy": _as_json(accuracy),
            "loss": _as_json(loss),
            "sentence": sentence(names[b], names[a], accuracy) if judged == "accuracy" else of_loss(names[b], names[a], loss),
        }
        for (a, b), accuracy, loss in found
    ]
    return {"comparisons": len(rows), "hold": sum(row[judged]["verdict"] == HOLDS for row in rows), "rows": rows}


def _as_json(difference: Estimate) -> Difference:
    value, low, high = difference
    return {"difference": value, "interval": [low, high], "verdict": verdict(difference)}


def verdict(difference: Estimate) -> str:
    if difference == (0, 0, 0):
        return EQUAL
    return HOLDS if differs(difference) else UNDECIDED


def digits_of(difference: Estimate) -> int:
    """Tenths of a point, unless an end of the interval would be written as zero."""
    return 1 if min(abs(difference.low), abs(difference.high)) >= 0.0005 else 2


def sentence(run: str, against: str, difference: Estimate) -> str:
    """In words that follow from the numbers."""
    value, low, high = difference
    said = verdict(difference)
    if said == EQUAL:
        return f"{run} gets as many right as {against} in every sequence: {said}"
    digits = digits_of(difference)
    if said == UNDECIDED:
        between = interval((low, high), digits)
        return f"{run} differs from {against} by {bare_per_cent(value, digits)} points ({between}): {said}"
    between = interval(sorted((abs(low), abs(high))), digits)
    apart = f"{bare_per_cent(abs(value), digits)} points {'above' if value > 0 else 'below'}"
    return f"{run} is {apart} {against} ({between}): {said}"


def of_loss(run: str, against: str, difference: Estimate) -> str:
    value, low, high = difference
    said = verdict(difference)
    if said == EQUAL:
        return f"{run} has the same loss as {against} in every row: {said}"
    if said == UNDECIDED:
        return f"{run} differs from {against} by {value:.4f} nats per token ({interval((low, high), 4, scale=1)}): {said}"
    between = interval(sorted((abs(low), abs(high))), 4, scale=1)
    return f"{run} is {abs(value):.4f} nats per token {'above' if value > 0 else 'below'} {against} ({between}): {said}"


LEAST_SEEDS = 3
TOO_FEW = "too few seeds"

# Between arms of several seeds ------------------------------------------------------------------------------------------


def arms_apart(
    one: Mapping[str, SequenceTotals], other: Mapping[str, SequenceTotals], measure: Literal["correct", "loss"]
) -> tuple[list[str], Estimate, Estimate]:
    """How far one arm lies above another, paired by seed, which is the key, and by sequence: the seeds that both have, the
    difference with an interval over seeds and sequences together, and with one over seeds."""
    seeds = sorted(one.keys() & other.keys())
    gains = np.array([np.subtract(one[seed][measure], other[seed][measure]) for seed in seeds], dtype=np.float64)
    trials = np.array(one[seeds[0]]["targets"], dtype=np.float64)
    return seeds, seeds_and_sequences(gains, trials), student((gains.sum(1) / trials.sum()).tolist())


def losses_apart(one: Mapping[str, SequenceTotals], other: Mapping[str, SequenceTotals]) -> dict[str, Any]:
    """`arms_apart` of losses, where a sequence is a window of text."""
    seeds, drawn, by_seed = arms_apart(one, other, "loss")
    verdict = both_say(drawn, by_seed, seeds=len(seeds))
    return _told(seeds, by_seed, verdict) | {"over_seeds_and_windows": drawn.as_json()}


def accuracies_apart(one: Mapping[str, SequenceTotals], other: Mapping[str, SequenceTotals]) -> dict[str, Any]:
    """`arms_apart` of what was got right, where more is better."""
    seeds, drawn, by_seed = arms_apart(one, other, "correct")
    verdict = both_say(-drawn, -by_seed, seeds=len(seeds))  # of losses less is better
    return _told(seeds, by_seed, verdict) | {"over_seeds_and_sequences": drawn.as_json()}


def _told(seeds: list[str], by_seed: Estimate, verdict: str) -> dict[str, Any]:
    return {"seeds": len(seeds), "over_seeds": by_seed.as_json(), "verdict": verdict}


def both_say(*intervals: Estimate, seeds: int) -> str:
    """Of losses: both intervals have to say so. That over windows knows little of seeds, that over three seeds little of
    anything, and fewer say nothing."""
    if seeds < LEAST_SEEDS:
        return TOO_FEW
    if all(one.high < 0 for one in intervals):
        return "better"
    return "worse" if all(one.low > 0 for one in intervals) else "undecided"


def pairs_table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Lines of Markdown: for each question its pairs of arms, `losses_apart` with their names as `arms`."""
    lines = ["| question | loss of | less that of | over seeds and windows | over seeds | |", "|---|---|---|---|---|---|"]
    for question, pairs in found.items():
        for pair in pairs:
            one, other = pair["arms"]
            ends = (estimate(pair[key], 4, plus=True) for key in ("over_seeds_and_windows", "over_seeds"))
            lines.append(f"| {question} | `{one}` | `{other}` | {' | '.join(ends)} | {pair['verdict']} |")
    return lines
