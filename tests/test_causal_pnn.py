"""The arms of results/causal_pnn have the parameters and FLOPs that its README says, and its collecting tells who is better."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pnn.differences import both_say
from pnn.models.flops import inference_flops, passed_in_blocks, training_flops
from pnn.models.sections import build_model, model_config
from pnn.runs import BY_SEQUENCE
from pnn.stats import Estimate

FOLDER = Path(__file__).parents[1] / "results" / "causal_pnn"


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """In a copy that they may write."""
    copied = shutil.copytree(FOLDER, tmp_path / "results")
    monkeypatch.syspath_prepend(str(copied))
    for name in ("arms", "collect"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("arms"), importlib.import_module("collect")
    for name in ("arms", "collect"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("size", ["mini", "text", "toy"])
def test_arms_are_equal_where_they_are_said_to_be(scripts, size):
    arms, _ = scripts
    parameters, training, blocks = {}, {}, {}
    for name, arm in arms.ARMS.items():
        config = model_config(arms.model_of(arm, arms.SIZES[size]))
        with torch.device("meta"):
            parameters[name] = sum(p.numel() for p in build_model(config).parameters())
        training[name] = training_flops(config, 512, 1023 / 1024)
        steps = getattr(config, "num_steps", None) or config.depth
        blocks[name] = passed_in_blocks(config, steps, 1.0)
        assert inference_flops(config, 512, 1.0) < training[name] / 2.9

    def near(values, one, other):
        return values[one] == pytest.approx(values[other], rel=0.02)

    for family in arms.FAMILIES:
        assert near(training, f"{family}_once", "additive_once")
        assert near(training, f"{family}_half_twice", "additive_once")
        assert near(training, f"{family}_twice", "additive_deep")
        assert parameters[f"{family}_half_twice"] < parameters[f"{family}_once"] == parameters[f"{family}_twice"]
        assert blocks[f"{family}_twice"] == pytest.approx(2 * blocks[f"{family}_once"])
        if size == "mini":  # at toy size biases are some per cent
            assert near(parameters, f"{family}_once", "additive_once")
    assert parameters["additive_deep"] > 1.3 * parameters["additive_once"]
    asked = {one for pairs in arms.PAIRS.values() for pair in pairs for one in pair}
    assert asked == set(arms.ARMS)


def test_a_familys_rate_is_the_one_with_the_lowest_loss(scripts, tmp_path):
    arms, _ = scripts
    losses = {"additive": (3.0, 2.0, 2.5), "delta": (1.0, 2.0, 3.0), "pnn": (3.0, 2.0, 1.0)}
    rows = [
        {"name": f"{family}_once learning_rate={rate}", "seeds": [0], "texts": {"validation": {"value": loss}}}
        for family, found in losses.items()
        for rate, loss in zip(arms.SIZES["mini"].rates, found, strict=True)
    ]
    rows.append({"name": "pnn_once learning_rate=1", "seeds": []})  # it diverged
    (tmp_path / "sweep.json").write_text(json.dumps({"arms": rows}))
    assert arms.best_rates(tmp_path / "sweep.json") == {"additive": 2e-3, "delta": 1e-3, "pnn": 4e-3}
    assert arms.config_of("pnn_once", arms.SIZES["toy"], 4e-3)["training"]["learning_rate"] == 4e-3


def test_a_difference_is_paired_and_needs_both_intervals(scripts, tmp_path):
    _, collect = scripts
    generator = np.random.default_rng(0)
    windows = generator.uniform(50, 70, 40)  # of one text: hard and easy ones
    for arm, gain in (("one", 0.9), ("other", 1.0)):
        for seed in range(3):
            run = tmp_path / "main" / arm / f"seed-{seed}"
            run.mkdir(parents=True)
            totals = {"targets": [63] * 40, "loss": (windows * (gain + 0.001 * seed)).tolist()}
            (run / BY_SEQUENCE).write_text(json.dumps({"validation": totals}))
            (run / "evaluation.json").write_text("{}")
            (run / "environment.json").write_text('{"git": {"commit": "0"}}')
    found = collect.difference("one", "other", tmp_path)
    expected = -0.1 * windows.sum() / (63 * 40)
    assert found["over_seeds_and_windows"]["value"] == pytest.approx(expected)
    assert (found["seeds"], found["verdict"]) == (3, "better")
    assert collect.difference("other", "one", tmp_path)["verdict"] == "worse"
    assert both_say(Estimate(-0.1, -0.2, -0.05), Estimate(-0.1, -0.4, 0.2), seeds=3) == "undecided"
    assert both_say(Estimate(-0.1, -0.2, -0.05), Estimate(-0.1, -0.2, -0.05), seeds=3) == "better"
    assert both_say(Estimate(-0.1, -0.2, -0.05), Estimate(-0.1, -0.2, -0.05), seeds=2) == "too few seeds"
