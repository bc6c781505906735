"""The scripts of results/halting/real_text on a tiny run: what they measure is what the model computes, and what follows."""

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
from pnn.evaluation.choosing import predictions, steps_taken
from pnn.files import write_between
from pnn.models.loading import load_run
from pnn.runs import read_json
from pnn.training.run import train_run

ROOT = Path(__file__).parents[1]
NAMES = ("kept", "timed", "groups", "measure", "picture", "collect")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """In a copy of the results that they may write."""
    root = tmp_path_factory.mktemp("halting")
    (root / "benchmarks" / "results").mkdir(parents=True)
    shutil.copytree(ROOT / "results" / "halting", root / "results" / "halting", ignore=shutil.ignore_patterns("measured"))
    for part in ("table", "groups"):  # as before the first measurement
        write_between(root / "results" / "halting" / "real_text" / "README.md", part, "Not measured yet.")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "results" / "halting" / "real_text"))
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)
        found = {name: importlib.import_module(name) for name in NAMES}
        patch.setattr(found["measure"], "UPDATES", 2)
        patch.setattr(found["measure"], "COSTS", (0.01,))
        patch.setattr("pnn.evaluation.choosing.SETTLED", (0.5,))
        patch.setattr("os.sched_setaffinity", lambda *given: None)
        yield found
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def run(tmp_path_factory, write_config) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(
        folder / "tiny.yaml",
        training={"max_steps": 10, "evaluate_every": 10, "save_every": 10},
        evaluation={"mask_draws": 2, "sets": {"wikitext_tokens": {"source": "synthetic"}}},
    )
    train_run(load_config(str(config), []), folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture(scope="module")
def home(scripts, run, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    home = runs / "home" / "pnn_paper"
    scripts["measure"].measure_ways(run, home, seeds=3, batch_tokens=4096, fit_tokens=512, kept_tokens=1024)
    scripts["measure"].measure_speed(run, home, [256, 512], 512, seconds=0.0, threads=1)
    return home


def test_all_steps_are_as_right_as_the_evaluation_says(home, run):
    found, evaluated = read_json(home / "by_sequence.json"), read_json(run / "evaluation.json")["sets"]["wikitext_tokens"]
    assert sum(found["right"]) / sum(found["targets"]) == pytest.approx(evaluated["accuracy"])
    whole = read_json(home / "ways.json")["ways"][0]
    assert (whole["family"], whole["flops_share"], whole["lost_on_tail"]) == ("dial", 1.0, 0.0)
    assert not any(found["lost"][whole["name"]])


def test_every_kind_is_there_and_a_unit_for_each_seed(home):
    ways = read_json(home / "ways.json")["ways"]
    assert {way["family"] for way in ways} == {"dial", "two_dials", "change", "confidence", "learned"}
    assert {way["seed"] for way in ways if way["family"] == "learned"} == {0, 1, 2}
    assert all(way["steps"] < ways[0]["steps"] for way in ways if way["family"] == "two_dials")


def test_steps_at_random_that_are_all_steps_change_nothing(scripts, run):
    measure, loaded = scripts["measure"], load_run(run)
    subject = measure.Halting(loaded)
    tokens, sequences = measure.held_out(run, load_config(str(run / "config.yaml")).data, loaded.tokenizer, None)
    batches = list(measure.Text(tokens, sequences, measure.special_tokens(loaded.tokenizer)).batches())
    way = measure.Way.of(measure.settings(subject.model.config)[0])
    with torch.no_grad():
        steps, _ = measure.taken(subject, way, batches)
        rows = [measure.Rows.of(subject.model, batch) for batch in batches]
        found = measure.right_at_random(rows, steps, batches, len(sequences))
        assert (found == measure.right(subject, way, batches)).all()


@torch.no_grad()
def test_the_sample_is_the_text(scripts, run, home):
    """In batches of any size its predictions are right as often as in one."""
    sample = scripts["kept"].load_file(home / "sample.safetensors")
    model, right = load_run(run).model.eval(), []
    for size in (100, 512):
        batches = list(scripts["measure"].packed(sample, "wikitext_tokens", 512, size))
        assert all(size - 64 < len(batch.packed.input_ids) <= size for batch in batches)
        right.append(torch.cat([predictions(model, batch) == batch.labels for batch in batches]))
    fewest = min(map(len, right))
    assert torch.equal(*(one[:fewest] for one in right))
    assert sample["wikitext_tokens/ids"][sample["wikitext_tokens/positions"]].unique().numel() == 1  # [MASK]


@pytest.mark.parametrize(
    ("lost", "seconds"),
    [(0.002, 3.5), (0.004, 3.0), (0.0, 4.0), (-0.01, 4.0), (0.012, 2.5), (0.5, 2.0)],
)
def test_the_dial_at_equal_accuracy_is_a_mix_of_two_numbers_of_steps(scripts, lost, seconds):
    found = scripts["collect"].dial_time(np.array(lost), np.array([0, 0.004, 0.02]), np.array([4.0, 3.0, 2.0]))
    assert found == pytest.approx(seconds)


def test_fewer_steps_that_are_better_leave_all_steps_no_chance(scripts):
    found = scripts["collect"].dial_time(np.array(0.0), np.array([0, -0.01, 0.01]), np.array([4.0, 3.0, 2.0]))
    assert found == pytest.approx(2.5)


@pytest.mark.parametrize(("slow", "counts"), [(1.05, "median"), (1.3, "quickest")])
def test_where_timings_were_disturbed_the_quickest_turn_counts(scripts, home, slow, counts):
    ways = read_json(home / "ways.json")["ways"]
    turns = [1.0, slow, 5.0]
    speed = {"ways": {way["name"]: {"microseconds_per_token": {"wikitext_tokens": {"2048": turns}}} for way in ways}}
    model = scripts["timed"].Model(home, speed)
    assert model.disturbed == (counts == "quickest")
    assert model.time(model.ways[0]) == pytest.approx(1.0 if counts == "quickest" else slow)


def planted(home: Path, runs: Path, faster: float) -> None:
    """All units lose nothing, at so many times the speed of all steps; the dial loses five points with every step less."""
    there = runs / "home" / "pnn_paper"
    shutil.copytree(home, there)
    ways, totals = read_json(there / "ways.json"), read_json(there / "by_sequence.json")
    speed = read_json(path := next(there.glob("speed-*.json")))
    targets = np.array(totals["targets"])
    for way in ways["ways"]:
        steps = way["changes"]["num_steps"]
        lost = 0.05 * (4 - steps) if way["family"] == "dial" else 0.0 if way["family"] == "learned" else 0.2
        way["lost_on_tail"] = lost
        totals["lost"][way["name"]] = (lost * targets).tolist()
        once = steps if way["family"] == "dial" else 4 / faster
        for text in speed["ways"][way["name"]]["microseconds_per_token"].values():
            text.update({size: [once] * 3 for size in text})
    for name, value in (("ways.json", ways), ("by_sequence.json", totals), (path.name, speed)):
        (there / name).write_text(json.dumps(value))
    environment = read_json(there / "environment.json") | {"git": "0123456"}
    (there / "environment.json").write_text(json.dumps(environment))


@pytest.mark.parametrize(("faster", "said"), [(1.5, "won"), (1.1, "lost")])
def test_collecting_says_who_won(scripts, home, tmp_path, monkeypatch, faster, said):
    collect = scripts["collect"]
    planted(home, tmp_path, faster)
    monkeypatch.setattr(sys, "argv", ["collect.py", str(tmp_path)])
    collect.main()
    result = read_json(collect.HERE / "result.json")
    ((slug, ratios),) = result["ratios"].items()
    assert slug == "cpu-1-cores"
    assert ratios["halting_speedup"] == pytest.approx(faster)
    assert ratios["halting_vs_dial"] == pytest.approx(faster)
    assert ratios["halting_points_lost"] == pytest.approx(0)
    row = result["metrics"][slug]["pnn_paper"]
    assert (row["verdict"], row["aim_reached"]) == (said, faster >= 1.4)
    assert row["ways"]["dial"]["chosen"] == row["ways"]["change"]["chosen"] == ["4 steps, as trained"]
    assert f"| {said} |" in (collect.HERE / "README.md").read_text()
    assert read_json(collect.BENCHMARKS / "halting-real-text-cpu-1-cores.json")["ratios"] == ratios
    assert (collect.HERE / "figures" / "accuracy_against_speed.png").exists()


@pytest.mark.parametrize("behind", [0.0, 0.03])
def test_a_model_trained_to_halt_is_told_beside_the_dial_of_the_other(scripts, home, tmp_path, behind):
    """As good with all steps, the other's dial is its own. Three points better, it reaches the same accuracy with fewer steps:
    the dial loses five points with every step less."""
    collect = scripts["collect"]
    planted(home, tmp_path, 1.5)
    ready, other = (tmp_path / "home" / name for name in ("pnn_rewrite_one_ready", "pnn_rewrite_one"))
    shutil.move(tmp_path / "home" / "pnn_paper", ready)
    shutil.copytree(ready, other)
    totals = read_json(other / "by_sequence.json")
    totals["right"] = [right + behind * targets for right, targets in zip(totals["right"], totals["targets"], strict=True)]
    (other / "by_sequence.json").write_text(json.dumps(totals))
    ((_, models),) = collect.models_in(tmp_path / "home").items()
    way = collect.metrics_of(models["pnn_rewrite_one_ready"])["ways"]["learned"]
    assert way["against_dial"]["value"] == pytest.approx(1.5)
    assert way["against_plain_dial"]["value"] == pytest.approx(1.5 * (4 - behind / 0.05) / 4)
    assert "against_plain_dial" not in collect.metrics_of(models["pnn_rewrite_one"])["ways"]["learned"]


@pytest.mark.parametrize(("lost", "said"), [(0.05, ["↓ 5.0 points lost"]), (0.01, [])])
def test_the_picture_has_all_that_was_chosen_and_says_what_it_cannot_show(scripts, home, tmp_path, lost, said):
    """Large marks of the dial and of the unit: of the other kinds all steps were chosen. At random the unit's steps lose less
    than the picture shows, or more."""
    planted(home, tmp_path, 1.5)
    totals = read_json(path := tmp_path / "home" / "pnn_paper" / "by_sequence.json")
    totals["lost_at_random"] = {name: [lost * targets for targets in totals["targets"]] for name in totals["lost_at_random"]}
    path.write_text(json.dumps(totals))
    ((slug, models),) = (machines := scripts["collect"].models_in(tmp_path / "home")).items()
    row = scripts["collect"].metrics_of(models["pnn_paper"]) | {"oracle": {"ideal_speedup": {"value": 2.5}}}
    (axes,) = scripts["picture"].accuracy_against_speed(machines, {slug: {"pnn_paper": row}}).axes
    large = sorted(round(float(mark.lines[0].get_xdata()[0]), 3) for mark in axes.containers)
    assert large == ([1.0, 1.5] if said else [1.0, 1.5, 1.5])
    assert [text.get_text() for text in axes.texts if "lost" in text.get_text()] == said
    stars = [drawn for drawn in axes.lines if drawn.get_marker() == "*"]
    assert [(star.get_xdata()[0], star.get_ydata()[0]) for star in stars] == [(2.5, row["accuracy"])]


def test_which_tokens_stop_when_is_told_where_it_was_measured(scripts, run, home, tmp_path, monkeypatch):
    collect, there = scripts["collect"], tmp_path / "home" / "pnn_paper"
    planted(home, tmp_path, 1.5)
    monkeypatch.setattr(sys, "argv", ["collect.py", str(tmp_path)])
    collect.main()
    assert "<!-- groups -->\nNot measured yet." in (collect.HERE / "README.md").read_text()
    scripts["measure"].measure_groups(run, there)
    collect.main()
    found = read_json(there / "groups.json")
    assert sorted(way["seed"] for way in found["ways"]) == [0, 1, 2]  # other criteria lose too much
    assert "| ordinary, rarest quarter |" in (collect.HERE / "README.md").read_text()

    subject, described, sample = scripts["kept"].left_by_ways(run, there)
    (batch,) = scripts["kept"].packed(sample, "wikitext_tokens", 1024, 2048)
    for told in found["ways"]:
        way = scripts["kept"].Way.of_json(next(row for row in described if row["name"] == told["name"]))
        with subject.take(way), torch.no_grad():
            steps = steps_taken(subject.model, batch)
        assert told["by_kind"]["masked"]["steps"]["value"] == pytest.approx(steps[batch.positions.numpy()].mean())
        assert sum(row["tokens"] for row in told["by_kind"].values()) == found["tokens"] == len(steps)
        assert sum(row["tokens"] for row in told["by_loss"].values()) == found["targets"] == len(batch.labels)


def test_of_each_criterion_and_seed_the_fewest_flops_that_lose_little_are_told(scripts):
    rows = [
        ("dial", None, 0.5, 0.0),
        ("change", None, 0.6, 0.004),
        ("change", None, 0.8, 0.003),
        ("change", None, 0.9, 0.0),
        ("confidence", None, 0.3, 0.1),
        ("learned", 0, 0.7, 0.002),
        ("learned", 0, 0.75, 0.0),
        ("learned", 1, 0.65, -0.001),
    ]
    keys = ("family", "seed", "flops_share", "lost_on_tail")
    chosen = scripts["groups"].fewest_flops([dict(zip(keys, row, strict=True)) for row in rows])
    assert [(row["family"], row["flops_share"]) for row in chosen] == [("learned", 0.65), ("learned", 0.7), ("change", 0.8)]


def test_nothing_to_collect_is_said(scripts, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["collect.py", str(tmp_path)])
    with pytest.raises(UserError, match=r"run\.sh measure"):
        scripts["collect"].main()
