"""The tables and the verdict of results/widths, from sweeps made by hand."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from pnn.errors import UserError
from pnn.files import write_between, write_json
from pnn.sweep import arms_of

FOLDER = Path(__file__).parents[1] / "results" / "widths"
NOT_YET = "Not measured yet on a GPU."
GRID = "training.learning_rate=2.5e-4,5e-4,1e-3,2e-3,4e-3"  # as run.sh has it
# losses by rate; AdamW's best is 1e-3 at both widths, Muon's is 2e-3 at 256 and its neighbour at 768, by less than 0.01
LOSSES = {
    "adamw_w256": [5.0, 4.6, 4.5, 4.7, 5.1],
    "adamw_w768": [4.4, 4.1, 4.0, 4.2, 4.9],
    "adamw_w768_plain": [4.1, 4.0, 4.3, 5.0, None],
    "muon_w256": [5.0, 4.6, 4.4, 4.3, 4.5],
    "muon_w768": [4.4, 4.1, 3.9, 3.906, 4.4],
    "muon_w768_plain": [4.2, 4.0, 3.95, 4.2, 4.4],
}
ENVIRONMENT = {
    "git": {"commit": "0" * 40},
    "hardware": {"cpu": "x86_64", "threads": 1, "gpus": []},
    "versions": {"torch": "2", "transformers": "5"},
}


@pytest.fixture
def collect(tmp_path, monkeypatch):
    """In a copy that it may write, with nothing measured yet."""
    folder = shutil.copytree(FOLDER, tmp_path / "widths", ignore=shutil.ignore_patterns("result.json"))
    write_between(folder / "README.md", "w768", NOT_YET)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "collect", raising=False)
    yield importlib.import_module("collect")
    sys.modules.pop("collect", None)


@pytest.fixture
def sweeps(tmp_path):
    """`sweeps(muon_w768=[…])`: the folder that run.sh leaves, with other losses in some grids. None is a run that failed."""

    def make(**changed) -> Path:
        for name, losses in (LOSSES | changed).items():
            arms = []
            for arm, loss in zip(arms_of(["w.yaml"], [GRID]), losses, strict=True):
                arms.append({"name": arm.name, "settings": list(arm.settings), "seeds": [] if loss is None else [0]})
                run = tmp_path / "runs" / name / arm.name / "seed-0"
                run.mkdir(parents=True)
                write_json(run / "environment.json", ENVIRONMENT)
                if loss is not None:
                    write_json(run / "evaluation.json", {"loss": loss, "accuracy": 0.3})
            write_json(tmp_path / "runs" / name / "sweep.json", {"seeds": 1, "arms": arms})
        return tmp_path / "runs"

    return make


def result_of(collect):
    return json.loads((collect.HERE / "result.json").read_text())


def test_a_neighbour_that_is_hardly_better_does_no_harm(collect, sweeps):
    collect.main("w768", sweeps())
    result, page = result_of(collect), (collect.HERE / "README.md").read_text()
    assert result["answer"] == "Width 256 to 768: It carries over."
    muon = result["metrics"]["w768"]["optimizers"]["muon"]
    assert (muon["best_when_narrow"], muon["w768"]["best"]) == (2e-3, 1e-3)
    assert muon["w768"]["above_best"] == pytest.approx(0.006)
    assert muon["w768_plain"]["above_best"] == pytest.approx(0.25)
    assert "| Muon | 768, with the rule | 4.400 | 4.100 | **3.900** | 3.906 | 4.400 |" in page
    assert "| AdamW | 768, without it | 4.100 | **4.000** | 4.300 | 5.000 | failed |" in page
    assert "| AdamW | 0.001 | 0.000 | 0.300 | yes |" in page
    assert "| Muon | 0.002 | 0.006 | 0.250 | yes |" in page
    assert NOT_YET not in page
    assert "It carries over.\n<!-- /w768 -->" in page


@pytest.mark.parametrize("at_768", [3.92, None])
def test_one_optimiser_whose_rate_is_worse_or_fails_is_enough_against_it(collect, sweeps, at_768):
    collect.main("w768", sweeps(muon_w768=[4.4, 4.1, 3.9, at_768, 4.4]))
    result = result_of(collect)
    assert result["answer"] == "Width 256 to 768: It does not carry over, by the grid of Muon."
    assert [result["metrics"]["w768"]["optimizers"][one]["carries_over"] for one in ("adamw", "muon")] == [True, False]


def test_seeds_are_averaged_and_compared_by_seed(collect, sweeps):
    runs = sweeps()
    for name in ("adamw_w768", "muon_w768"):
        sweep = json.loads((runs / name / "sweep.json").read_text())
        for arm in sweep["arms"]:
            arm["seeds"] = [0, 1]
            first, second = (runs / name / arm["name"] / f"seed-{seed}" for seed in (0, 1))
            shutil.copytree(first, second)
            loss = json.loads((first / "evaluation.json").read_text())["loss"]
            write_json(second / "evaluation.json", {"loss": loss + (0.002 if loss == 3.9 else 0)})
        write_json(runs / name / "sweep.json", sweep)
    collect.main("w768", runs)
    muon = result_of(collect)["metrics"]["w768"]["optimizers"]["muon"]["w768"]
    assert muon["best_losses"] == pytest.approx([3.9, 3.902])
    assert muon["above_best"] == pytest.approx(0.005)
    assert muon["over_seeds"]["value"] == pytest.approx(0.005)
    assert muon["over_seeds"]["interval"][0] < 0 < muon["over_seeds"]["interval"][1]


def test_a_second_width_stands_beside_the_first(collect, sweeps):
    runs = sweeps()
    collect.main("w768", runs)
    for old in list(runs.iterdir()):
        old.rename(old.with_name(old.name.replace("w256", "w32").replace("w768", "w96")))
    collect.main("w96", runs)
    assert result_of(collect)["answer"] == "Width 256 to 768: It carries over. Width 32 to 96: It carries over."
    page = (collect.HERE / "README.md").read_text()
    assert "| AdamW | 768, with the rule |" in page
    assert "| AdamW | 96, with the rule |" in page


def test_optimisers_may_come_one_after_another(collect, sweeps, tmp_path):
    runs, later = sweeps(), tmp_path / "later"
    later.mkdir()
    for name in ("adamw_w256", "adamw_w768", "adamw_w768_plain"):
        (runs / name).rename(later / name)
    collect.main("w768", runs)
    assert result_of(collect)["answer"] == "Width 256 to 768: It carries over with Muon; AdamW is not measured yet."
    assert "AdamW |" not in (collect.HERE / "README.md").read_text()
    collect.main("w768", later)
    assert result_of(collect)["answer"] == "Width 256 to 768: It carries over."
    assert "| Muon | 0.002 | 0.006 | 0.250 | yes |" in (collect.HERE / "README.md").read_text()
    with pytest.raises(UserError, match="has no finished sweeps of width 768"):
        collect.main("w768", tmp_path / "elsewhere")


def test_both_may_fail(collect, sweeps):
    collect.main("w768", sweeps(adamw_w256=[4.0, 4.6, 4.5, 4.7, 5.1], muon_w256=[4.0, 4.6, 4.4, 4.3, 4.5]))
    assert result_of(collect)["answer"] == "Width 256 to 768: It does not carry over, by the grid of AdamW and that of Muon."


def nothing_written(collect):
    return (
        not (collect.HERE / "result.json").exists() and "Not measured yet on a GPU" in (collect.HERE / "README.md").read_text()
    )


def test_an_optimiser_that_is_half_done_waits(collect, sweeps, capsys):
    runs = sweeps()
    (runs / "muon_w768_plain" / "sweep.json").unlink()
    collect.main("w768", runs)
    assert result_of(collect)["answer"] == "Width 256 to 768: It carries over with AdamW; Muon is not measured yet."
    assert "Muon: not all of its sweeps finished, left out" in capsys.readouterr().out


def test_a_sweep_without_a_finished_run_is_named(collect, sweeps):
    with pytest.raises(UserError, match="adamw_w768: none of its runs finished"):
        collect.main("w768", sweeps(adamw_w768=[None] * 5))
    assert nothing_written(collect)


def test_runs_without_a_commit_are_not_collected(collect, sweeps):
    runs = sweeps()
    write_json(runs / "muon_w256" / "learning_rate=2e-3" / "seed-0" / "environment.json", {"git": None})
    with pytest.raises(UserError, match="names no commit"):
        collect.main("w768", runs)
    assert nothing_written(collect)


def test_grids_of_other_rates_do_not_compare(collect, sweeps):
    runs = sweeps()
    sweep = json.loads((runs / "adamw_w768" / "sweep.json").read_text())
    del sweep["arms"][2]
    write_json(runs / "adamw_w768" / "sweep.json", sweep)
    with pytest.raises(UserError, match=r"w768 has no run with a rate of 0\.001, which is best at w256"):
        collect.main("w768", runs)
