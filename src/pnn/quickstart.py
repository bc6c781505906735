"""The main job at a small size: a PNN and a BERT baseline on the embedded corpus, evaluated, the PNN analysed, and a page
about both.

The two models train side by side, each in a process of its own with half of the cores. That takes as long as one after the
other with all cores (operations this small hardly spread over threads) and does not stall when something else wants a core:
threads that wait for each other would, a hundredfold.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from pnn.config import load_config
from pnn.data.shards import prepare
from pnn.errors import UserError
from pnn.progress import Bars, say, track
from pnn.report.page import write_report
from pnn.runs import check_free, read_json, read_metrics
from pnn.studies.registry import why_not
from pnn.studies.run import analyse, open_run

MODELS = ("pnn", "bert")


def run_quickstart(folder: Path, settings: list[str]) -> tuple[dict[str, dict[str, Any]], Path]:
    """Finished runs are kept: a second call trains only what is missing, and goes on with what was interrupted."""
    runs = {name: folder / name for name in MODELS}
    configs = {name: load_config(f"quickstart_{name}", settings) for name in MODELS}
    for name, run in runs.items():
        check_free(run, configs[name], resume=(run / "config.yaml").exists())  # what is kept must be what is asked for
    unfinished = {name: run for name, run in runs.items() if not (run / "evaluation.json").exists()}
    if unfinished:
        prepare(configs["pnn"].data, track)  # once, here: the text of both is the same
        _train_side_by_side(unfinished, settings, {name: configs[name].training.max_steps or 0 for name in unfinished})
    _analyse(runs["pnn"])
    page = write_report(list(runs.values()), folder / "report.html")
    return {name: read_json(run / "evaluation.json") for name, run in runs.items()}, page


def _analyse(run: Path) -> None:
    """How its predictions settle and what its gates do, unless that is known already."""
    wanted = [name for name in ("convergence", "gates") if not (run / "analysis" / f"{name}.json").exists()]
    if wanted:
        opened = open_run(run, progress=track)
        for name in wanted:
            if why_not(name, opened.subject.model) is None:
                say(f"analysing {name} …")
                analyse(opened, name)


def _train_side_by_side(runs: dict[str, Path], settings: list[str], updates: dict[str, int]) -> None:
    threads = max(1, (os.cpu_count() or 1) // len(runs))
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    processes: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # being told to stop is as good as Ctrl-C
    try:
        for name, run in runs.items():
            command = [sys.executable, "-m", "pnn", "train", f"quickstart_{name}", "--output", str(run)]
            command += [word for setting in settings for word in ("--set", setting)]
            command += ["--resume"] if (run / "config.yaml").exists() else []
            log = tempfile.TemporaryFile()  # noqa: SIM115  (read when the process ends)
            processes[name] = (subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log), log)
        with Bars(updates) as bars:
            running = True
            while running:
                time.sleep(0.3)
                codes = {name: process.poll() for name, (process, _) in processes.items()}
                running = None in codes.values()
                for name, run in runs.items():
                    _show(bars, name, run)
                    if codes[name]:
                        raise UserError(f"training {name} failed: {_last_line(processes[name][1])}")
    except KeyboardInterrupt:
        raise UserError("stopped; the same command goes on from the last checkpoints") from None
    finally:
        for process, errors in processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # it saves, then stops
            process.wait()
            errors.close()
        signal.signal(signal.SIGTERM, before)


def _show(bars: Bars, name: str, run: Path) -> None:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    if rows:
        bars.update(name, rows[-1]["step"], f"loss {rows[-1]['loss']:.3f}  {rows[-1]['tokens_per_second']:,.0f} tokens/s")


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("pnn: ") if lines else "no message"
