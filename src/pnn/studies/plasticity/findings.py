"""From the arms of a study to tables and verdicts. Nothing here is written by hand but the claims and their margins.

The published findings, what each is taken to mean here, and what its verdict is computed from:

    F0  30–50 % of heads can go with minimal degradation      perplexity at most 5 % above that of the control, by the best
                                                              measure, at 30 %; 50 % and "right after pruning" stand beside it
    F1  growth by gradient or entropy gap recovers 92–95 %    PPL₀/PPL, strategy less random: a point (0.01) or more
        of performance, at random 85–90 %                     untestable where the best strategy gains less than that over
                                                              growing nothing
    F2  5 × the learning rate on new heads: 12 % faster       share of updates saved on the way to a loss that both reach: 0.05
    F3  larger models: prune more, regrow less                both: the share of heads that can go within 5 % with none grown,
                                                              large less small of one architecture: 0.05 or more; and what
                                                              growing twice as many gains, small less large: above 0
    F4  as good with 15–20 % fewer parameters                 the most parameters that an arm within 5 % of the control lost:
                                                              0.15 of all; the same of heads stands beside it

The control was trained as long on the same rows and lost no head. Differences are paired by seed; intervals are Student's t
over seeds, 95 %, of losses (so of perplexities' ratios), one question at a time. Supported: the interval lies beyond the
margin; not supported: it lies on the other side; undecided: neither. A finding is about models in general: it is supported if
it is for every model, not supported if for one it is not; models on which it is untestable say nothing.

"The best measure" of F0 is chosen by the numbers that are then judged, which favours the claim. F2's threshold lies nine tenths
of the way from the loss after growth to the worse of the two ends, so that both reach it; updates between evaluations are
interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from pnn.results import EstimateJson
from pnn.stats import NOT_SUPPORTED, SUPPORTED, UNDECIDED, Estimate, student, verdict
from pnn.studies.plasticity.arms import (
    CONTROL,
    CYCLE,
    GRID_GROW,
    GRID_PRUNE,
    GROW_BY,
    MULTIPLIERS,
    PRUNE_BY,
    PRUNE_RATIOS,
    Arm,
)

Json = dict[str, Any]
TOLERATED = 0.05  # rise of perplexity that counts as none
BETTER = 0.01  # of PPL₀/PPL
SAVED = 0.05  # of the updates
MOVED = 0.05  # of the share of heads
FEWER = 0.15  # of the parameters
THRESHOLD = 0.9  # of the way down
GUIDED = ("gradient", "entropy_gap")
UNTESTABLE = "untestable"


def findings(models: Mapping[str, Json], arms: Mapping[str, Sequence[Json]]) -> Json:
    """`models`: each before anything was done to it; `arms`: of each model, all seeds."""
    results = {name: Results(models[name], arms[name]) for name in models}
    return {
        "tables": {name: tables(found) for name, found in results.items()},
        "findings": {
            "F0": _of_models("30–50 % of heads can go with minimal degradation", results, pruning_is_harmless),
            "F1": _of_models("growth by gradient or entropy gap recovers more than at random", results, guided_growth_helps),
            "F2": _of_models("new heads at five times the learning rate recover 12 % faster", results, faster_heads_help),
            "F3": larger_models_lose_more(results),
            "F4": _of_models("as good with 15–20 % fewer parameters", results, smaller_is_as_good),
        },
    }


class Results:
    """One model's arms, by arm and seed."""

    def __init__(self, before: Json, arms: Sequence[Json]):
        self.before = before
        self.by_arm: dict[str, dict[int, Json]] = {}
        for one in arms:
            self.by_arm.setdefault(one["arm"], {})[one["seed"]] = one

    def each(self, arm: Arm, value: Callable[[Json], float], against: Arm | None = None) -> list[float]:
        """`value` of an arm for every seed, or its difference to another arm of the same seed."""
        mine = self.by_arm[arm.name]
        if against is None:
            return [value(mine[seed]) for seed in sorted(mine)]
        other = self.by_arm[against.name]
        return [value(mine[seed]) - value(other[seed]) for seed in sorted(mine.keys() & other.keys())]

    def one(self, arm: Arm) -> Json:
        return next(iter(self.by_arm[arm.name].values()))


