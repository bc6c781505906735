"""Verdicts from planted arms: each finding turns both ways, and says so when it cannot tell."""

from __future__ import annotations

import math

import pytest
from planted_study import before, harm, planted

from pnn.stats import student
from pnn.studies.plasticity.arms import CYCLE, all_arms
from pnn.studies.plasticity.findings import findings, of_all, of_any, reached, updates_saved

SMALL, LARGE = before(80_000_000), before(120_000_000)


def verdict(finding, model=SMALL, **how):
    return findings({"one": model}, {"one": planted(model, **how)})["findings"][finding]["verdict"]


def test_arms_are_those_of_the_plan():
    arms = all_arms()
    assert len(arms) == len({arm.name for arm in arms}) == 18 + 5 + 2 + 11 + 1  # shared ones once
    assert sum(arm.prune == 0 for arm in arms) == 1
    assert CYCLE in arms


def test_pruning_is_harmless_or_not():
    assert verdict("F0", harm=lambda arm: 0.02 * arm.prune) == "supported"
    assert verdict("F0", harm=lambda arm: arm.prune) == "not supported"
    assert verdict("F0", harm=lambda arm: 0.05 * arm.prune / 0.3, noise=0.05) == "undecided"
    assert verdict("F0", harm=lambda arm: 0.02 * arm.prune, seeds=1) == "undecided"


def test_the_best_measure_is_judged():
    def only_contribution(arm):
        return (0.01 if arm.prune_by == "contribution" else 1.0) * arm.prune

    found = findings({"one": SMALL}, {"one": planted(SMALL, harm=only_contribution)})["findings"]["F0"]
    after = found["by_model"]["one"]["by_ratio"]["0.3"]["after_learning"]
    assert (found["verdict"], after["best"]) == ("supported", "contribution")
    assert after["rise"]["value"] == pytest.approx(math.expm1(0.003), abs=0.002)
    # what stands beside it: right after pruning 2 · 0.3 nats are lost by every measure
    right_after = found["by_model"]["one"]["by_ratio"]["0.3"]["right_after"]
    assert right_after["rise"]["value"] == pytest.approx(math.expm1(0.6))
    assert right_after["verdict"] == "not supported"


@pytest.mark.parametrize("strategy", ["gradient", "entropy_gap"])
def test_guided_growth_helps_or_not(strategy):
    def with_help(arm, nats):
        return harm(arm) - nats * (arm.grow_by == strategy)

    assert verdict("F1", harm=lambda arm: with_help(arm, 0.05)) == "supported"
    assert verdict("F1") == "not supported"
    assert verdict("F1", harm=lambda arm: with_help(arm, -0.05)) == "not supported"
    assert verdict("F1", noise=0.05) == "undecided"


def test_where_growth_gains_next_to_nothing_no_strategy_can_be_ahead():
    def no_gain(arm):
        return 0.5 * arm.prune - 0.0003 * (arm.grow > 0)

    models = {"floor": SMALL, "grows": LARGE}
    arms = {"floor": planted(SMALL, harm=no_gain), "grows": planted(LARGE)}
    floor = findings({"floor": SMALL}, {"floor": arms["floor"]})["findings"]["F1"]
    assert floor["verdict"] == "untestable"
    one = floor["by_model"]["floor"]
    assert one["best_growth_gains"]["interval"][1] < 0.01
    assert f"gains {100 * one['best_growth_gains']['value']:.2f} points" in one["reason"]
    both = findings(models, arms)["findings"]["F1"]
    assert both["verdict"] == "not supported"  # by the model that can be asked
    assert [one["verdict"] for one in both["by_model"].values()] == ["untestable", "not supported"]
    assert "reason" not in both["by_model"]["grows"]


def test_faster_heads_help_or_not():
    assert verdict("F2", speed=lambda arm: 20 - 2 * arm.multiplier) == "supported"
    assert verdict("F2") == "not supported"
    assert verdict("F2", speed=lambda arm: 20 + arm.multiplier) == "not supported"


def test_updates_saved_on_the_way_to_a_loss_that_both_reach():
    slow, fast = [[0, 2.0], [50, 1.5], [100, 1.0]], [[0, 2.0], [50, 1.0], [100, 1.0]]
    assert reached(slow, 1.25) == 75
    assert updates_saved(slow, fast) == pytest.approx(0.5)
    assert updates_saved(fast, slow) == pytest.approx(-1.0)
    worse = [[0, 2.0], [50, 1.9], [100, 1.8]]  # never comes as low: the threshold is what it reaches
    assert updates_saved(slow, worse) == pytest.approx(1 - 90 / 18)
    assert updates_saved([[0, 1.0], [100, 1.2]], fast) == 0.0
    early = [[0, 2.0], [10, 1.5], [100, 1.0]]  # half-way down five times as fast; nine tenths of the way are what counts
    assert updates_saved(slow, early) == pytest.approx(1 - 82 / 90)


