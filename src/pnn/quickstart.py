"""The main job at a small size: a PNN and a BERT baseline on the embedded corpus, evaluated, and a page about both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pnn.config import load_config
from pnn.report.page import write_report
from pnn.runs import read_json
from pnn.training.run import train_run

MODELS = ("pnn", "bert")


def run_quickstart(folder: Path) -> tuple[dict[str, dict[str, Any]], Path]:
    """Finished runs are kept: a second call trains only what is missing, and an interrupted one is resumed."""
    runs = {name: folder / name for name in MODELS}
    for name, run in runs.items():
        if not (run / "evaluation.json").exists():
            train_run(load_config(f"quickstart_{name}"), run, resume=(run / "config.yaml").exists())
    page = write_report(list(runs.values()), folder / "report.html")
    return {name: read_json(run / "evaluation.json") for name, run in runs.items()}, page