def loss(arm: Json) -> float:
    return arm["loss"]


class OverSeeds(EstimateJson):
    by_seed: list[float]


def estimate(values: Sequence[float], change: Callable[[float], float] = float) -> OverSeeds:
    """Mean and interval over seeds; `change` is applied to both, where another scale is easier to read."""
    return {**student(values).on_scale(change).as_json(), "by_seed": [change(one) for one in values]}


def perplexity_of(values: Sequence[float]) -> OverSeeds:
    return estimate(values, lambda nats: math.exp(min(700.0, nats)))


def rise_of(values: Sequence[float]) -> OverSeeds:
    """A difference of losses as a share of the perplexity."""
    return estimate(values, lambda nats: math.expm1(min(700.0, nats)))


def judged(found: EstimateJson, margin: float) -> str:
    """Whether an estimate lies above its margin."""
    return verdict(Estimate.from_json(found), margin)


def opposite(said: str) -> str:
    return {SUPPORTED: NOT_SUPPORTED, NOT_SUPPORTED: SUPPORTED}.get(said, said)


def of_all(verdicts: Iterable[str]) -> str:
    given = set(verdicts)
    found = given - {UNTESTABLE}
    if given and not found:
        return UNTESTABLE
    return NOT_SUPPORTED if NOT_SUPPORTED in found else SUPPORTED if found == {SUPPORTED} else UNDECIDED


def of_any(verdicts: Iterable[str]) -> str:
    """For a claim that one of several alternatives is enough for."""
    return opposite(of_all(map(opposite, verdicts)))


def _of_models(claim: str, results: Mapping[str, Results], test: Callable[[Results], Json]) -> Json:
    by_model = {name: test(found) for name, found in results.items()}
    return {"claim": claim, "verdict": of_all(one["verdict"] for one in by_model.values()), "by_model": by_model}


# The findings ---------------------------------------------------------------------------------------------------------


def pruning_is_harmless(found: Results) -> Json:
    by_ratio = {}
    for ratio in (0.3, 0.5):
        arms = [Arm(ratio, method) for method in PRUNE_BY]
        start = found.before["loss"]
        stages = {
            "right_after": {arm: [nats - start for nats in found.each(arm, lambda one: one["loss_pruned"])] for arm in arms},
            "after_learning": {arm: found.each(arm, loss, CONTROL) for arm in arms},
        }
        by_stage = {}
        for stage, rises in stages.items():
            best = min(arms, key=lambda arm: float(np.mean(rises[arm])))
            rise = rise_of(rises[best])
            by_stage[stage] = {"best": best.prune_by, "rise": rise, "verdict": opposite(judged(rise, TOLERATED))}
        by_ratio[f"{ratio:g}"] = by_stage
    return {"verdict": by_ratio["0.3"]["after_learning"]["verdict"], "by_ratio": by_ratio}


def guided_growth_helps(found: Results) -> Json:
    def performance(arm: Json) -> float:
        return math.exp(found.before["loss"] - arm["loss"])

    by_strategy: dict[str, Json] = {}
    for strategy in GUIDED:
        more = estimate(found.each(growing(strategy), performance, growing("random")))
        by_strategy[strategy] = {"more_than_random": more, "verdict": judged(more, BETTER)}
    nothing = Arm(CYCLE.prune, CYCLE.prune_by)
    gains = {strategy: found.each(growing(strategy), performance, nothing) for strategy in GROW_BY}
    mean_gains = {strategy: float(np.mean(by_seed)) for strategy, by_seed in gains.items()}
    best = max(mean_gains, key=lambda strategy: mean_gains[strategy])
    gain = estimate(gains[best])
    result: Json = {"best_growth": best, "best_growth_gains": gain, "by_strategy": by_strategy}
    if judged(gain, BETTER) == NOT_SUPPORTED:
        reason = (
            f"growing by {best}, the best way, gains {100 * mean_gains[best]:.2f} points of PPL₀/PPL over growing nothing, "
            f"less than the {100 * BETTER:g} that a strategy has to be ahead of random by"
        )
        return {"verdict": UNTESTABLE, "reason": reason, **result}
    return {"verdict": of_any(one["verdict"] for one in by_strategy.values()), **result}


