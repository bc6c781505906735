"""The page of results/hybrids says what its measured files say, and its verdicts follow its rules."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pnn.config import load_config
from pnn.models.sections import build_model, model_config
from pnn.runs import BY_SEQUENCE
from pnn.schedule import order

FOLDER = Path(__file__).parents[1] / "results" / "hybrids"
TEXT = ["model.vocab_size=1024", "model.positions=rotary", "model.tie_word_embeddings=true"]  # as run.sh sets them there


@pytest.fixture
def collect(monkeypatch):
    yield from module_in(FOLDER, monkeypatch)


MODULES = ("collect", "wide", "comparison", "keep")


def module_in(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("collect")
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The script in a copy that it may write, with the comparison whose runs it shares."""
    for name in ("hybrids", "better_than_bert"):
        shutil.copytree(FOLDER.parent / name, tmp_path / name)
    shutil.rmtree(tmp_path / "hybrids" / "measured")
    yield from module_in(tmp_path / "hybrids", monkeypatch)


def test_every_arm_is_a_model_with_the_steps_that_the_page_gives():
    steps = {path.stem: model_config(load_config(str(path)).model) for path in (FOLDER / "configs").glob("*.yaml")}
    steps = {name: config.num_steps for name, config in steps.items() if name != "recipe"}
    others = {name: 4 for name in steps if name.startswith("four_once")} | {"both_ends_long": 12}
    assert steps == dict.fromkeys(steps, 8) | others


def test_arms_with_one_attention_have_the_parameters_of_the_loop():
    def parameters(name):
        with torch.device("meta"):
            model = build_model(model_config(load_config(str(FOLDER / "configs" / f"{name}.yaml"), TEXT).model))
        return sum(p.numel() for p in model.parameters())

    for name in ("looped_one_attention", "eight_one_attention", "four_once_one_attention"):
        assert parameters(name) == pytest.approx(parameters("looped"), rel=0.003)


