"""Two real processes (gloo) must follow the single process's loss curve."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def losses(run: Path) -> list[float]:
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in parsed if "loss" in row]


def test_two_processes_give_the_single_processs_curve(tiny_config, tmp_path):
    config = tiny_config(model={"dropout": 0.0}, training={"max_steps": 50, "save_every": 50, "evaluate_every": 50})
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    single, double = tmp_path / "single", tmp_path / "double"
    train = ["-m", "pnn", "train", str(config), "--output"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command in ([*train, single], [*launch, *train, double]):
        done = subprocess.run(
            [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
    environment_json = json.loads((double / "environment.json").read_text())
    assert environment_json["hardware"]["processes"] == 2
    one, two = losses(single), losses(double)
    assert len(one) == len(two) == 50
    assert one[-1] < one[0] - 1  # it did learn
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-5