def growing(strategy: str) -> Arm:
    return Arm(CYCLE.prune, CYCLE.prune_by, CYCLE.grow, strategy)


def faster_heads_help(found: Results) -> Json:
    by_multiplier = {}
    slow = found.by_arm[multiplied(1.0).name]
    for factor in MULTIPLIERS[1:]:
        fast = found.by_arm[multiplied(factor).name]
        pairs = [(slow[seed]["curve"], fast[seed]["curve"]) for seed in sorted(slow.keys() & fast.keys())]
        saved = estimate([updates_saved(one, other) for one, other in pairs])
        by_multiplier[f"{factor:g}"] = {"updates_saved": saved, "verdict": judged(saved, SAVED)}
    return {"verdict": by_multiplier["5"]["verdict"], "by_multiplier": by_multiplier}


def multiplied(factor: float) -> Arm:
    return Arm(CYCLE.prune, CYCLE.prune_by, CYCLE.grow, CYCLE.grow_by, factor)


def updates_saved(slow: Sequence[Sequence[float]], fast: Sequence[Sequence[float]]) -> float:
    """The share of updates that the second curve needs less than the first to come nine tenths of the way down. Both begin at
    one loss. 0 where the loss does not fall."""
    start, end = slow[0][1], max(slow[-1][1], fast[-1][1])
    if end >= start:
        return 0.0
    wanted = start + THRESHOLD * (end - start)
    return 1 - reached(fast, wanted) / reached(slow, wanted)


def reached(curve: Sequence[Sequence[float]], wanted: float) -> float:
    """The update at which a falling curve comes to this loss, between evaluations by a straight line."""
    for (step, nats), (next_step, next_nats) in pairwise(curve):
        if next_nats <= wanted:
            return step + (next_step - step) * (nats - wanted) / (nats - next_nats)
    raise ValueError("the curve never comes to this loss")


def larger_models_lose_more(results: Mapping[str, Results]) -> Json:
    families: dict[str, list[str]] = {}
    for name in sorted(results, key=lambda name: results[name].before["parameters"]):
        families.setdefault(results[name].before["architecture"], []).append(name)
    by_pair: dict[str, Json] = {}
    for names in families.values():
        if len(names) > 1:
            small, large = results[names[0]], results[names[-1]]
            shares = [tolerated_shares(found) for found in (small, large)]
            moved = estimate([b - a for a, b in zip(*shares, strict=True)])
            # where the most that was pruned can go in both, the arms cannot say which model could lose more
            full = all(share == PRUNE_RATIOS[-1] for found in shares for share in found)
            gains = [growth_gains(found) for found in (small, large)]
            less = estimate([a - b for a, b in zip(*gains, strict=True)])
            parts = {"prune_more": UNDECIDED if full else judged(moved, MOVED), "regrow_less": judged(less, 0.0)}
            by_pair[f"{names[0]} → {names[-1]}"] = {
                "more_can_go": moved,
                "regrowth_gains_less": less,
                "verdicts": parts,
                "verdict": of_all(parts.values()),
            }
    return {
        "claim": "larger models can lose more heads (40–50 % against 20–30 %) and need less regrowth",
        "verdict": of_all(one["verdict"] for one in by_pair.values()),
        "by_pair": by_pair,
        "by_model": {
            name: {
                "share_that_can_go": estimate(tolerated_shares(found)),
                "gain_by_regrowing_twice_as_much": estimate(growth_gains(found)),
            }
            for name, found in results.items()
        },
    }


def cell(gone: float, new: float) -> Arm:
    return Arm(gone, CYCLE.prune_by, new, CYCLE.grow_by)


