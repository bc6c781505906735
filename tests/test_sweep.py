"""Sweeps: the grid, going on after a stop, failures left out, and intervals over seeds and sequences."""

from __future__ import annotations

import json
import shutil
import signal
import time

import numpy as np
import pytest
import yaml

from pnn.errors import UserError
from pnn.stats import seeds_and_sequences, student
from pnn.sweep import arms_of, run_sweep
from pnn.training.jobs import Job

FEW = {"max_steps": 8, "evaluate_every": 8, "save_every": 8, "warmup_steps": 1}


def test_the_grid_is_configs_times_values():
    arms = arms_of(["a", "some/b.yaml"], ["training.learning_rate=3e-4,1e-3", "model.gate=none,query_key"])
    assert len(arms) == 8
    assert arms[0].settings == ("training.learning_rate=3e-4", "model.gate=none")
    assert arms[-1].name == "b learning_rate=1e-3 gate=query_key"
    (one, other) = arms_of(["a"], ["model.schedule=[0, 0],[0, 1]"])
    assert (one.name, other.settings) == ("schedule=[0, 0]", ("model.schedule=[0, 1]",))
    assert [arm.name for arm in arms_of(["a"], [])] == ["a"]


def test_arms_that_would_share_a_folder_are_refused():
    with pytest.raises(UserError, match="two arms of one name"):
        arms_of(["a"], ["data.train=some/text,some-text"])


@pytest.mark.parametrize("wrong", ["training.learning_rate", "=1,2", "training.learning_rate=", "model.gate=[1"])
def test_an_axis_that_cannot_be_read_is_named(wrong):
    with pytest.raises(UserError, match="--over"):
        arms_of(["a"], [wrong])


def test_a_key_that_does_not_exist_is_an_error_before_anything_is_written(tiny_config, tmp_path):
    with pytest.raises(UserError, match=r'unknown key "training\.learning_rat".*learning_rate'):
        run_sweep([str(tiny_config("pnn"))], ["training.learning_rat=1,2"], 1, [], tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_a_long_value_is_kept_whole():
    many = ", ".join(["0", "1"] * 40)
    (arm,) = arms_of(["a"], [f"model.schedule=[{many}]"])
    assert arm.settings == (f"model.schedule=[{many}]",)


@pytest.mark.parametrize("text", ["", "over: [", "just words"])
def test_a_damaged_sweep_is_named(text, tiny_config, tmp_path):
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(UserError, match=r"sweep\.yaml is damaged: choose another --output"):
        run_sweep([str(tiny_config("pnn"))], [], 1, [], tmp_path)


def test_a_run_that_was_stopped_and_measured_is_not_done(trained_run, tmp_path):
    """`pnn evaluate` writes an evaluation.json of any run that has a checkpoint."""
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    job = Job("quickstart_pnn", [], run, 40)
    assert job.done
    state = run / "checkpoints" / "last" / "trainer_state.json"
    held = json.loads(state.read_text())
    assert held["step"] == held["text"][-1]
    state.write_text(json.dumps(held | {"step": held["step"] - 1}))
    assert not job.done
    for damaged in ([], {"step": 3}, {"step": None, "text": [3]}, {"step": 3, "text": "abc"}):
        state.write_text(json.dumps(damaged))
        with pytest.raises(UserError, match=r"trainer_state\.json or .* is damaged"):
            _ = job.done
    state.write_text(json.dumps(held))
    of_best = (run / "evaluation.json").read_text()
    (run / "evaluation.json").write_text(json.dumps(json.loads(of_best) | {"checkpoint": "step-000010"}))
    assert not job.done  # it went on and was stopped again before it was measured
    (run / "evaluation.json").write_text(of_best)
    assert job.done
    shutil.rmtree(run / "checkpoints")  # only what was measured came home
    assert job.done
    (run / "evaluation.json").unlink()
    assert not job.done


def test_intervals_over_seeds_and_sequences_cover_both():
    rng = np.random.default_rng(0)
    trials = rng.integers(1, 20, 400).astype(float)
    same = np.tile(rng.normal(0.5, 1.0, 400), (5, 1))
    apart = same + trials * rng.normal(0, 0.1, (5, 1))  # seeds that differ as a whole
    narrow, wide = seeds_and_sequences(same, trials), seeds_and_sequences(apart, trials)
    assert narrow.value == pytest.approx(same[0].sum() / trials.sum())
    assert narrow.low < narrow.value < narrow.high
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)
    assert seeds_and_sequences(np.ones((3, 50)), np.full(50, 4.0)) == (0.25, 0.25, 0.25)


