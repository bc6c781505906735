"""The page of results/hybrids says what its measured files say, and its verdicts follow its rules."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from pnn.config import load_config
from pnn.models.sections import model_config
from pnn.runs import BY_SEQUENCE

FOLDER = Path(__file__).parents[1] / "results" / "hybrids"


@pytest.fixture
def collect(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "collect", raising=False)
    yield importlib.import_module("collect")
    sys.modules.pop("collect", None)


def test_every_arm_is_a_model_with_the_steps_that_the_page_gives():
    steps = {path.stem: model_config(load_config(str(path)).model) for path in (FOLDER / "configs").glob("*.yaml")}
    steps = {name: config.num_steps for name, config in steps.items() if name != "recipe"}
    assert steps == {**dict.fromkeys(steps, 8), "four_once": 4, "four_once_recall": 4, "both_ends_long": 12}


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