def tolerated_shares(found: Results) -> list[float]:
    """For each seed, how many heads can go, by gradient and with none grown, before perplexity passes what is tolerated:
    between the shares that were pruned by a straight line from none on, at most the largest."""
    by_prune = [found.each(Arm(gone, CYCLE.prune_by), loss, CONTROL) for gone in PRUNE_RATIOS]
    limit, shares = math.log1p(TOLERATED), []
    for rises in zip(*by_prune, strict=True):
        points = [(0.0, 0.0), *zip(PRUNE_RATIOS, rises, strict=True)]
        share = PRUNE_RATIOS[-1]
        for (x, y), (next_x, next_y) in pairwise(points):
            if next_y > limit:
                share = x + (next_x - x) * (limit - y) / (next_y - y)
                break
        shares.append(share)
    return shares


def growth_gains(found: Results) -> list[float]:
    """For each seed, by how much the loss falls if twice as many heads grow, over all shares that were pruned."""
    least, most = GRID_GROW[0], GRID_GROW[-1]
    gains = [found.each(cell(gone, least), loss, cell(gone, most)) for gone in GRID_PRUNE]
    return np.mean(gains, axis=0).tolist()


def smaller_is_as_good(found: Results) -> Json:
    cycle = rise_of(found.each(CYCLE, loss, CONTROL))
    by_verdict: dict[str, list[tuple[float, str]]] = {SUPPORTED: [], NOT_SUPPORTED: [], UNDECIDED: []}
    for name, by_seed in found.by_arm.items():
        said = opposite(judged(rise_of(_rises(found, name)), TOLERATED))
        by_verdict[said].append((fewer(found, next(iter(by_seed.values())))["parameters"], name))
    most, best = max(by_verdict[SUPPORTED], default=(0.0, None))
    perhaps = max(by_verdict[UNDECIDED], default=(0.0, None))[0]
    return {
        "verdict": SUPPORTED if most >= FEWER else UNDECIDED if perhaps >= FEWER else NOT_SUPPORTED,
        "most_parameters_lost_as_good": most,
        "by_arm": best,
        "cycle": {
            "rise": cycle,
            "fewer": fewer(found, found.one(CYCLE)),
            "verdict_of_heads": opposite(judged(cycle, TOLERATED)),
        },
    }


def _rises(found: Results, name: str) -> list[float]:
    mine, control = found.by_arm[name], found.by_arm[CONTROL.name]
    return [mine[seed]["loss"] - control[seed]["loss"] for seed in sorted(mine.keys() & control.keys())]


def fewer(found: Results, arm: Json) -> Json:
    """What an arm lost: shares of heads, of attention's parameters, of all parameters."""
    return {what: 1 - arm[what] / found.before[what] for what in ("heads", "attention_parameters", "parameters")}


# Tables ---------------------------------------------------------------------------------------------------------------


def tables(found: Results) -> Json:
    return {
        "pruning": [_row(found, Arm(ratio, method)) for method in PRUNE_BY for ratio in PRUNE_RATIOS],
        "growth": [_row(found, growing(strategy)) for strategy in GROW_BY] + [_row(found, Arm(CYCLE.prune, CYCLE.prune_by))],
        "multipliers": [_row(found, multiplied(factor)) | {"curves": _curves(found, factor)} for factor in MULTIPLIERS],
        "ratios": [_row(found, cell(gone, new)) for gone in GRID_PRUNE for new in GRID_GROW],
        "control": _row(found, CONTROL),
    }


def _curves(found: Results, factor: float) -> list[Any]:
    return [one["curve"] for _, one in sorted(found.by_arm[multiplied(factor).name].items())]


def _row(found: Results, arm: Arm) -> Json:
    one, start = found.one(arm), found.before["loss"]

    def recovery(result: Json) -> float:
        cost = result["loss_pruned"] - start
        return (result["loss_pruned"] - result["loss"]) / cost if cost > 0 else 0.0

    return {
        "arm": arm.name,
        **{key: one[key] for key in ("prune", "prune_by", "grow", "grow_by", "multiplier", "updates", "heads", "parameters")},
        "fewer": fewer(found, one),
        "perplexity_pruned": perplexity_of(found.each(arm, lambda result: result["loss_pruned"])),
        "perplexity": perplexity_of(found.each(arm, loss)),
        "rise_over_control": rise_of(found.each(arm, loss, CONTROL)),
        "performance": estimate(found.each(arm, lambda result: math.exp(start - result["loss"]))),
        "recovery": estimate(found.each(arm, recovery)),
    }
