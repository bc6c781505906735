"""Makes all figures of the site anew, into docs/images: `make figures`, about ten minutes on two CPU cores.

First the commands that the pages show, on the embedded corpus, into runs/site. Then the drawings, from what they wrote.
`--redraw` draws again without training. A run's own figures are PNG; those of the site are SVG, sharp at any size.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from pnn.evaluation.refining import refining
from pnn.figures.accuracy import accuracy_by_kind
from pnn.figures.architecture import architecture
from pnn.figures.plasticity import circle, heads
from pnn.figures.studies import figure_of
from pnn.figures.style import save, svg
from pnn.files import write_text
from pnn.models.loading import load_run
from pnn.runs import read_json, read_metrics

ROOT = Path(__file__).resolve().parents[1]
RUNS, IMAGES = ROOT / "runs" / "site", ROOT / "docs" / "images"
TEXT = "the fox of avon wore amber hats . it has old [MASK] boots . this fox is shy in [MASK] ."  # that the first page rewrites
COMMANDS = (
    "quickstart",
    "train ddl_tiny",
    "analyze rewrites runs/ddl_tiny",
    "train gpt2_tiny",
    "plasticity cycle runs/gpt2_tiny --data synthetic --prune 0.3 --grow 0.1 --learn-steps 100 --output runs/reorganised",
)


def measure() -> None:
    shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    for command in COMMANDS:
        print(f"pnn {command}", flush=True)
        subprocess.run([sys.executable, "-m", "pnn", *command.split()], cwd=RUNS, env=environment, check=True)


def draw() -> None:
    runs = RUNS / "runs"
    quickstart = {name: runs / "quickstart" / name for name in ("pnn", "rewrite", "bert")}
    configs = {name: read_json(run / "checkpoints" / "best" / "config.json") for name, run in quickstart.items()}
    evaluations = {name: read_json(run / "evaluation.json") for name, run in quickstart.items()}
    cycle = read_metrics(runs / "reorganised" / "metrics.jsonl")
    figures = {
        "quickstart_architecture": architecture(configs, evaluations),
        "quickstart_accuracy_by_kind": accuracy_by_kind(evaluations),
        "quickstart_convergence": figure_of("convergence")(read_json(quickstart["pnn"] / "analysis" / "convergence.json")),
        "ddl_tiny_rewrites": figure_of("rewrites")(read_json(runs / "ddl_tiny" / "analysis" / "rewrites.json")),
        "cycle_circle": circle(cycle),
        "cycle_heads": heads(cycle),
    }
    shown = {name: refining(load_run(run), TEXT, top=3) for name, run in quickstart.items()}
    write_text(ROOT / "docs" / "refining.json", json.dumps(shown) + "\n")
    for name, figure in figures.items():
        path = save(svg(figure), IMAGES / f"{name}.svg")
        print(f"{path.relative_to(ROOT)}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    if "--redraw" not in sys.argv:
        measure()
    draw()
