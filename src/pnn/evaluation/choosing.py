"""The fastest setting of a model that loses at most so many points: for masked models (`evaluation/calibrate`) and for
classifiers (`finetuning/calibrate`) alike.

A *setting* is what of a config says how much is computed: the number of refinement steps, or when tokens halt (`nn/halting`):
for each criterion the thresholds at which so many tokens would have settled. Every setting is measured the same way:
predictions of the same targets (masked tokens, or the first token of each text), FLOPs, and the time of the same batches, all
settings in turns. One half of the sequences chooses the fastest setting that loses at most `lose` of accuracy there. The other
half, which did not choose, says what it costs, with a paired interval.

What is stored is `num_steps` or `halt`; `trained_steps` then keeps how many there were in training, and `trained_halt` how a
learned unit halts, so that it stays in the model whatever is chosen. Whoever loads the model reads it.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pnn import runs
from pnn.data.batches import PackedBatch
from pnn.data.shards import Progress, quietly
from pnn.errors import UserError
from pnn.evaluation.passes import PackedShape, made_of, to_device
from pnn.files import sha256, write_json
from pnn.models.flops import halting_flops
from pnn.models.halting import can_halt
from pnn.models.loading import read_config
from pnn.models.precision import predicting
from pnn.models.registry import kind_of, steps_read
from pnn.nn.halting import CRITERIA, Halt
from pnn.nn.packing import only_at
from pnn.numbers import count, several
from pnn.results import Json
from pnn.runs import read_json
from pnn.schedule import drawn_from, period
from pnn.stats import ratio_interval
from pnn.turns import synchronize, take_turns

FEWEST = 100  # targets in either half, where nothing may be lost
TIMED_TOKENS = 8192  # of the batches whose time is measured
SECONDS = 0.3  # for each setting
LONGEST = 1.0  # seconds of a timed pass
WARM_UP = 3  # passes of each setting on a GPU
SETTLED = (0.2, 0.4, 0.6, 0.8, 0.95)  # shares of tokens that settle at the thresholds that are tried


@dataclass(frozen=True)
class Setting:
    """`changes`: keys of the config. `said`: in words."""

    changes: dict[str, Any]
    said: str


@dataclass(frozen=True)
class Batch:
    """Sequences with their targets: `sequence` says to which each target belongs, counted through both halves."""

    packed: PackedBatch
    positions: torch.Tensor
    labels: torch.Tensor
    sequence: NDArray[np.int64]


@dataclass(frozen=True)
class Asked:
    """What a model is asked for, in words; and between how many labels it chooses, if not between all tokens."""

    targets: str
    others: str
    too_few: str
    helps: str
    labels: int | None = None


MASKED = Asked("masked tokens", "the unmasked", "the text is too short to calibrate on", "--data names other text")


def settings(config: Any) -> list[Setting]:
    """All steps first; then every smaller number with which the model was trained, or after which it was trained to be read."""
    trained = config.trained_steps or config.num_steps
    if config.random_steps is not None:
        read = [step for step in drawn_from(config.schedule, config.repeat, config.random_steps) if step < trained]
    elif config.repeat is not None:  # what was read in the middle has not left through the last refiners
        read = []
    else:
        read = steps_read(config)[:-1]
    kept = {"trained_steps": trained, "halt": None, "trained_halt": learned(config)}
    fewer = [Setting({"num_steps": step, **kept}, several(step, "step")) for step in reversed(read)]
    return [Setting({"num_steps": trained, **kept}, f"{several(trained, 'step')}, as trained"), *fewer]


def learned(config: Any) -> dict[str, Any] | None:
    """How the model's learned unit halts, if it has one, whether that is in force or not."""
    halt: dict[str, Any] | None = config.trained_halt or config.halt
    return halt if halt is not None and halt["criterion"] == "learned" else None


