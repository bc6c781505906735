"""The study of growth judges where heads grow only where growing all of them helps, and from intervals."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pnn.figures.shrink import grown_arms
from pnn.studies.plasticity.arms import growth_control

SCRIPT = Path(__file__).parents[1] / "results" / "shrink" / "growth" / "collect.py"


@pytest.fixture(scope="module")
def collect():
    spec = importlib.util.spec_from_file_location("collect_growth", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planted(ends: dict[str, float]) -> list[dict]:
    """Three seeds that differ by more than the arms do: only paired by seed can these be told apart."""
    shared = {"loss_pruned": 3.0, "loss_grown": 3.0, "heads": 7}
    return [
        {"label": label, "seed": seed, "loss": end + seed + 0.001 * ((seed + at) % 3), **shared}
        for at, (label, end) in enumerate(ends.items())
        for seed in range(3)
    ]


def test_places_are_judged_where_growing_helps(collect):
    ends = dict.fromkeys(growth_control(), 2.0) | {"retrained": 1.0, "all revived": 1.1, "random, revive": 1.8}
    found = collect.collected(planted(ends | {"gradient, revive": 1.6, "importance, revive": 1.9}))
    zero, revive = found["starts"]["zero"], found["starts"]["revive"]
    assert zero["control"]["verdict"] == "undecided"
    assert revive["control"]["verdict"] == "supported"
    assert revive["control"]["gain"]["value"] == pytest.approx(0.9, abs=0.002)
    assert {name: one["verdict"] for name, one in revive["guided"].items()} == {
        "gradient": "supported",
        "importance": "not supported",
    }
    assert "cannot be asked here" in collect.places(found).splitlines()[2]
    said = collect.answer(found)
    assert "start at zero cannot be shown to help" in said
    assert "places by gradient better than at random: supported (+0.2" in said
    assert "| gradient, revive | 7 | 3.000 | 3.000 | 2.601 | +0.4" in collect.losses(found)
    (axes,) = grown_arms(found).axes
    assert len(axes.containers) == len(growth_control()) - 2  # all but the two that grow nothing


def test_the_arms_share_everything_but_growth():
    arms = growth_control(0.5, 0.25, multiplier=4.0)
    assert arms["retrained"].prune == 0
    grown = {label: arm for label, arm in arms.items() if arm.grow}
    assert {arm.prune for arm in grown.values()} == {0.5}
    assert {(arm.multiplier, arm.whole_layers) for arm in grown.values()} == {(4.0, True)}
    assert {label for label, arm in grown.items() if arm.grow == 0.5} == {"all grow from zero", "all revived"}
    assert {arm.init for label, arm in grown.items() if "reviv" in label} == {"revive"}