def test_at_width_768_every_arm_is_pnn_rewrite_with_another_schedule():
    small = {path.stem: model_config(load_config(str(path)).model) for path in (FOLDER / "configs").glob("*.yaml")}
    looped = load_config(str(FOLDER.parent / "better_than_bert" / "configs" / "pnn_rewrite.yaml")).to_dict()
    assert model_config(looped["model"]).schedule == order([0, 1, 2, 3], [0, 4], 8) == steps_of(small["looped"])
    files = list((FOLDER / "wide").glob("*.yaml"))
    assert len(files) == 7
    for path in files:
        arm = load_config(str(path)).to_dict()
        config = model_config(arm["model"])
        assert steps_of(config) == steps_of(small[path.stem])
        weighed = {step + 1: weight for step, weight in enumerate(config.step_weights) if weight}
        assert weighed == {config.num_steps // 2: 0.3, config.num_steps: 0.7}
        own = ("schedule", "repeat", "num_steps", "step_weights")
        assert {key: value for key, value in arm["model"].items() if key not in own} == {
            key: value for key, value in looped["model"].items() if key not in own
        }
        assert all(arm[section] == looped[section] for section in ("data", "training", "evaluation"))


def steps_of(config):
    return order(config.schedule, config.repeat, config.num_steps)


def test_at_width_768_runs_come_in_one_after_another(copied, tmp_path, monkeypatch):
    """Planted from PNN-rewrite's own run: `both_ends` gets one more token right in every fourth sequence, `eight` one less."""
    source, runs = tmp_path / "better_than_bert" / "measured", tmp_path / "runs"
    text, page = "wikitext_tokens", tmp_path / "hybrids" / "README.md"
    totals = json.loads((source / "by_sequence.json").read_text())
    own = totals["correct"]["a/pnn_rewrite/seed-0"]
    targets = totals["targets"]

    def put(folder, shift, seed, tail):
        folder.mkdir(parents=True)
        correct = [max(0, one + shift * (at % 4 == seed)) for at, one in enumerate(own)]
        for name in ("config.yaml", "environment.json", "metrics.jsonl", "tokens.json"):
            shutil.copy(source / "a" / "pnn_rewrite" / "seed-0" / name, folder)
        found = json.loads((source / "a" / "pnn_rewrite" / "seed-0" / "evaluation.json").read_text())
        found["sets"][text]["accuracy"] = sum(correct) / sum(targets)
        (folder / "evaluation.json").write_text(json.dumps(found | {"accuracy": tail}))
        (folder / BY_SEQUENCE).write_text(json.dumps({text: {"correct": correct, "targets": targets}}))
        return correct

    def collect_again():
        monkeypatch.setattr(sys, "argv", ["collect.py", "wikipedia", str(runs)])
        copied.main()
        return json.loads((tmp_path / "hybrids" / "result.json").read_text())

    for seed in (1, 2):  # which the comparison lacks so far
        folder = source / "a" / "pnn_rewrite" / f"seed-{seed}"
        totals["correct"][f"a/pnn_rewrite/seed-{seed}"] = put(folder, 0, seed, 0.5)
    (source / "by_sequence.json").write_text(json.dumps(totals))

    put(runs / "looks" / "both_ends" / "seed-0", 1, 0, 0.47)
    result = collect_again()
    assert result["answer"] == {"wikipedia": "Not known yet: no arm beside `looped` has its seeds."}
    assert "| `both_ends` | 0 1 2 3 0 1 2 3 | 50.8M | 47.0 % |" in page.read_text()  # the schedule is its config's
    assert set(result["metrics"]["wikipedia"]["tail_after_one_epoch"]) == {"looped", "both_ends"}
    for arm, shift in (("both_ends", 1), ("eight", -1)):
        for seed in range(3):
            put(runs / "a" / arm / f"seed-{seed}", shift, seed, 0.5)
    result = collect_again()
    said = {tuple(pair["arms"]): pair for pair in result["metrics"]["wikipedia"]["pairs"]}
    assert said["both_ends", "looped"]["verdict"] == "better"
    assert said["eight", "looped"]["verdict"] == "worse"
    gained = sum(1 for at in range(len(own)) if at % 4 < 3) / 3 / sum(targets)
    assert said["both_ends", "looped"]["over_seeds"]["value"] == pytest.approx(gained, rel=0.05)
    assert result["answer"]["wikipedia"].startswith("better than `looped`: `both_ends`.")
    assert (tmp_path / "hybrids" / "figures" / "wikipedia.png").exists()
    shutil.rmtree(runs)
    monkeypatch.setattr(sys, "argv", ["collect.py"])
    copied.main()  # all that it needs is kept
    assert json.loads((tmp_path / "hybrids" / "result.json").read_text()) == result


def test_the_page_says_what_was_measured(collect):
    readme, result = (FOLDER / "README.md").read_text(), json.loads((FOLDER / "result.json").read_text())
    assert set(result["answer"]) == {path.stem for path in (FOLDER / "measured").glob("*.json")} >= {"small"}
    for path in (FOLDER / "measured").glob("*.json"):
        measured = json.loads(path.read_text())
        assert collect.table(measured) in readme
        assert result["answer"][path.stem] == collect.answer(measured)


def test_places_of_a_machine_are_left_out(collect):
    assert collect.without_folder("data.train=/home/me/part-04.txt.xz") == "data.train=part-04.txt.xz"
    assert collect.without_folder("training.learning_rate=2e-2") == "training.learning_rate=2e-2"


def pairs(verdicts):
    return {"pairs": [{"arms": list(arms), "verdict": verdict} for arms, verdict in verdicts.items()]}


def test_both_ends_have_to_be_better_than_all_three(collect):
    said = {("both_ends", other): "better" for other in ("looped", "entering", "leaving")}
    assert collect.answer(pairs(said)) == "better than `looped`: `both_ends`. Distinct weights belong at the ends: supported."
    for other in ("looped", "entering", "leaving"):
        assert "ends: undecided" in collect.answer(pairs({**said, ("both_ends", other): "undecided"}))
        assert "ends: not supported" in collect.answer(pairs({**said, ("both_ends", other): "worse"}))
        without = {pair: verdict for pair, verdict in said.items() if pair[1] != other}
        assert "ends: not asked" in collect.answer(pairs(without))
    assert collect.answer(pairs({("eight", "looped"): "worse"})).startswith("no arm is better than `looped`.")


@pytest.mark.parametrize(
    ("wide", "many", "verdict"),
    [
        ("undecided", "better", "supported"),
        ("worse", "better", "supported"),
        ("worse", "worse", "not supported"),
        ("worse", "undecided", "undecided"),
    ],
)
def test_attention_can_be_shared_if_either_arm_is_better(collect, wide, many, verdict):
    said = {("looped_one_attention", "looped"): wide, ("eight_one_attention", "looped"): many}
    assert collect.answer(pairs(said)).endswith(f"Attention can be shared: {verdict}.")


def test_more_right_is_better(collect, tmp_path):
    draw = np.random.default_rng(0)
    runs = {}
    for name, share in (("one", 0.9), ("other", 0.5)):
        for seed in range(3):
            run = tmp_path / name / f"seed-{seed}"
            run.mkdir(parents=True)
            totals = {"targets": [20] * 200, "correct": draw.binomial(20, share, 200).tolist()}
            (run / BY_SEQUENCE).write_text(json.dumps({"validation": totals}))
            runs.setdefault(name, []).append(run)
    ahead, behind = collect.above("one", "other", runs), collect.above("other", "one", runs)
    assert (ahead["verdict"], behind["verdict"], ahead["seeds"]) == ("better", "worse", 3)
    assert ahead["over_seeds"]["value"] == pytest.approx(0.4, abs=0.02)
    assert collect.above("one", "other", {**runs, "other": runs["one"]})["verdict"] == "undecided"