@torch.no_grad()
def halting_settings(model: PreTrainedModel, batches: Sequence[Batch], asked: Asked = MASKED) -> list[Setting]:
    """For each criterion that the model has, thresholds at which shares of the tokens have settled, over all steps but the
    last; of a classifier's confidence also within fewer steps. None where a schedule does not go round or nobody can halt."""
    encoder: Any = model.base_model
    config = encoder.config
    if not can_halt(config):
        return []
    every = settings(config)[0]
    found = []
    for fewer in settings(config):
        steps = fewer.changes["num_steps"]
        for k in range(1, steps - 1):  # of the last step nothing but targets is computed anyway
            if k % period(config.schedule) == 0:
                halt = {"criterion": "context", "min_steps": k}
                found.append(Setting(fewer.changes | {"halt": halt}, f"{several(steps, 'step')}, {k} for {asked.others}"))
    with in_force(model, every):
        passes = [encoder(**_inputs(model, batch), output_states=True, halt=False).states[:-1] for batch in batches]
        for name, criterion_class in CRITERIA.items():
            if not criterion_class.measures:
                continue
            criterion = encoder.criterion if type(encoder.criterion) is criterion_class else criterion_class(config.hidden_size)
            if name == "learned" and criterion is not encoder.criterion:
                continue  # there is none in this model
            measured = []
            for batch, states in zip(batches, passes, strict=True):
                at = to_device(batch.positions, model.device) if criterion.reads else None
                rows = [only_at(h, at)[0] for h in states]
                measured += [criterion.measure(*pair, model.read_out).float() for pair in pairwise(rows)]
            shares = [share if criterion.when_below else 1 - share for share in SETTLED]
            thresholds = torch.cat(measured).quantile(torch.tensor(shares, device=model.device)).tolist()
            for threshold in dict.fromkeys(map(_rounded, thresholds)):
                halt = {"criterion": name, "threshold": threshold}
                for fewer in settings(config) if criterion.reads and asked.labels else [every]:
                    steps = fewer.changes["num_steps"]
                    try:
                        Halt.of(halt).check_steps(config.schedule, steps)
                    except ValueError:
                        continue
                    of = "" if steps == every.changes["num_steps"] else f" within {several(steps, 'step')}"
                    found.append(Setting(fewer.changes | {"halt": halt}, f"halting by {name}, {threshold:.9g}{of}"))
    return found


def _rounded(value: float) -> float:
    """To three digits; of a confidence that is almost whole, to two of what it lacks."""
    return float(f"{value:.3g}") if not 0.99 < value < 1 else round(1 - float(f"{1 - value:.2g}"), 9)


@contextmanager
def in_force(model: PreTrainedModel, setting: Setting) -> Iterator[None]:
    before = {key: getattr(model.config, key) for key in setting.changes}
    model.config.__dict__.update(setting.changes)
    try:
        yield
    finally:
        model.config.__dict__.update(before)


