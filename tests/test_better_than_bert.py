"""Collecting the comparison with BERT: pairs, verdicts and departures from the rules, on runs whose answers are known."""

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
from pnn.errors import UserError
from pnn.models.sections import build_model, model_config
from pnn.runs import read_json
from pnn.sweep import run_sweep
from pnn.training.run import train_run

ROOT = Path(__file__).parents[1]
SHAPES = {
    "pnn_rewrite": {"type": "pnn", "update": "rewrite", "schedule": [0, 1, 0, 1], "step_weights": [0, 0.3, 0, 0.7]},
    "bert4": {"type": "bert", "num_hidden_layers": 2},
}


@pytest.fixture
def collect(tmp_path, monkeypatch):
    """The script, in a copy of the results that it may write."""
    for name in ("better_than_bert", "short_budget", "pnn_paper_protocol"):
        shutil.copytree(ROOT / "results" / name, tmp_path / "results" / name)
    shutil.rmtree(tmp_path / "results" / "better_than_bert" / "measured", ignore_errors=True)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "results" / "train-nvidia-h200.json", tmp_path / "benchmarks" / "results")
    monkeypatch.syspath_prepend(str(tmp_path / "results" / "better_than_bert"))
    for name in ("collect", "comparison", "keep"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("collect")
    monkeypatch.setattr(sys, "argv", ["collect.py", str(tmp_path / "runs")])
    yield module
    for name in ("collect", "comparison", "keep"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def configs(tmp_path_factory, write_config) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("configs")
    return {
        name: write_config(
            folder / f"{name}.yaml",
            model=shape,
            training={"max_steps": 10, "evaluate_every": 10, "save_every": 10},
            evaluation={"mask_draws": 2, "sets": {"wikitext_tokens": {"source": "synthetic"}}},
        )
        for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def trained(configs, tmp_path_factory) -> dict[str, Path]:
    """One finished run of each."""
    folder = tmp_path_factory.mktemp("trained")
    for name, config in configs.items():
        train_run(load_config(str(config), []), folder / name, quiet=True)
    return {name: folder / name for name in configs}


@pytest.fixture
def put(trained, tmp_path):
    """Put a run into the folder that is collected: `put("a5", "bert4", 0, points=-1.0)` got 39 % right."""

    def put(part, arm, seed, points=0.0, rate=None, **environment):
        run = tmp_path / "runs" / part / arm / f"seed-{seed}"
        shutil.copytree(trained["bert4" if "bert" in arm else "pnn_rewrite"], run)
        edit(run / "environment.json", lambda found: found | {"source_sha256": "one"} | environment)
        totals = read_json(run / "evaluation_by_sequence.json")
        text = totals["wikitext_tokens"]
        targets = np.array(text["targets"])
        share = np.random.default_rng([seed, len(arm)]).normal(0.4, 0.05, len(targets))
        share += 0.4 + points / 100 - (share * targets).sum() / targets.sum()
        text["correct"] = (share * targets).tolist()
        (run / "evaluation_by_sequence.json").write_text(json.dumps(totals))
        accuracy = sum(text["correct"]) / sum(text["targets"])

        def measured(found):
            found["sets"]["wikitext_tokens"]["accuracy"] = accuracy
            found["accuracy"] = 2 * accuracy - 0.4  # on the tail all differences are twice as large
            return found

        edit(run / "evaluation.json", measured)
        config = (run / "config.yaml").read_text().replace("seed: 0", f"seed: {seed}", 1)
        if rate is not None:
            config = config.replace("learning_rate: 0.002", f"learning_rate: {rate}", 1)
        (run / "config.yaml").write_text(config)
        return run

    return put


def edit(path, change):
    path.write_text(json.dumps(change(read_json(path))))


def result(collect):
    collect.main()
    return read_json(collect.HERE / "result.json")


def whole_a(put, ours=1.0):
    """All of (a): every seed of ours is `ours` points ahead of all others, give or take what the seed brings to both."""
    for part, arms, seeds in (
        ("a5", ("pnn_rewrite", "bert4"), 5),
        ("a3", ("pnn_gateless", "bert12"), 3),
        ("a1", ("pnn_paper",), 1),
    ):
        for arm in arms:
            for seed in range(seeds):
                put(part, arm, seed, points=3 * seed + (ours if arm == "pnn_rewrite" else 0) + 0.1 * (seed % 2))


@pytest.mark.parametrize(("ours", "outcome"), [(1.0, "won"), (-1.0, "lost"), (0.0, "undecided")])
def test_who_is_ahead_follows_from_the_runs(collect, put, ours, outcome):
    whole_a(put, ours)
    found = result(collect)
    for rival, seeds in (("bert12", [0, 1, 2]), ("bert4", [0, 1, 2, 3, 4]), ("gateless", [0, 1, 2])):
        gap = found["metrics"][f"points_ahead_of_{rival}"]
        assert gap["mean"] == pytest.approx(ours)
        assert gap["low"] <= gap["mean"] <= gap["high"]
        assert (gap["seeds"], gap["verdict"]) == (seeds, outcome)
        assert gap["tail"]["value"] == pytest.approx(2 * ours)
    told = [one for one in found["departures"] if one.startswith("(a)")]
    assert told == ["(a): the second form is not chosen yet: 0 of 2 candidates trained"]
    assert f"against BERT-12 {outcome}" in found["answer"]
    assert f"| {outcome} |" in (collect.HERE / "README.md").read_text()


def test_seeds_are_paired_and_a_missing_one_is_told(collect, put):
    """A seed is worth three points to both: pairing the wrong ones would show."""
    whole_a(put)
    shutil.rmtree(collect.ROOT / "runs" / "a5" / "bert4" / "seed-1")
    shutil.rmtree(collect.ROOT / "runs" / "a5" / "bert4" / "seed-3")
    found = result(collect)
    gap = found["metrics"]["points_ahead_of_bert4"]
    assert gap["seeds"] == [0, 2, 4]
    assert gap["by_seed"] == pytest.approx([1.0] * 3)
    assert "(a): BERT-4 lacks seeds 1, 3" in found["departures"]
    assert found["metrics"]["models"]["bert4"]["budgets"]["a"]["seeds"] == [0, 2, 4]


def test_two_seeds_are_too_few_for_a_verdict(collect, put):
    for seed in range(2):
        put("a5", "pnn_rewrite", seed, points=5)
        put("a5", "bert4", seed)
    assert result(collect)["metrics"]["points_ahead_of_bert4"]["verdict"] == "too few seeds"


def test_the_second_form_is_the_better_of_two_after_three_epochs_and_then_stands_first(collect, put):
    whole_a(put)
    for candidate, points in (("pnn_wide", 3), ("pnn_thrice", 1), ("pnn_twelve", 2)):
        put(f"rates_{candidate}", "learning_rate=2e-3", 0, points)
    put("a", "pnn_twelve", 0, points=9)
    metrics = result(collect)["metrics"]
    assert (metrics["form"], "first_form" in metrics) == ("pnn_rewrite", False)  # one alone is not the better of two
    put("a", "pnn_wide", 0, points=10)
    for seed in range(1, 5):
        put("a", "pnn_wide", seed, points=3 * seed + 10 + 0.1 * (seed % 2))
    for seed in range(2):
        put("a", "pnn_wide_gateless", seed, points=3 * seed + 6)
    put("b", "pnn_wide", 0, points=3)
    put("b", "bert12", 0)
    found = result(collect)
    metrics = found["metrics"]
    assert metrics["form"] == "pnn_wide"
    for rival, points, seeds in (("bert12", 10, 3), ("bert4", 10, 5), ("gateless", 4, 2)):
        gap = metrics[f"points_ahead_of_{rival}"]
        assert (gap["mean"], len(gap["seeds"])) == (pytest.approx(points, abs=0.1), seeds)
        assert metrics["first_form"]["a"][rival]["mean"] == pytest.approx(1)  # PNN-rewrite's own stay beside
    assert metrics["points_ahead_at_b"]["bert12"]["mean"] == pytest.approx(3)
    assert "(a): PNN-rewrite, eight refiners, one attention, without gates lacks seed 2" in found["departures"]
    assert not [one for one in found["departures"] if "twelve" in one]
    assert not [one for one in found["departures"] if one.startswith("(a): PNN-rewrite ") or "its gate " in one]
    page = (collect.HERE / "README.md").read_text()
    assert "| (a) | PNN-rewrite, eight refiners, one attention | BERT-12 | +10.00" in page
    assert "| (a) | PNN-rewrite | BERT-12 | +1.00" in page
    assert found["answer"].startswith("PNN-rewrite, eight refiners, one attention, at (a) against BERT-12 won")


@pytest.mark.parametrize(("points", "outcome"), [(-0.4, "held"), (-0.6, "lost"), (2.0, "held")])
def test_ten_epochs_may_trail_by_half_a_point(collect, put, points, outcome):
    put("b", "pnn_rewrite", 0, points=points)
    put("b", "bert12", 0)
    gap = result(collect)["metrics"]["points_ahead_at_b"]["bert12"]
    assert gap["mean"] == pytest.approx(points)
    assert gap["verdict"].startswith(outcome)


def test_runs_without_a_commit_are_not_collected(collect, put):
    put("a5", "bert4", 0)
    put("a5", "pnn_rewrite", 0, git=None)
    with pytest.raises(UserError, match="names no commit"):
        collect.main()
    assert not collect.MEASURED.exists()


def test_runs_of_other_code_or_another_recipe_are_told(collect, put):
    put("a5", "pnn_rewrite", 0)
    put("a5", "bert4", 0, source_sha256="two", git={"commit": "feedbeef00", "changed": False})
    run = put("a3", "bert12", 0)
    config = (run / "config.yaml").read_text()
    assert "weight_decay: 0.01" in config
    (run / "config.yaml").write_text(config.replace("weight_decay: 0.01", "weight_decay: 0.1"))
    found = result(collect)["departures"]
    assert any(one.startswith("(a): the runs were made by 2 versions of the code") and "feedbeef" in one for one in found)
    assert "(a): training.weight_decay is not the same for all runs" in found


def test_totals_of_another_evaluation_or_other_masks_are_refused(collect, put):
    put("a5", "pnn_rewrite", 0)
    run = put("a5", "bert4", 0)
    edit(run / "evaluation_by_sequence.json", lambda found: found | {"wikitext_tokens": found["validation"]})
    with pytest.raises(UserError, match="not of the evaluation beside it"):
        collect.main()
    totals = {"targets": [4, 4], "correct": [1, 1]}
    edit(run / "evaluation_by_sequence.json", lambda found: found | {"wikitext_tokens": totals})

    def measured(found):
        found["sets"]["wikitext_tokens"]["accuracy"] = 0.25
        return found

    edit(run / "evaluation.json", measured)
    with pytest.raises(UserError, match="other masked tokens"):
        collect.main()


def test_parts_come_one_after_another(collect, put, tmp_path):
    """Rates first; the best is by the tail, and a rate that (a) does not follow is told."""
    for rate, points in ((5e-4, 0.0), (1e-3, 2.0), (2e-3, 1.0)):
        put("rates_pnn_rewrite", f"learning_rate={rate:g}", 0, points, rate=rate)
    put("rates_pnn_rewrite_more", "learning_rate=4e-3", 0, 3.0, rate=4e-3)
    first = result(collect)
    assert list(first["metrics"]["rates"]["pnn_rewrite"]["learned"]) == ["5e-4", "1e-3", "2e-3", "4e-3"]
    assert first["metrics"]["models"]["pnn_rewrite"]["budgets"]["one_epoch"]["learning_rate"] == 4e-3
    assert "rates: 4e-3, the best of PNN-rewrite, is the highest of the 4 tried" in first["departures"]
    assert "points_ahead_of_bert4" not in first["metrics"]
    assert first["answer"].startswith("Who is ahead at (a) is not measured yet")
    shutil.rmtree(tmp_path / "runs")
    put("a5", "pnn_rewrite", 0)
    put("a5", "bert4", 0)
    second = result(collect)
    assert second["metrics"]["rates"] == first["metrics"]["rates"]
    assert "(a): PNN-rewrite was trained at 2e-3, its best is 4e-3" in second["departures"]
    model = second["metrics"]["models"]["pnn_rewrite"]
    assert model["budgets"]["a"]["training_minutes"] is None
    speed = {"implementation": "pnn", "config": "pnn_rewrite"}
    rows = [
        speed | {"name": "pnn rewrite", "what": "train", "tokens_per_second": {"median": 100}},
        speed | {"name": "pnn rewrite", "what": "inference", "tokens_per_second": {"median": 300}},
        speed | {"name": "pnn, 2 steps", "what": "inference", "tokens_per_second": {"median": 600}},
    ]
    (tmp_path / "runs" / "speeds.json").write_text(json.dumps({"rows": rows, "source_sha256": "one"}))
    third = result(collect)
    model = third["metrics"]["models"]["pnn_rewrite"]
    assert model["budgets"]["a"]["training_minutes"] == pytest.approx(model["budgets"]["a"]["tokens"] / 100 / 60)
    dial = [(row["model"], row["steps"], row["inference_tokens_per_second"]) for row in third["metrics"]["steps"]]
    assert dial == [("pnn_rewrite", 2, 600), ("pnn_rewrite", 4, 300), ("bert4", 2, None)]


def test_the_box_and_no_path_of_the_machine(collect, put, tmp_path):
    run = put("a5", "pnn_rewrite", 0)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("train: synthetic", "train: /home/me/tokens"))
    edit(run / "evaluation.json", lambda found: found | {"source": "/home/me/text/part-0*.txt.xz"})
    printed = {"accuracy": 0.512, "accuracy_interval": [0.5, 0.52], "mask_draws": 1}
    (tmp_path / "runs" / "box.json").write_text(json.dumps({"sets": {"wiki.valid.tokens": printed}}))
    found = result(collect)
    assert found["metrics"]["box_rounded"] == {"value": 0.512, "interval": [0.5, 0.52], "mask_draws": 1}
    assert "box_wikitext_valid" not in found["metrics"]
    put("b1", "pnn_rewrite", 0, points=12)  # by the protocol, with all draws of masks
    assert "52.0 %" in result(collect)["answer"]
    put("box", "pnn_rewrite", 0, points=15)  # trained longer
    assert result(collect)["metrics"]["box_wikitext_valid"] == pytest.approx(0.55)
    kept = "".join(path.read_text() for path in collect.MEASURED.rglob("*") if path.is_file())
    assert "train: TOKENS" in kept
    assert "/home/me" not in kept
    assert str(tmp_path) not in kept


def test_work_is_counted_as_the_benchmark_counts_it(collect):
    """For the text that all these runs read."""
    bench = read_json(ROOT / "benchmarks" / "results" / "train-nvidia-h200.json")
    for row in bench["rows"]:
        if row["what"] == "train" and row["implementation"] == "pnn":
            config = load_config(str(ROOT / "results" / "pnn_paper_protocol" / "measured" / row["config"] / "config.yaml"), [])
            assert collect.flops_per_token(config) == pytest.approx(row["flops_per_token"], rel=0.005)


def test_candidates_that_went_on_against_the_rule_are_told(collect, put, tmp_path):
    for candidate, points in (("pnn_wide", 3), ("pnn_thrice", 1)):
        put(f"rates_{candidate}", "learning_rate=2e-3", 0, points)
    assert "rates: PNN-rewrite, twelve refiners, one attention is missing" in result(collect)["departures"]
    put("rates_pnn_twelve", "learning_rate=2e-3", 0, 2)
    put("a", "pnn_thrice", 0)
    (tmp_path / "runs" / "speeds.json").write_text(
        json.dumps({"rows": [], "git": {"commit": "f" * 40}, "source_sha256": "two"})
    )
    found = result(collect)["departures"]
    assert "(a): PNN-rewrite, seven refiners is not one of the best 2 of the candidates" in found
    assert "speeds: timed with another version of the code (ffffffff) than any run of (a)" in found
    put("a", "pnn_twelve", 0, source_sha256="two")
    assert not [one for one in result(collect)["departures"] if one.startswith("speeds")]


@pytest.mark.parametrize(("points", "form"), [(6, "pnn_again"), (5, "pnn_wide"), (4, "pnn_wide")])
def test_what_is_added_takes_the_second_forms_place_if_it_is_ahead(collect, put, points, form):
    for candidate, reached in (("pnn_rewrite", 3), ("pnn_wide", 5), ("pnn_twelve", 4), ("pnn_again", points)):
        put("a", candidate, 0, points=reached)
    put("a", "bert12", 0)
    put("a", "bert12_again", 0, points=2)
    found = result(collect)
    metrics = found["metrics"]
    assert metrics["form"] == form
    assert metrics["points_ahead_of_bert12"]["mean"] == pytest.approx(max(points, 5))
    assert metrics["points_ahead_of_bert12_again"]["mean"] == pytest.approx(max(points, 5) - 2)
    assert metrics["first_form"]["a"]["bert12"]["mean"] == pytest.approx(3)
    told = "(a): BERT-12, with recall and a guess lacks seeds 1, 2" in found["departures"]
    assert told == (form == "pnn_again")


def test_a_look_at_a_model_of_its_own_is_not_one_at_another(collect, put):
    put("rates_bert12_rotary", "learning_rate=1e-3", 0, 1)
    put("looks", "bert12_again", 0, 3)
    models = result(collect)["metrics"]["models"]
    assert [models[name]["budgets"]["one_epoch"]["accuracy"]["value"] for name in ("bert12", "bert12_again")] == [
        pytest.approx(0.41),
        pytest.approx(0.43),
    ]


def test_there_is_no_second_form_if_neither_candidate_is_ahead(collect, put):
    put("a", "pnn_rewrite", 0, points=5)
    for candidate in ("pnn_twelve", "pnn_wide"):
        put("a", candidate, 0, points=4)
    found = result(collect)
    assert (found["metrics"]["form"], "first_form" in found["metrics"]) == ("pnn_rewrite", False)
    assert "(a): PNN-rewrite lacks seeds 1, 2, 3, 4" in found["departures"]
    assert not [one for one in found["departures"] if "second form" in one or ("one attention" in one and "(a)" in one)]


def test_candidates_are_as_small_as_the_rules_say(collect):
    """With a config without gates for each, of which the best will need seeds."""
    comparison = importlib.import_module("comparison")

    def size(model):
        config = load_config(str(collect.HERE / "configs" / f"{model}.yaml"), [])
        with torch.device("meta"):
            return build_model(model_config(config.model)).num_parameters()

    for model in comparison.FORMS:
        assert size(f"{model}_gateless") < size(model) <= 53.7e6
        most = 1.04 if model == comparison.ADDED else 1.0  # which has two losses and a guess more: rule 13 says so
        assert comparison.flops_of(model) < most * comparison.flops_of("bert12")


def test_the_script_trains_the_candidates_of_the_rules(collect):
    forms = importlib.import_module("comparison").FORMS
    assert f"for model in {' '.join(forms)}; do" in (collect.HERE / "run.sh").read_text()


@pytest.mark.slow
def test_what_a_sweep_leaves_is_found(collect, configs, tmp_path, forked_jobs):
    paths = [str(configs[name]) for name in SHAPES]
    run_sweep(paths, [], 1, [], tmp_path / "runs" / "a5", at_once=2)
    over = ["training.learning_rate=5e-4,2e-3"]
    run_sweep(paths[:1], over, 1, [], tmp_path / "runs" / "rates_pnn_rewrite", at_once=2)
    found = result(collect)["metrics"]
    measured = {
        name: read_json(tmp_path / "runs" / "a5" / name / "seed-0" / "evaluation.json")["sets"]["wikitext_tokens"]["accuracy"]
        for name in SHAPES
    }
    apart = 100 * (measured["pnn_rewrite"] - measured["bert4"])
    assert found["points_ahead_of_bert4"]["mean"] == pytest.approx(apart)
    assert set(found["rates"]["pnn_rewrite"]["learned"]) == {"5e-4", "2e-3"}
    assert (collect.HERE / "figures" / "pareto.png").exists()
