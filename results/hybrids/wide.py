"""The question at width 768 on Wikipedia, beside the comparison with BERT: its text, its recipe, and `looped` is PNN-rewrite,
whose runs serve both. What is compared is how many masked tokens of WikiText-103 valid each arm gets right, which no choice
depends on; the held-out tail says which arms continue."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "better_than_bert"))
from comparison import OURS, TEXT, Run, finished, right
from keep import copy_in

from pnn.differences import accuracies_apart
from pnn.models.sections import model_config
from pnn.numbers import per_cent, short_count
from pnn.results import SequenceTotals
from pnn.schedule import order
from pnn.stats import student

MEASURED = Path(__file__).resolve().parent / "measured" / "wide"
COMPARISON = Path(__file__).resolve().parent.parent / "better_than_bert" / "measured"
FIRST = "looped"
LOOKS, SEEDS = "looks", "a"  # one epoch and one seed; three epochs and three seeds: the parts as the comparison calls them
WANTED = 3  # seeds; the comparison has more of `looped`

Arms = dict[str, dict[int, Run]]


def keep(runs: Path) -> None:
    copy_in(runs, MEASURED)


def arms_of(part: str) -> Arms:
    """By arm and seed, as far as they are there. `looped` had a look with learned positions too, which no other arm has."""
    found: Arms = {}
    for run in finished(MEASURED):
        if run.part == part:
            found.setdefault(run.arm, {})[run.seed] = run
    shared = [run for run in finished(COMPARISON) if run.model == OURS and run.seed < WANTED]
    if part == SEEDS:
        loop = {run.seed: run for run in shared if run.stage == SEEDS}
    else:
        loop = {run.seed: run for run in shared if run.part == LOOKS and run.positions == "rotary"}
    return ({FIRST: loop} if loop else {}) | found


def result_of(pairs_among: Callable[[list[str]], list[tuple[str, str]]]) -> dict[str, Any] | None:
    """In the form of `pnn sweep`'s result. None before there is an arm beside `looped`."""
    looks, arms = arms_of(LOOKS), arms_of(SEEDS)
    if len(looks) < 2 and len(arms) < 2:
        return None
    one = next(iter(next(iter((arms or looks).values())).values()))
    return {
        "text": TEXT,
        "seeds": WANTED,
        "hardware": one.environment["hardware"],
        "looks": {name: runs[0].tail for name, runs in looks.items()},
        "arms": [row(name, runs) for name, runs in arms.items()],
        "pairs": [found for one, other in pairs_among([*arms]) if (found := apart(one, other, arms)) is not None],
    }


def row(name: str, runs: dict[int, Run]) -> dict[str, Any]:
    found = [runs[seed].evaluation["sets"][TEXT]["accuracy"] for seed in sorted(runs)]
    over = student(found)
    text = {"measure": "accuracy", "by_seed": found, **over.as_json(), "against_first": None}
    any_run = next(iter(runs.values()))
    return {
        "name": name,
        "seeds": sorted(runs),
        "parameters": any_run.evaluation["parameters"],
        "schedule": schedule_of(any_run),
        "texts": {TEXT: text},
    }


def schedule_of(run: Run) -> list[int]:
    config = model_config(run.config.model)
    return order(config.schedule, config.repeat, config.num_steps)


def apart(one: str, other: str, arms: Arms) -> dict[str, Any] | None:
    """How far the accuracy of one arm lies above another's, paired by seed and by sequence."""
    if not arms[one].keys() & arms[other].keys():
        return None
    return {
        "arms": [one, other],
        **accuracies_apart(*({run.folder.name: totals_of(run) for run in arms[name].values()} for name in (one, other))),
    }


def totals_of(run: Run) -> SequenceTotals:
    correct, targets = right([run])
    return {"correct": correct[0].tolist(), "targets": targets.tolist(), "loss": []}


def looks_table(result: dict[str, Any]) -> str:
    runs = arms_of(LOOKS)
    lines = ["| arm, one epoch | schedule | parameters | tail |", "|---|---|---|---|"]
    for name, tail in sorted(result["looks"].items(), key=lambda one: -one[1]):
        run = runs[name][0]
        size = short_count(run.evaluation["parameters"])
        lines.append(f"| `{name}` | {' '.join(map(str, schedule_of(run)))} | {size} | {per_cent(tail)} |")
    return "\n".join(lines)