# Choosing ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def choose(
    model: PreTrainedModel,
    batches: list[Batch],
    lose: float,
    asked: Asked,
    precision: torch.dtype = torch.float32,
    progress: Progress = quietly,
) -> dict[str, Any]:
    """The fastest setting that loses at most `lose` of accuracy (0.003: 0.3 points), and what it costs. The model stays as it
    is: `found["changes"]` are the keys of its config to set."""
    targets = np.bincount(np.concatenate([batch.sequence for batch in batches])).astype(float)
    half = np.arange(len(targets)) % 2 == 0  # neighbours are of one article: both halves have some of each
    check_enough(targets[half], targets[~half], lose, asked)
    tokens = sum(len(batch.packed.input_ids) for batch in batches)
    sample = batches[:: max(1, tokens // TIMED_TOKENS)]  # batches may be sorted by length: some of all

    with predicting(model, precision):
        every = [*settings(model.config), *halting_settings(model, sample, asked)]
        measured = [
            _measured(model, setting, batches, len(targets), asked) for setting in progress(every, "measuring, setting")
        ]
        right = [hits for hits, _ in measured]
        lost = [
            {name: ratio_interval((right[0] - hits)[at], targets[at]) for name, at in (("chose", half), ("checked", ~half))}
            for hits in right
        ]
        timed = [setting for setting, one in zip(every, lost, strict=True) if one["chose"].value <= lose]
        seconds = _timed(model, timed, sample, progress)  # others cannot be chosen

    rows: list[dict[str, Any]] = []
    for setting, (hits, flops), one in zip(every, measured, lost, strict=True):
        rows.append(
            {
                "setting": setting.said,
                "changes": setting.changes,
                "accuracy": float(hits[~half].sum() / targets[~half].sum()),
                "lost_where_it_was_chosen": one["chose"].as_json(),
                "lost": one["checked"].as_json(),
                "flops_per_token": float(flops / tokens),
                "seconds": seconds.get(setting.said),
            }
        )
    for row in rows:
        row["flops_share"] = row["flops_per_token"] / rows[0]["flops_per_token"]
        row["time_share"] = None if row["seconds"] is None else row["seconds"] / rows[0]["seconds"]
    chosen = fastest(rows, lose)
    return {
        "lose": lose,
        "chosen": chosen["setting"],
        **{key: chosen[key] for key in ("changes", "lost", "flops_share", "time_share")},
        "targets": {"chose": int(targets[half].sum()), "checked": int(targets[~half].sum())},
        "targets_are": asked.targets,
        "sequences": len(targets),
        "rows": rows,
    }


def fastest(rows: list[dict[str, Any]], lose: float) -> dict[str, Any]:
    """By the clock, of those that lose at most so much of accuracy where they are chosen. The first row loses nothing."""
    good = [row for row in rows if row["lost_where_it_was_chosen"]["value"] <= lose]
    return min(good, key=lambda row: float(row["seconds"]))


def check_can_be_calibrated(config: Any, lose: float = 0.0) -> None:
    if not (math.isfinite(lose) and 0 <= lose < 1):
        raise UserError(f"--lose {100 * lose:g}: expected points of accuracy, from 0 to below 100")
    if not kind_of(config).has_steps:
        raise UserError(f"a {config.model_type} model has no refinement steps: there is nothing to calibrate")
    if getattr(config, "head_map", None) is not None:
        raise UserError("heads of this model were removed or grown: calibrate a model before you prune it")
    if len(settings(config)) == 1:
        trained = config.trained_steps or config.num_steps
        why = "the model has 1 step" if trained == 1 else f"the model was trained to be read after step {trained} alone"
        raise UserError(f"there is nothing to calibrate: {why}")


def check_enough(chooses: NDArray[np.float64], checks: NDArray[np.float64], lose: float, asked: Asked = MASKED) -> None:
    """A half must be able to show a loss of that size: it has to be one target at least."""
    needed = math.ceil(1 / lose) if lose else FEWEST
    fewest = int(min(chooses.sum(), checks.sum()))
    if fewest < needed or min((chooses > 0).sum(), (checks > 0).sum()) < 2:
        raise UserError(
            f"{asked.too_few}: one half has {count(fewest)} {asked.targets}, and {100 * lose:g} points take {count(needed)} "
            f"({asked.helps})"
        )


def _measured(
    model: PreTrainedModel, setting: Setting, batches: list[Batch], sequences: int, asked: Asked
) -> tuple[NDArray[np.float64], float]:
    """Right predictions of each sequence, and the FLOPs of all batches, from how many steps each token takes: one pass tells
    both."""
    right, flops = [], 0.0
    with in_force(model, setting):
        for batch in batches:
            predicted, taken = predictions_and_steps(model, batch)
            right.append(predicted == to_device(batch.labels, model.device))
            borders = batch.packed.cu_seqlens.tolist()
            targets = np.bincount(np.searchsorted(borders, batch.positions.numpy(), "right") - 1, minlength=len(borders) - 1)
            for number, (start, stop) in enumerate(pairwise(borders)):
                flops += halting_flops(model.config, taken[start:stop], int(targets[number]), asked.labels)
    hits = torch.cat(right).cpu().numpy()
    return np.bincount(np.concatenate([batch.sequence for batch in batches]), hits, sequences).astype(np.float64), flops


def predictions(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    return made_of(model, batch.packed, batch.positions, lambda h: model.read_out(h).argmax(-1))


def steps_taken(model: PreTrainedModel, batch: Batch) -> NDArray[np.int64]:
    """By each token. Of the last step nobody reads any but the targets."""
    if model.config.halt is None:
        taken = np.full(len(batch.packed.input_ids), model.config.num_steps - 1)
        taken[batch.positions.numpy()] += 1
        return taken
    halted: NDArray[np.int64] = _halting_pass(model, batch).halted_at[0].cpu().numpy()
    return halted


def predictions_and_steps(model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, NDArray[np.int64]]:
    if model.config.halt is None:
        return predictions(model, batch), steps_taken(model, batch)
    out = _halting_pass(model, batch)
    return model.read_out(out.last_hidden_state[0]).argmax(-1), out.halted_at[0].cpu().numpy()


def _halting_pass(model: PreTrainedModel, batch: Batch) -> Any:
    inputs = _inputs(model, batch) | {"last_at": to_device(batch.positions, model.device)}
    return model.base_model(**inputs, read_out=model.read_out)


def _inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    shape = PackedShape.exact(batch.packed, batch.positions)
    flat = shape.flat(batch.packed, batch.positions, model.config.max_position_embeddings)
    return shape.inputs(to_device(flat, model.device)) | {"last_at": None, "return_dict": True}


def _timed(model: PreTrainedModel, every: list[Setting], batches: list[Batch], progress: Progress) -> dict[str, float]:
    """Median seconds of these batches, all settings in turns; of as many of them as take a second without leaving anything out,
    or a large model on a CPU would take a quarter of an hour."""
    few = batches[: _within(LONGEST, model, every[0], batches)]

    def run(setting: Setting) -> None:
        with in_force(model, setting):
            for batch in few:
                predictions(model, batch)

    for setting in progress([*every] * (WARM_UP if model.device.type == "cuda" else 1), "timing, warming up"):
        run(setting)
    turns = {setting.said: lambda setting=setting: run(setting) for setting in every}
    times = take_turns(turns, model.device, SECONDS * len(every), warm_up=0)
    return {name: float(np.median(taken)) for name, taken in times.items()}


def _within(seconds: float, model: PreTrainedModel, setting: Setting, batches: list[Batch]) -> int:
    """How many batches a pass in this setting gets through in the time, one at least."""
    started = time.perf_counter()
    with in_force(model, setting):
        for number, batch in enumerate(batches, 1):
            predictions(model, batch)
            synchronize(model.device)
            if time.perf_counter() - started > seconds:
                return number
    return len(batches)


# Storing ----------------------------------------------------------------------------------------------------------------


def folder_of(run: str | Path) -> Path:
    found = runs.find_checkpoint(run)
    if not isinstance(found, Path):
        raise UserError(f"{run} is on the hub, where nothing can be stored: calibrate a folder (pnn export {run} writes one)")
    return found


def undo(run: str | Path) -> dict[str, Any]:
    """All steps again, as trained, and a learned unit halts again as it did."""
    folder = folder_of(run)
    config: Any = read_config(folder)
    check_can_be_calibrated(config)
    trained = config.trained_steps or config.num_steps
    changes = {"num_steps": trained, "trained_steps": None, "halt": learned(config), "trained_halt": None}
    if all(getattr(config, key) == value for key, value in changes.items()):
        raise UserError(f"{run} was never calibrated: there is nothing to undo")
    store(folder, changes)
    return {"checkpoint": str(folder), "changes": changes}


def store(folder: Path, changes: Json) -> None:
    """Change config.json, and its checksum, so that a kill at any moment leaves a folder that loads: for as long as the two
    could differ, the list of checksums leaves config.json out."""
    before = read_json(folder / "config.json")
    after = dict(sorted((before | dict(changes)).items()))
    config = read_config(folder)
    type(config).from_dict(copy.deepcopy(after))  # what cannot be loaded must not be written
    listing = folder / "checksums.json"
    sums = read_json(listing) if listing.exists() else None
    if sums is not None:
        write_json(listing, {name: digest for name, digest in sums.items() if name != "config.json"})
    write_json(folder / "config.json", after)
    if sums is not None:
        write_json(listing, sums | {"config.json": sha256(folder / "config.json")})