def of_two(small_harm, large_harm, small=SMALL, large=LARGE):
    arms = {"small": planted(small, harm=small_harm), "large": planted(large, harm=large_harm)}
    return findings({"small": small, "large": large}, arms)["findings"]["F3"]


def times(factor):
    return lambda arm: factor * harm(arm)


def test_larger_models_lose_more_or_not():
    found = of_two(times(0.4), times(0.15))
    assert found["verdict"] == "supported"
    assert found["by_pair"]["small → large"]["regrowth_gains_less"]["value"] == pytest.approx(0.5 * 0.1 * 0.25, abs=0.002)
    assert of_two(times(0.15), times(0.4))["verdict"] == "not supported"
    assert of_two(times(0.4), times(0.4))["verdict"] == "not supported"
    # prunes more, but the larger one gains more by growing: half of the claim is not enough
    parts = of_two(lambda arm: 0.4 * arm.prune, lambda arm: 0.15 * arm.prune - 0.1 * arm.grow)["by_pair"]["small → large"]
    assert parts["verdicts"] == {"prune_more": "supported", "regrow_less": "not supported"}
    assert parts["verdict"] == "not supported"


def test_the_share_that_can_go_lies_where_the_tolerance_is_passed():
    found = of_two(lambda arm: 0.2 * arm.prune, times(0.4))
    share = found["by_model"]["small"]["share_that_can_go"]["value"]
    assert share == pytest.approx(math.log(1.05) / 0.2, abs=0.01)


def test_a_grid_too_small_or_models_too_different_cannot_tell():
    # both can lose all that was pruned, though the smaller one needs more regrowth
    assert of_two(lambda arm: 0.01 * arm.prune - 0.1 * arm.grow, times(0.01))["verdict"] == "undecided"
    other = before(120_000_000, architecture="llama")
    assert of_two(times(0.4), times(0.15), large=other) | {"by_model": None} == {
        "claim": "larger models can lose more heads (40–50 % against 20–30 %) and need less regrowth",
        "verdict": "undecided",
        "by_pair": {},
        "by_model": None,
    }


def test_smaller_is_as_good_or_not():
    # a fifth of all parameters is attention: half of the heads are a tenth
    assert verdict("F4", harm=lambda arm: 0.0) == "not supported"
    mostly_attention = SMALL | {"attention_parameters": 60_000_000}
    assert verdict("F4", mostly_attention, harm=lambda arm: 0.0) == "supported"
    assert verdict("F4", mostly_attention, harm=lambda arm: 5 * arm.prune) == "not supported"
    assert verdict("F4", mostly_attention, harm=lambda arm: 0.0, seeds=1) == "undecided"
    found = findings({"one": SMALL}, {"one": planted(SMALL, harm=lambda arm: 0.0)})["findings"]["F4"]["by_model"]["one"]
    assert found["cycle"]["verdict_of_heads"] == "supported"
    assert found["cycle"]["fewer"]["heads"] == pytest.approx(14 / 72)  # ⌊0.3 · 72⌋ go, ⌊0.1 · 72⌋ come


def test_seeds_are_paired():
    """A seed's luck is fifty times the difference between arms, and does not hide it."""
    found = findings({"one": SMALL}, {"one": planted(SMALL)})["tables"]["one"]
    row = next(row for row in found["ratios"] if (row["prune"], row["grow"]) == (0.2, 0.1))
    low, high = row["rise_over_control"]["interval"]
    assert math.expm1(0.14) < low < math.expm1(0.15) < high < math.expm1(0.16)
    wide_low, wide_high = row["perplexity"]["interval"]
    assert math.log(wide_high / wide_low) > 0.1
    assert row["recovery"]["value"] == pytest.approx((0.4 + 0.1 - 0.15) / 0.4, abs=0.2)


def test_a_finding_is_about_all_models():
    assert of_all(["supported", "supported"]) == "supported"
    assert of_all(["supported", "undecided"]) == "undecided"
    assert of_all(["supported", "untestable"]) == "supported"
    assert of_all(["untestable", "untestable"]) == "untestable"
    assert of_all(["supported", "undecided", "not supported"]) == "not supported"
    assert of_any(["undecided", "supported"]) == "supported"
    assert of_any(["undecided", "not supported"]) == "undecided"
    assert of_any(["not supported", "not supported"]) == "not supported"


def test_students_interval():
    mean, low, high = student([1.0, 2.0, 3.0])
    assert (mean, low, high) == pytest.approx((2.0, 2 - 4.30265 / math.sqrt(3), 2 + 4.30265 / math.sqrt(3)), abs=1e-5)
    assert math.isnan(student([1.0]).low)
    _, low, high = student([0.0, 1.0] * 10)  # 19 degrees of freedom: 2.0930
    assert (high - low) / 2 == pytest.approx(2.0930 * math.sqrt(5 / 19 / 20), rel=0.005)
