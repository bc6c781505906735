"""Rows of training with one process and with two, each of one thread (or one GPU), at the same effective batch.

Each row is timed in processes of its own, started as a user starts them: plainly, or by `torchrun` (gloo on CPUs, NCCL on
GPUs). With two processes every micro-batch is shared between them, so both do the same updates. Two processes on one GPU
would only take turns, so a machine with fewer GPUs than processes times its CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from pnn.bench.timing import Budget
from pnn.bench.training import train_row
from pnn.config import RunConfig, load_config
from pnn.errors import UserError
from pnn.files import write_json

MOST = 2  # processes


def check_shape(run: RunConfig) -> None:
    if run.training.batch_size % MOST:
        raise UserError(
            f"training.batch_size: {run.training.batch_size} sequences cannot be shared between {MOST} processes: "
            f"choose a multiple of {MOST}"
        )


def process_name(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def processes_row(run: RunConfig, budget: Budget, count: int) -> dict[str, Any]:
    """Start `count` processes, let them train, and take the first one's row."""
    shared = replace(run.training, batch_size=run.training.batch_size // count)
    if torch.cuda.device_count() < MOST:
        shared = replace(shared, device="cpu", precision="fp32" if shared.precision == "fp16" else shared.precision)
    launch = [] if count == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    with tempfile.TemporaryDirectory() as folder:
        config, settings, out = (Path(folder) / name for name in ("config.yaml", "budget.json", "row.json"))
        config.write_text(replace(run, training=shared).to_yaml(), encoding="utf-8")
        write_json(settings, asdict(budget))
        command = [sys.executable, *launch, "-m", "pnn.bench.processes", str(config), str(settings), str(out)]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if "OutOfMemoryError" in done.stderr:
            raise torch.OutOfMemoryError(f"{process_name(count)} ran out of memory")
        if done.returncode:
            raise RuntimeError(f"{process_name(count)} failed:\n{done.stderr[-3000:]}")
        row: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return row


def main(config: str, settings: str, out: str) -> None:
    """One of the processes."""
    run = load_config(config)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    budget = Budget(**json.loads(Path(settings).read_text(encoding="utf-8")))
    row = train_row(run, budget, process_name(count))
    row |= {"what": "processes", "processes": count, "threads_per_process": torch.get_num_threads()}
    if int(os.environ.get("RANK", "0")) == 0:
        write_json(Path(out), row)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
