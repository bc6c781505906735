"""Trainings as processes: several at a time where the device has room, each in a run folder, each able to go on later.

A training that saves when it is told to stop, and resumes to the same bits, needs nothing else to be one of many: a job whose
folder holds a run goes on with it, unless it is finished.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from pnn.errors import UserError
from pnn.progress import Bars
from pnn.runs import is_finished, read_metrics

POLL = 0.3  # seconds
ROOM = 1.2  # times the memory that a running job takes, free before another starts beside it


@dataclass(frozen=True)
class Job:
    config: str  # a shipped config's name, or a path
    settings: Sequence[str]  # section.key=value
    run: Path
    updates: int  # for the bar

    @property
    def done(self) -> bool:
        return is_finished(self.run)

    @property
    def words(self) -> list[str]:
        """Of the command line."""
        settings = [word for setting in self.settings for word in ("--set", setting)]
        resume = ["--resume"] if (self.run / "config.yaml").exists() else []
        return ["train", self.config, "--output", str(self.run), *settings, *resume]

    def start(self, threads: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        command = [sys.executable, "-m", "pnn", *self.words]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)

    def last_row(self) -> dict[str, float] | None:
        """What it logged last."""
        rows = [row for row in read_metrics(self.run / "metrics.jsonl") if "loss" in row]
        return rows[-1] if rows else None


def train_jobs(jobs: Mapping[str, Job], at_once: int, *, keep_going: bool = False) -> dict[str, str]:
    """Train all that are not done, at most so many at a time. A failure ends everything, or with `keep_going` only its own job:
    returned are the last lines of those that failed, by name."""
    waiting = [name for name, job in jobs.items() if not job.done]
    threads = max(1, (os.cpu_count() or 1) // max(1, min(at_once, len(waiting))))
    running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
    failed: dict[str, str] = {}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # being told to stop is as good as Ctrl-C
    try:
        with Bars({name: jobs[name].updates for name in waiting}) as bars:
            while waiting or running:
                if waiting and len(running) < at_once and has_room([jobs[name] for name in running]):
                    name = waiting.pop(0)
                    log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (read when the process ends)
                    running[name] = jobs[name].start(threads, log), log
                    continue
                time.sleep(POLL)
                for name, (process, log) in list(running.items()):
                    row = jobs[name].last_row()
                    if row is not None:
                        bars.update(name, int(row["step"]), f"loss {row['loss']:.3f}  {row['tokens_per_second']:,.0f} tokens/s")
                    if process.poll() is None:
                        continue
                    del running[name]
                    if process.returncode:
                        failed[name] = _last_line(log)
                        if not keep_going:
                            raise UserError(f"training {name} failed: {failed[name]}")
                    log.close()
    except KeyboardInterrupt:
        raise UserError("stopped; the same command continues from the last checkpoints") from None
    finally:
        for process, log in running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # it saves, then stops
            process.wait()
            log.close()
        signal.signal(signal.SIGTERM, before)
    return failed


def has_room(running: Sequence[Job]) -> bool:
    """Whether the GPU takes one more: those that run have logged, so what they need shows, and as much is free, and a fifth."""
    if not running or not torch.cuda.is_available():
        return True
    if any(job.last_row() is None for job in running):
        return False
    free, total = torch.cuda.mem_get_info()
    return free > ROOM * (total - free) / len(running)


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("pnn: ") if lines else "no message"
