"""results/shrink: the arms learn alike, what is measured is not measured again, and the verdict follows from the losses."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from pnn.data import synthetic
from pnn.data.tokenizers import of_synthetic_language
from pnn.plasticity import save

FOLDER = Path(__file__).parents[1] / "results" / "shrink"
MODULES = ("run", "collect", "recipes")
LENGTH = 16
FEW = ["--updates", "2", "--adapt", "1", "--batch", "2", "--length", str(LENGTH), "--held-out", "6", "--seeds", "0"]


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """In a copy that they may write."""
    copied = tmp_path / "results" / "shrink"
    copied.mkdir(parents=True)
    for name in ("run.py", "collect.py", "README.md"):
        shutil.copy(FOLDER / name, copied)
    (copied / "peers").mkdir()
    shutil.copy(FOLDER / "peers" / "recipes.py", copied / "peers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(copied))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("run"), importlib.import_module("collect")
    for name in MODULES:
        sys.modules.pop(name, None)


def test_from_a_model_to_a_table(scripts, tmp_path, monkeypatch):
    run, collect = scripts
    tokenizer = of_synthetic_language(LENGTH)
    torch.manual_seed(0)
    sizes = {"hidden_size": 20, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 5}
    config = hf.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=LENGTH, **sizes)
    config.bos_token_id = config.eos_token_id = tokenizer.sep_token_id
    save(hf.LlamaForCausalLM(config), tmp_path / "model", tokenizer)
    Path("text.txt").write_text("\n\n".join(synthetic.paragraphs(30, seed=0)))

    def study(*words):
        monkeypatch.setattr(sys, "argv", ["run.py", "model", "text.txt", "runs", *words, *FEW])
        run.main()

    monkeypatch.setattr(sys, "argv", ["run.py", "model", "text.txt", "runs", *FEW[:-1]])
    run.main()  # no seeds: the adapted model alone
    assert {path.stem for path in Path("runs/measured").glob("*.json")} == {"whole", "adapted", "environment"}
    study("--shares")
    study("--shares", "0.2")
    study("--shares", "0.2", "--teachers", "none")
    found = {path.stem: json.loads(path.read_text()) for path in Path("runs/measured").glob("*.json")}
    assert set(found) == {"whole", "adapted", "control-0", "less-20-logits-0", "less-20-none-0", "environment"}
    assert found["control-0"]["parameters"] == found["whole"]["parameters"] > found["less-20-none-0"]["parameters"]
    assert found["whole"]["nats"] != found["adapted"]["nats"] != found["control-0"]["nats"]
    assert found["less-20-logits-0"]["nats"] != found["less-20-none-0"]["nats"]
    assert found["less-20-logits-0"]["summary"]["before"]["perplexity"] == pytest.approx(perplexity(found["adapted"]), rel=1e-4)
    before = Path("runs/measured/less-20-logits-0.json").stat().st_mtime_ns
    study("--shares", "0.2")
    assert Path("runs/measured/less-20-logits-0.json").stat().st_mtime_ns == before
    study("--shares", "0.2", "--look", "1", "1e-2", "muon", "2")  # beside it, and not compared
    look = json.loads(Path("runs/measured/less-20-logits-0-look-1-1e-2-muon-2.json").read_text())
    assert (look["batch"], look["rate"], look["optimizer"], look["rounds"], look["arm"]) == (1, 0.01, "muon", 2, "look")
    study("--shares", "0.2", "--peers", "llm_pruner")
    peer = json.loads(Path("runs/measured/less-20-llm_pruner-0.json").read_text())
    assert peer["parameters"] == pytest.approx(found["less-20-logits-0"]["parameters"], rel=0.02)
    assert peer["summary"]["before"]["perplexity"] == pytest.approx(perplexity(found["adapted"]), rel=1e-4)
    assert perplexity(peer) == pytest.approx(peer["summary"]["after"]["perplexity"], rel=1e-4)
    assert peer["summary"]["after"]["perplexity"] != peer["summary"]["pruned"]["perplexity"]  # it learnt

    shutil.copytree("runs/measured", collect.HERE / "measured" / "tiny")
    collect.main()
    result = json.loads((collect.HERE / "result.json").read_text())
    row = result["metrics"]["tiny"]["20"]
    gap = perplexity(found["less-20-logits-0"]) / perplexity(found["control-0"]) - 1
    assert row["perplexity_above_control"]["mean"] == pytest.approx(gap, rel=1e-4)
    assert result["verdicts"] == {"tiny": row["within_5_per_cent"]}
    page = (collect.HERE / "README.md").read_text()
    assert "| tiny | 20 | 1 |" in page
    assert "| tiny | 20, LLM-Pruner's recipe | 1 |" in page
    ahead = result["metrics"]["tiny"]["ahead"]["20"]["LLM-Pruner's recipe"]
    gap = math.log(perplexity(peer) / perplexity(found["less-20-logits-0"]))
    assert ahead["nats"]["value"] == pytest.approx(gap, abs=1e-4)
    assert (ahead["seeds"], ahead["verdict"]) == ([0], "too few seeds")


def perplexity(arm: dict) -> float:
    return math.exp(sum(arm["nats"]) / sum(arm["targets"]))


def test_rows_that_end_earlier_are_compared_by_their_means(scripts):
    _, collect = scripts
    control = {"seed": 0, "nats": [20.0, 30.0, 22.0], "targets": [10, 10, 10]}
    shorter = {"seed": 0, "nats": [21.0, 27.0, 24.0], "targets": [10, 8, 9]}
    found = collect.above([shorter], [control])
    assert found.value == pytest.approx(perplexity(shorter) / perplexity(control) - 1)
    assert found.low < found.value < found.high


@pytest.mark.parametrize(("gap", "says"), [(0.1, "supported"), (0.0, "undecided"), (-0.1, "not supported")])
def test_ahead_of_a_peer_means_that_the_whole_interval_is_above_zero(scripts, gap, says):
    """Planted, with tokens that went: ours has shorter rows."""
    _, collect = scripts
    rng = np.random.default_rng(0)
    base, targets = 300 + 10 * rng.normal(size=40), [100] * 40
    ours, peers = [], []
    for seed in range(3):
        ours.append({"seed": seed, "nats": list(base * 0.9), "targets": [90] * 40})
        peers.append({"seed": seed, "nats": list(base + 100 * gap + rng.normal(size=40)), "targets": targets})
    peers.append({"seed": 7, "nats": [0.0] * 40, "targets": targets})  # which ours does not have
    found = collect.ahead(ours, peers, targets)
    assert found["verdict"] == says
    assert found["nats"]["value"] == pytest.approx(gap, abs=0.005)
    assert found["seeds"] == [0, 1, 2]
    assert collect.ahead(ours[:2], peers, targets)["verdict"] == "too few seeds"
    assert collect.ahead(ours, peers[3:], targets) == {"seeds": []}


@pytest.mark.parametrize(("gap", "says"), [(0.01, "supported"), (0.05, "undecided"), (0.09, "not supported")])
def test_as_good_means_that_the_whole_interval_is_within_five_per_cent(scripts, gap, says):
    _, collect = scripts
    rng = np.random.default_rng(0)
    targets = [100] * 40
    shared = {"targets": targets, "parameters": 10, "updates": 1, "adapt": 1, "rate": 1, "batch": 1, "length": 2}
    shared["vocabulary_flops_per_token"] = 50.0
    base = 300 + 10 * rng.normal(size=40)
    speeds = {"tokens_per_second": {"before": 100.0, "after": 110.0}}
    summary = {
        "fewer_parameters": 0.2,
        "pruned": {"perplexity": 9.0},
        "before": {"flops_per_token": 125.0, "parameters": 10},
        "after": {"flops_per_token": 100.0, "parameters": 8},
        "reading": speeds,
        "writing": speeds,
    }
    arms = [{"arm": name, "nats": list(base), **shared} for name in ("whole", "adapted")]
    for seed in range(3):
        arms.append({"arm": "control", "seed": seed, "nats": list(base), **shared})
        nats = base + 100 * math.log1p(gap) + rng.normal(size=40)
        arms.append(
            {"arm": "less", "share": 0.2, "teacher": "logits", "seed": seed, "nats": list(nats), "summary": summary, **shared}
        )
    found = collect.collected(arms)["20"]
    assert found["perplexity_above_control"]["mean"] == pytest.approx(gap, abs=0.005)
    assert found["within_5_per_cent"] == says
    assert found["seeds"] == [0, 1, 2]
    assert found["speed"]["reading"] == pytest.approx(1.1)
    assert found["speed"]["reading_share_of_bound"] == pytest.approx(1.1 / (100 / 75))
