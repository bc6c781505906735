"""Two real processes (gloo) must follow the single process's loss curve."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def losses(run: Path) -> list[float]:
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in parsed if "loss" in row]


def test_two_processes_give_the_single_processs_curve(start_processes, tiny_config, tmp_path):
    config = tiny_config(model={"dropout": 0.0}, training={"max_steps": 50, "save_every": 50, "evaluate_every": 50})
    single, double = tmp_path / "single", tmp_path / "double"
    for run, processes in ((single, 1), (double, 2)):
        for process in start_processes(processes, "train", config, "--output", run):
            assert process.wait() == 0, process.output()
    environment_json = json.loads((double / "environment.json").read_text())
    assert environment_json["hardware"]["processes"] == 2
    one, two = losses(single), losses(double)
    assert len(one) == len(two) == 50
    assert one[-1] < one[0] - 1  # it did learn
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-5
