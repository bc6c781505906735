"""Trackers beside TensorBoard: what a run logs arrives there, with the run's name and settings."""

import importlib.util
import json

import pytest

SETTINGS = {"max_steps": 4, "log_every": 2, "evaluate_every": 4}


def trained(tiny_config, pnn_command, tmp_path, monkeypatch, tracker):
    pytest.importorskip(tracker, reason=f"{tracker} is large and nobody's dependency: `make habits` installs it")
    monkeypatch.chdir(tmp_path)
    config = tiny_config("tracked", training={**SETTINGS, "trackers": [tracker], "tensorboard": True})
    code, _, err = pnn_command("train", config, "--output", tmp_path / "run")
    assert code == 0, err
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def test_mlflow(tiny_config, pnn_command, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    losses = trained(tiny_config, pnn_command, tmp_path, monkeypatch, "mlflow")
    from mlflow import MlflowClient

    client = MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'plastic-neural-networks'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "tracked"
    assert run.info.status == "FINISHED"
    assert run.data.params["training.max_steps"] == "4"
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")] == losses
    assert "validation_loss" in run.data.metrics


def test_trackio(tiny_config, pnn_command, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    losses = trained(tiny_config, pnn_command, tmp_path, monkeypatch, "trackio")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("plastic-neural-networks")
    assert run.name == "tracked"
    assert run.config["training.max_steps"] == 4
    logs = SQLiteStorage.get_logs("plastic-neural-networks", "tracked")
    assert [(one["step"], one["loss"]) for one in logs if "loss" in one] == losses


def test_wandb_without_its_server(tiny_config, pnn_command, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trained(tiny_config, pnn_command, tmp_path, monkeypatch, "wandb")
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"validation_loss" in written.read_bytes()


def test_a_tracker_that_is_not_installed(tiny_config, pnn_command, tmp_path):
    missing = next((name for name in ("wandb", "mlflow", "trackio") if importlib.util.find_spec(name) is None), None)
    if missing is None:
        pytest.skip("all of them are installed")
    config = tiny_config("tracked", training={**SETTINGS, "trackers": [missing]})
    code, _, err = pnn_command("train", config, "--output", tmp_path / "run")
    assert code == 2
    assert f"training.trackers: {missing} is not installed: pip install {missing}" in err
    assert not (tmp_path / "run").exists()
