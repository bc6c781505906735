"""The main job at a small size: a PNN, its rewriting form and a BERT baseline on the embedded corpus, evaluated, the PNN
analysed, and a page about all three.

The models train side by side, each in a process of its own with its share of the cores. That takes as long as one after the
other with all cores (operations this small hardly spread over threads) and does not stall when something else wants a core:
threads that wait for each other would, a hundredfold.
"""

from __future__ import annotations

from pathlib import Path

from pnn.config import load_config
from pnn.data.shards import prepare
from pnn.progress import say, track
from pnn.report.page import write_report
from pnn.results import Evaluation
from pnn.runs import check_free, is_finished, read_json
from pnn.studies.registry import why_not
from pnn.studies.run import analyse, open_run
from pnn.training.jobs import Job, train_jobs

MODELS = ("pnn", "rewrite", "bert")


def run_quickstart(folder: Path, settings: list[str]) -> tuple[dict[str, Evaluation], Path]:
    """Finished runs are kept: a second call trains only what is missing, and goes on with what was interrupted."""
    runs = {name: folder / name for name in MODELS}
    configs = {name: load_config(f"quickstart_{name}", settings) for name in MODELS}
    for name, run in runs.items():
        check_free(run, configs[name], resume=(run / "config.yaml").exists())  # what is kept must be what is asked for
    if not all(map(is_finished, runs.values())):
        prepare(configs["pnn"].data, track)  # once, here: the text of all is the same
        updates = {name: config.training.max_steps or 0 for name, config in configs.items()}
        jobs = {name: Job(f"quickstart_{name}", settings, run, updates[name]) for name, run in runs.items()}
        train_jobs(jobs, at_once=len(jobs))
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
