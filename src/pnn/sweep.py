"""A grid of trainings in one command: configs × values of keys × seeds, and what they say of one another.

    sweeps/<name>/sweep.yaml                           what was asked for
                  <arm>/seed-0/ seed-1/ …              run folders
                  sweep.json  figures/sweep.png        what came out

A sweep that was stopped goes on with the same command: finished runs are kept, started ones resume. A run that fails is told
and left out; the others go on.

Every arm is compared with the first. Two arms that share seeds are paired by them, and, where both read the same masked tokens,
by sequences: the interval is a bootstrap over seeds and sequences together, and Student's t over seeds stands beside it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from pnn.config import RunConfig, load_config
from pnn.data.shards import prepare
from pnn.errors import UserError
from pnn.files import is_taken, make_folder, remove_leftovers, write_json, write_text
from pnn.kinds import of_result
from pnn.progress import say, track
from pnn.results import texts_of
from pnn.runs import BY_SEQUENCE, check_free, is_finished, read_json
from pnn.stats import Estimate, seeds_and_sequences, student
from pnn.training.jobs import Job, train_jobs
from pnn.training.updates import Plan

ON_A_GPU = 2  # runs at a time: one computes while the other starts, evaluates or writes


@dataclass(frozen=True)
class Arm:
    """One config with one value of each key."""

    config: str
    settings: tuple[str, ...]
    name: str


def arms_of(configs: Sequence[str], over: Sequence[str]) -> list[Arm]:
    """`over`: section.key=a,b,c. Values are YAML, so lists have brackets."""
    axes = []
    for one in over:
        key, sign, text = one.partition("=")
        try:
            values = yaml.safe_load(f"[{text}]") if sign else None
        except yaml.YAMLError:
            values = None
        if not values or not key:
            raise UserError(f'--over "{one}": expected section.key=value,value,… as in training.learning_rate=3e-4,1e-3')
        axes.append([(key, yaml.safe_dump(value, default_flow_style=True, width=math.inf).splitlines()[0]) for value in values])
    arms = []
    for config, chosen in itertools.product(configs, itertools.product(*axes)):
        words = [f"{key.rpartition('.')[2]}={value}" for key, value in chosen]
        stem = [Path(config).stem] if len(configs) > 1 or not words else []
        arms.append(Arm(config, tuple(f"{key}={value}" for key, value in chosen), " ".join([*stem, *words])))
    if len({_folder_name(arm.name) for arm in arms}) < len(arms):
        raise UserError("the sweep has two arms of one name: a config or a value is given twice")
    return arms


def run_sweep(
    configs: Sequence[str],
    over: Sequence[str],
    seeds: int,
    settings: Sequence[str],
    output: Path | None,
    at_once: int | None = None,
) -> tuple[dict[str, Any], Path]:
    """Train what is missing, compare, write. Returns what sweep.json holds, and the folder."""
    arms = arms_of(configs, over)
    folder = output or Path("sweeps") / Path(configs[0]).stem

    def words(arm: Arm, seed: int) -> list[str]:
        return [*settings, *arm.settings, f"training.seed={seed}", f"name={_folder_name(arm.name)}-{seed}"]

    loaded = {(arm, seed): load_config(arm.config, words(arm, seed)) for arm in arms for seed in range(seeds)}
    asked = {"configs": list(configs), "over": list(over), "seeds": seeds, "settings": list(settings)}
    _claim(folder, asked)
    jobs = {}
    for arm in arms:
        updates = _updates(loaded[arm, 0])
        for seed in range(seeds):
            run = folder / _folder_name(arm.name) / f"seed-{seed}"
            check_free(run, loaded[arm, seed], resume=(run / "config.yaml").exists())
            jobs[f"{arm.name} seed {seed}"] = Job(arm.config, words(arm, seed), run, updates)
    failed = train_jobs(jobs, at_once or default_at_once(), keep_going=True)
    for name, why in failed.items():
        say(f"{name} failed and is left out: {why}")
    result = {**asked, "arms": _compared(arms, folder, seeds), "failed": failed}
    write_json(folder / "sweep.json", result)
    return result, folder


def default_at_once() -> int:
    return ON_A_GPU if torch.cuda.is_available() else max(1, (os.cpu_count() or 1) // 2)


def _claim(folder: Path, asked: dict[str, Any]) -> None:
    """The folder of a new sweep, or of the same one. More seeds may be asked for later."""
    held = folder / "sweep.yaml"
    if held.exists():
        try:
            before = yaml.safe_load(held.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            before = None
        if not isinstance(before, dict):
            raise UserError(f"{held} is damaged: choose another --output")
        different = [key for key in ("configs", "over", "settings") if before.get(key) != asked[key]]
        if different:
            was = f"its {different[0]}: {before.get(different[0])}"
            raise UserError(f"{folder} holds another sweep ({was}): choose another --output")
    elif is_taken(folder):
        raise UserError(f"{folder} already holds other files: choose another --output")
    make_folder(folder)
    remove_leftovers(folder)
    write_text(held, yaml.safe_dump(asked, sort_keys=False))


def _folder_name(arm: str) -> str:
    return "".join(c if c.isalnum() or c in "-_=." else "-" for c in arm)


def _updates(config: RunConfig) -> int:
    """For the bars; the text is prepared here, once, and not by several runs at the same time."""
    return Plan.of(config, prepare(config.data, track), processes=1).updates


# What came out --------------------------------------------------------------------------------------------------------


def _compared(arms: Sequence[Arm], folder: Path, seeds: int) -> list[dict[str, Any]]:
    runs: dict[str, dict[int, Any]] = {arm.name: {} for arm in arms}
    for arm, seed in itertools.product(arms, range(seeds)):
        read = _read(folder / _folder_name(arm.name) / f"seed-{seed}")
        if read is not None:
            runs[arm.name][seed] = read
    rows = []
    for arm in arms:
        found = runs[arm.name]
        texts = list(next(iter(found.values()))["texts"]) if found else []
        row: dict[str, Any] = {"name": arm.name, "settings": list(arm.settings), "seeds": list(found)}
        if found:
            row["parameters"] = next(iter(found.values()))["parameters"]
        for text in texts:
            values = [found[seed]["texts"][text]["value"] for seed in found]
            row.setdefault("texts", {})[text] = {
                "measure": found[next(iter(found))]["texts"][text]["measure"],
                "by_seed": values,
                **student(values).as_json(),
                "against_first": _difference(runs[arms[0].name], found, text) if arm is not arms[0] else None,
            }
        rows.append(row)
    return rows


def _read(run: Path) -> dict[str, Any] | None:
    """One finished run: its number on each text, and the totals of each sequence where there are any."""
    if not is_finished(run):
        return None
    evaluation = read_json(run / "evaluation.json")
    totals = read_json(run / BY_SEQUENCE) if (run / BY_SEQUENCE).exists() else {}
    measure = "accuracy" if of_result(evaluation).masked else "loss"
    return {
        "parameters": evaluation["parameters"],
        "texts": {
            name: {"measure": measure, "value": text[measure], "totals": totals.get(name)}
            for name, text in texts_of(evaluation).items()
        },
    }


def _difference(first: dict[int, Any], other: dict[int, Any], text: str) -> dict[str, Any] | None:
    """How far `other` is above `first`, by the seeds that both have."""
    shared = [seed for seed in first if seed in other and text in first[seed]["texts"] and text in other[seed]["texts"]]
    if not shared:
        return None
    pairs = [(first[seed]["texts"][text], other[seed]["texts"][text]) for seed in shared]
    by_seed = student([b["value"] - a["value"] for a, b in pairs])
    drawn: Estimate | None = None
    if all(a["totals"] and b["totals"] and a["totals"]["targets"] == b["totals"]["targets"] for a, b in pairs):
        measure = "correct" if pairs[0][0]["measure"] == "accuracy" else "loss"
        targets = np.array(pairs[0][0]["totals"]["targets"], dtype=np.float64)
        gains: NDArray[np.float64] = np.array(
            [np.subtract(b["totals"][measure], a["totals"][measure]) for a, b in pairs], dtype=np.float64
        )
        drawn = seeds_and_sequences(gains, targets)
    return {
        "seeds": shared,
        "over_seeds": by_seed.as_json(),
        "over_seeds_and_sequences": None if drawn is None else drawn.as_json(),
    }
