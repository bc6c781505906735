"""The study: all arms of all models and seeds, in a folder that any number of processes can work on.

    FOLDER/  plan.json (what was asked for)  environment.json  models/<model>.json (each before anything is done to it)
             scores/<model>-<seed>-<measure>.json   arms/<model>-<seed>-<arm>.json   speed/<model>.json
             study.json (tables and verdicts)   figures/

An arm's file is written whole when the arm is done. A process claims an arm, or the scores that several arms share, by a lock
that goes when the process goes, so a killed study goes on with what is missing, and what was being worked on is done again.
Small models leave a GPU waiting for the host: several processes (`jobs`) share it well. Speeds are measured at the end, when
one process is left. No weights are kept.

A folder's study.json follows from its files alone.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.files import make_folder, remove_leftovers, write_json
from pnn.memory import out_of_memory_says
from pnn.plasticity.architectures import HEAD
from pnn.plasticity.cycle import fingerprint
from pnn.plasticity.journal import check_free, check_same
from pnn.plasticity.measure import speeds
from pnn.plasticity.phases import score_heads
from pnn.plasticity.run import open_model
from pnn.plasticity.scores import Scores
from pnn.plasticity.surgery import reorganised
from pnn.plasticity.text import Text, read_text
from pnn.progress import say, track
from pnn.runs import read_json
from pnn.studies.plasticity.arms import (
    CONTROL,
    CYCLE,
    FIRST_ROUND,
    Arm,
    StudySettings,
    all_arms,
    check_arms,
    cycle_of,
    initial,
    run_arm,
)
from pnn.studies.plasticity.findings import findings
from pnn.training.tracking import environment

WAIT = 0.2  # seconds before looking again at arms that other processes are working on


@dataclass(frozen=True)
class Source:
    """A model and its text, by name."""

    name: str
    model: str
    data: str
    validation: str | None
    length: int | None
    held_out_rows: int


@dataclass(frozen=True)
class Job:
    source: Source
    seed: int
    arm: Arm

    @property
    def name(self) -> str:
        return f"{self.source.name}-{self.seed}-{self.arm.name}"


def sources_of(
    models: Sequence[str], data: Sequence[str], validation: str | None, length: int | None, held_out_rows: int
) -> list[Source]:
    """One text for all models, or one for each."""
    if len(data) not in (1, len(models)):
        raise UserError(f"--data was given {len(data)} times: once for all models, or once for each of the {len(models)}")
    texts = list(data) * len(models) if len(data) == 1 else list(data)
    names = [Path(one).resolve().name if Path(one).exists() else one.replace("/", "--") for one in models]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two models are called {twice}: results are named after folders, so rename one")
    found = zip(names, models, texts, strict=True)
    return [Source(name, model, text, validation, length, held_out_rows) for name, model, text in found]


def run_study(
    folder: Path, sources: list[Source], plan: StudySettings, *, jobs: int = 1, resume: bool = False
) -> dict[str, Any]:
    """Do what is missing of the study in this folder; returns study.json."""
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: expected 1 or more")
    used = check_free(folder, resume)
    if used and not (folder / "plan.json").exists():
        raise UserError(f"cannot resume {folder}: it holds files but no plan.json, so it is not a study's folder")
    _start(folder, sources, plan)
    if jobs == 1:
        work(folder, sources, plan)
    else:
        _work_together(folder, sources, plan, jobs)
    for source in sources:
        _measure_speed(folder, source, plan)
    result = collect(folder)
    write_json(folder / "study.json", result)
    return result


def collect(*folders: Path) -> dict[str, Any]:
    """study.json, from the other files of a folder; several folders with the same settings make one study."""
    models: dict[str, Any] = {}
    arms: dict[str, list[dict[str, Any]]] = {}
    speed: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for folder in folders:
        plan = read_json(folder / "plan.json")
        if settings and plan["settings"] != settings:
            raise UserError(f"{folder} has other settings than {folders[0]}: {plan['settings']} and {settings}")
        settings = plan["settings"]
        for name in plan["models"]:
            if name in models:
                raise UserError(f"{folder}: {name} is in another folder too")
            jobs = [(seed, arm) for seed in range(settings["seeds"]) for arm in all_arms()]
            models[name] = read_json(folder / "models" / f"{name}.json")
            arms[name] = [read_json(folder / "arms" / f"{name}-{seed}-{arm.name}.json") for seed, arm in jobs]
            timed = folder / "speed" / f"{name}.json"
            if timed.exists():  # they come last, and can be timed again
                speed[name] = read_json(timed)
    return {"models": models, "settings": settings, **findings(models, arms), "speed": speed}


def _start(folder: Path, sources: list[Source], plan: StudySettings) -> None:
    """What can be wrong is found before any arm runs; texts are tokenised here, so that processes need not."""
    benches = []
    asked: dict[str, Any] = {"models": {}, "settings": asdict(plan)}
    for source in sources:
        bench = Bench(source, plan)
        check_arms(bench.model, source.name)
        asked["models"][source.name] = {"weights": fingerprint(bench.model), "text": bench.text.fingerprint()}
        benches.append(bench)
    held = folder / "plan.json"
    remove_leftovers(folder)
    if held.exists():
        before = read_json(held)
        if list(before["models"]) != list(asked["models"]):
            raise UserError(f"cannot resume {folder}: its models are {', '.join(before['models'])}")
        check_same(folder, before["settings"], asked["settings"], "study")
        for name, found in asked["models"].items():
            check_same(folder, before["models"][name], found, f"study of {name}")
    if not held.exists():
        make_folder(folder)
        write_json(held, asked)  # first: by it a folder is known
    for part in ("models", "scores", "arms", "speed", "claims", "figures"):
        make_folder(folder / part)
    if not (folder / "environment.json").exists():
        write_json(folder / "environment.json", environment(0, 1))
    for bench in benches:
        path = folder / "models" / f"{bench.source.name}.json"
        if not path.exists():
            write_json(path, initial(bench.model, bench.text))


# Working --------------------------------------------------------------------------------------------------------------


class Bench:
    """A model with its text, ready for arms."""

    def __init__(self, source: Source, plan: StudySettings):
        loaded = open_model(source.model)
        self.source = source
        self.model: PreTrainedModel = loaded.model
        self.text: Text = read_text(
            loaded.model,
            loaded.tokenizer,
            source.data,
            validation=source.validation,
            length=source.length,
            train_rows=plan.rows_needed(),
            held_out_rows=source.held_out_rows,
            progress=track,
        )


def work(folder: Path, sources: list[Source], plan: StudySettings) -> None:
    """Run arms that nobody else is running until all are done."""
    pending = [Job(source, seed, arm) for source in sources for seed in range(plan.seeds) for arm in all_arms()]
    benches: dict[str, Bench] = {}
    while pending:
        before = len(pending)
        pending = [job for job in pending if not _done(folder, job, plan, benches)]
        if len(pending) == before:
            time.sleep(WAIT)


def _done(folder: Path, job: Job, plan: StudySettings, benches: dict[str, Bench]) -> bool:
    """Run the arm if it is free; whether its result is there."""
    path = folder / "arms" / f"{job.name}.json"
    if path.exists():
        return True
    with claimed(folder, job.name) as mine:
        if not mine:
            return False
        if path.exists():
            return True
        source = job.source
        bench = benches.get(source.name) or benches.setdefault(source.name, Bench(source, plan))
        with out_of_memory_says(lambda: f"in arm {job.name}: fewer --jobs or a smaller --batch-size need less"):
            scores = _scores(folder, bench, job, plan)
            if scores is None:
                return False
            write_json(path, run_arm(bench.model, bench.text, job.arm, plan, job.seed, scores) | {"model": source.name})
    result = read_json(path)
    so_far = sum(1 for _ in (folder / "arms").glob("*.json"))
    say(f"{so_far} arms done: {job.name}: {result['heads']} heads, perplexity {result['perplexity']:.3f}")
    return True


def _scores(folder: Path, bench: Bench, job: Job, plan: StudySettings) -> Scores | None:
    """Of this model and seed, by the arm's measure, computed once; None while another process computes them."""
    name = f"{bench.source.name}-{job.seed}-{job.arm.prune_by}"
    path = folder / "scores" / f"{name}.json"
    if not path.exists():
        with claimed(folder, f"scores-{name}") as mine:
            if not mine:
                return None
            if not path.exists():
                found = score_heads(bench.model, bench.text, cycle_of(job.arm, plan, job.seed), FIRST_ROUND)
                rows = [[layer, index, value] for (layer, index), value in found.items()]
                write_json(path, {"highest_go": found.highest_go, "scores": rows})
    held = read_json(path)
    return Scores({(layer, index): value for layer, index, value in held["scores"]}, highest_go=held["highest_go"])


