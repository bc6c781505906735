"""What a run writes about itself: environment.json, metrics.jsonl, and TensorBoard and other trackers beside it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from pnn.code_version import code_version, source_digest
from pnn.config import RunConfig
from pnn.errors import UserError
from pnn.files import room_on_disk, write_text
from pnn.runs import flat, read_metrics

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "safetensors", "numpy", "triton", "datasets")


def environment(seed: int, processes: int) -> dict[str, Any]:
    """Git state, versions, hardware and seed: what somebody needs to repeat the run."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "git": code_version(),
        "source_sha256": source_digest(),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {
            "gpus": gpus,
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "processes": processes,
        },
        "seed": seed,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for package in ("plastic-neural-networks", *PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_trackers(config: RunConfig) -> None:
    """accelerate would leave out in silence what is not installed."""
    for name in config.training.trackers or ():
        if importlib.util.find_spec(name) is None:
            raise UserError(f"training.trackers: {name} is not installed: pip install {name}")


def start_trackers(accelerator: Accelerator, config: RunConfig, step: int) -> None:
    """TensorBoard in the run folder; others where they keep their runs, in the project plastic-neural-networks. What they need
    to know (an address, a key) they find in their own settings and environment variables."""
    if config.training.tensorboard:
        accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": step + 1}})
    if accelerator.is_main_process:  # wandb's and trackio's would start on every process
        for name in config.training.trackers or ():
            called = {"run_name" if name == "mlflow" else "name": config.name}
            tracker = LOGGER_TYPE_TO_CLASS[name]("plastic-neural-networks", **called)
            tracker.start()
            tracker.store_init_configuration(flat(config.to_dict()))
            accelerator.trackers.append(tracker)


class Metrics:
    """metrics.jsonl: one JSON object a line, each with `step`. Opened at a step, it forgets what came after: a resumed run's
    file equals that of the run that was never stopped."""

    def __init__(self, path: Path, step: int):
        self.path = path
        before = [row for row in read_metrics(path, ["step"]) if row["step"] <= step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in before))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (open for the whole run)

    def write(self, row: dict[str, Any]) -> None:
        # JSON has no infinity, which a gradient norm may be where fp16 skips an update
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        with room_on_disk(self.path):
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()
