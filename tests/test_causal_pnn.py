"""The arms of results/causal_pnn have the parameters and FLOPs that its README says, and its collecting tells who is better."""

from __future__ import annotations

import importlib
import json
import lzma
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from pnn.data import synthetic
from pnn.differences import both_say
from pnn.models.flops import inference_flops, passed_in_blocks, training_flops
from pnn.models.sections import build_model, model_config
from pnn.runs import BY_SEQUENCE, read_config
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


ENVIRONMENT = {
    "git": {"commit": "0"},
    "hardware": {"cpu": "x86_64", "threads": 1, "gpus": []},
    "versions": {"torch": "2", "transformers": "5"},
}


def plant(run, loss, rate=1e-3, windows=None):
    """What a finished run leaves."""
    run.mkdir(parents=True)
    training = {"learning_rate": rate, "min_learning_rate": rate / 10}
    data = {"train": "/home/me/text/*.txt.xz", "tokenizer": "/home/me/gpt2/tokenizer.json"}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"type": "ddl"}, "data": data, "training": training}))
    (run / "evaluation.json").write_text(json.dumps({"loss": loss, "parameters": 100, "source": "/home/me/text/*.txt.xz"}))
    (run / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (run / "metrics.jsonl").write_text('{"step": 10, "tokens_per_second": 5.0}\n')
    windows = np.full(40, 63 * loss) if windows is None else windows
    (run / BY_SEQUENCE).write_text(json.dumps({"validation": {"targets": [63] * 40, "loss": windows.tolist()}}))


def test_a_familys_rate_is_the_one_with_the_lowest_loss(scripts, tmp_path):
    """From the folders of a sweep; a run that diverged has no evaluation."""
    arms, _ = scripts
    losses = {"additive": (3.0, 2.0, 2.5), "delta": (1.0, 2.0, 3.0), "pnn": (3.0, 2.0, 1.0)}
    for family, found in losses.items():
        for rate, loss in zip(arms.SIZES["mini"].rates, found, strict=True):
            plant(tmp_path / f"{family}_once-learning_rate={rate:g}" / "seed-0", loss, rate)
    (tmp_path / "pnn_once-learning_rate=1" / "seed-0").mkdir(parents=True)
    assert arms.best_rates(tmp_path) == {"additive": 2e-3, "delta": 1e-3, "pnn": 4e-3}
    assert arms.config_of("pnn_once", arms.SIZES["toy"], 4e-3)["training"]["learning_rate"] == 4e-3


def test_runs_of_size_mini_come_one_after_another(scripts, tmp_path, monkeypatch):
    arms, collect = scripts
    runs = tmp_path / "runs"
    monkeypatch.setattr(sys, "argv", ["collect.py", "mini", str(runs)])
    for family in arms.FAMILIES:
        plant(runs / "rates" / f"{family}_once-learning_rate=0.002" / "seed-0", 4.0, 2e-3)
    with pytest.raises(collect.UserError, match="no finished run"):
        collect.main()
    assert len(list(collect.MEASURED.rglob("evaluation.json"))) == 3  # kept all the same
    for seed in range(3):
        plant(runs / "main" / "additive_once" / f"seed-{seed}", 4.0 + seed / 100, 2e-3)
    plant(runs / "main" / "delta_once" / "seed-0", 3.9, 2e-3)
    collect.main()
    shutil.rmtree(runs)  # another half an hour: what was kept counts as before
    for seed in (1, 2):
        plant(runs / "main" / "delta_once" / f"seed-{seed}", 3.9 + seed / 100, 2e-3)
    plant(runs / "main" / "pnn_once" / "seed-1", 4.01, 2e-3)
    collect.main()
    result = json.loads((collect.HERE / "result_mini.json").read_text())
    said = {tuple(pair["arms"]): pair for pairs in result["differences"].values() for pair in pairs}
    assert said["delta_once", "additive_once"]["verdict"] == "better"
    assert said["delta_once", "additive_once"]["over_seeds"]["value"] == pytest.approx(-0.1)
    assert said["pnn_once", "additive_once"]["verdict"] == "too few seeds"
    assert len(said) == 2
    assert "`pnn_once` has 1 of 3 seeds" in result["departures"]
    assert "`additive_deep` has 0 of 3 seeds" in result["departures"]
    assert not any("additive_once" in one for one in result["departures"])
    kept = "".join(path.read_text() for path in collect.MEASURED.rglob("*") if path.is_file())
    assert "/home/me" not in kept


@pytest.mark.slow
def test_one_run_leaves_what_is_collected(tmp_path):
    """With the text in place of 486 MB, a tokenizer of its own and a small model."""
    (tmp_path / "text").mkdir()
    text = "\n\n".join(synthetic.paragraphs(300, seed=0))
    (tmp_path / "text" / "part-00.txt.xz").write_bytes(lzma.compress(text.encode()))
    small = {"model.hidden_size": 16, "model.num_attention_heads": 2, "model.num_hidden_layers": 1, "model.vocab_size": 256}
    small |= {"data.max_length": 32, "data.validation_sequences": 4, "data.tokenizer": "corpus", "data.vocab_size": 256}
    small |= {"training.max_steps": 2, "training.batch_size": 4, "training.effective_batch_size": 4}
    small |= {"training.evaluate_every": 2, "training.precision": "fp32"}
    sets = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    command = ["bash", str(FOLDER / "one.sh"), "rates", "delta_once", "2e-3", "0", str(tmp_path), str(tmp_path / "runs"), *sets]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    run = tmp_path / "runs" / "rates" / "delta_once-learning_rate=2e-3" / "seed-0"
    assert read_config(run).training.min_learning_rate == pytest.approx(2e-4)
    assert (run / BY_SEQUENCE).exists()


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