@contextmanager
def claimed(folder: Path, name: str) -> Iterator[bool]:
    """Whether this process may work on something. The claim ends with the block, or with the process however it ends."""
    with open(folder / "claims" / name, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True  # closing the file gives it back


def _work_together(folder: Path, sources: list[Source], plan: StudySettings, jobs: int) -> None:
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // jobs)
    workers = [context.Process(target=_worker, args=(folder, sources, plan, threads)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
    failed = sum(worker.exitcode != 0 for worker in workers)
    if failed:
        raise UserError(f"{failed} of {jobs} processes failed (see above); continue the study with --resume")


def _worker(folder: Path, sources: list[Source], plan: StudySettings, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        work(folder, sources, plan)
    except UserError as error:
        say(f"pnn: {error}")
        os._exit(2)


# Speed ----------------------------------------------------------------------------------------------------------------


def timed_arms() -> list[Arm]:
    """The shapes that are timed: of one way to prune and one way to grow, all ratios. Other ways give the same sizes."""
    same = (CYCLE.prune_by, CYCLE.multiplier)
    ways = (CYCLE.grow_by, "none")
    return [arm for arm in all_arms() if (arm.prune_by, arm.multiplier) == same and arm.grow_by in ways]


def _measure_speed(folder: Path, source: Source, plan: StudySettings) -> None:
    """Tokens a second of the first seed's shapes, the whole model among them, taking turns."""
    path = folder / "speed" / f"{source.name}.json"
    while not path.exists():
        with claimed(folder, f"speed-{source.name}") as mine:
            if not mine:
                time.sleep(WAIT)
            elif not path.exists():
                write_json(path, _speed(folder, source, plan))


def _speed(folder: Path, source: Source, plan: StudySettings) -> dict[str, Any]:
    say(f"timing the shapes of {source.name} …")
    bench = Bench(source, plan)
    return shape_speeds(folder, source.name, bench.model, bench.text.held_out.shape[1])


def shape_speeds(folder: Path, name: str, model: PreTrainedModel, length: int) -> dict[str, Any]:
    """What speed/<model>.json holds. Of the model only its shape matters, not its weights."""
    shapes = {}
    for arm in timed_arms():
        head_map = read_json(folder / "arms" / f"{name}-0-{arm.name}.json")["head_map"]
        shapes[arm.name] = model if arm == CONTROL else reorganised(model, {HEAD: head_map})
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "CPU"
    return {"device": device, "rows": speeds(shapes, length, largest_only=True)}