@pytest.mark.slow
def test_a_sweep_trains_compares_and_goes_on(tiny_config, tmp_path, forked_jobs):
    config, folder = str(tiny_config("pnn", training=FEW)), tmp_path / "sweep"
    over = ["training.learning_rate=1e-3,3e-3"]
    result, _ = run_sweep([config], over, 2, [], folder, at_once=2)
    assert [arm["name"] for arm in result["arms"]] == ["learning_rate=1e-3", "learning_rate=3e-3"]
    assert json.loads((folder / "sweep.json").read_text()) == result
    runs = sorted(path.parent for path in folder.glob("*/*/evaluation.json"))
    assert len(runs) == 4
    measured = [json.loads((run / "evaluation.json").read_text())["accuracy"] for run in runs]
    first, second = (arm["texts"]["validation"] for arm in result["arms"])
    assert first["by_seed"] + second["by_seed"] == measured
    assert first["against_first"] is None
    apart = second["against_first"]
    assert apart["over_seeds"] == student([b - a for a, b in zip(measured[:2], measured[2:], strict=True)]).as_json()
    assert apart["over_seeds_and_sequences"]["value"] == pytest.approx(np.mean(measured[2:]) - np.mean(measured[:2]))
    times = {run: (run / "evaluation.json").stat().st_mtime_ns for run in runs}
    more, _ = run_sweep([config], over, 3, [], folder, at_once=2)  # finished runs are kept
    assert {run: (run / "evaluation.json").stat().st_mtime_ns for run in runs} == times
    assert more["arms"][0]["seeds"] == [0, 1, 2]
    with pytest.raises(UserError, match="holds another sweep"):
        run_sweep([config], ["training.learning_rate=1e-3"], 2, [], folder)


@pytest.mark.slow
def test_a_run_that_fails_is_told_and_left_out(tiny_config, tmp_path, forked_jobs, capfd):
    config = tiny_config("pnn", training=FEW)
    result, _ = run_sweep([str(config)], ["training.learning_rate=1e-3,1e30"], 1, [], tmp_path / "sweep", at_once=2)
    assert list(result["failed"]) == ["learning_rate=1e30 seed 0"]
    assert "non-finite" in result["failed"]["learning_rate=1e30 seed 0"]
    assert result["arms"][0]["seeds"] == [0]
    assert result["arms"][1]["seeds"] == []
    assert "learning_rate=1e30 seed 0 failed and is left out" in capfd.readouterr().err


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_to_the_same_numbers(tiny_config, tmp_path, start_pnn, pnn_command, forked_jobs):
    """What is killed started a new Python; what goes on, and what nobody killed, are forked."""
    config = tiny_config("pnn", training={"max_steps": 40, "save_every": 4})
    words = ["sweep", str(config), "--over", "training.learning_rate=1e-3,2e-3", "--seeds", "1", "--jobs", "1"]
    run_sweep([str(config)], ["training.learning_rate=1e-3,2e-3"], 1, [], tmp_path / "whole", at_once=1)
    process = start_pnn(*words, "--output", str(tmp_path / "cut"))
    until = time.monotonic() + 200
    while not list((tmp_path / "cut").glob("*/*/checkpoints/last")) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 2
    assert not (tmp_path / "cut" / "sweep.json").exists()
    assert pnn_command(*words, "--output", tmp_path / "cut")[0] == 0
    one, other = (json.loads((tmp_path / name / "sweep.json").read_text()) for name in ("whole", "cut"))
    assert one == other
    assert yaml.safe_load((tmp_path / "cut" / "sweep.yaml").read_text())["seeds"] == 1
