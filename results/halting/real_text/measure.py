"""Every way of stopping early, of one trained model: who is right, how fast it is, and which tokens stop when. In three parts:

python results/halting/real_text/measure.py ways RUN HOME      # accuracy on both texts, with units fitted on training text
python results/halting/real_text/measure.py speed MODEL HOME   # speed on this machine, of the sequences that `ways` left there
python results/halting/real_text/measure.py groups MODEL HOME  # steps of rare and frequent tokens, of kinds of words, by loss

RUN is a finished run whose config evaluates on `wikitext_tokens`; MODEL the same weights in any folder. The ways are those that
`pnn calibrate` tries: fewer steps for everyone (dial), fewer for tokens that are not masked (two dials), halting by the size of
the change, by confidence, and by a learned unit, one for each seed and cost. Thresholds come from the run's held-out tail. Ways
that lose more than two points there are left out of the rest.

`groups` tells of each criterion the way with the fewest FLOPs that loses at most 0.3 points on the tail, of units one for each
seed.

HOME gets ways.json, by_sequence.json (what is lost against all steps in each sequence of WikiText), units.safetensors and
sample.safetensors, from which the others need nothing but the weights; speed-<hardware>.json; groups.json; and the run's
config.yaml, environment.json and evaluation.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from groups import measure_groups
from kept import FIXED, TEXT, Halting, Way, left_by_ways, packed
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from pnn import runs
from pnn.analysis.halting_bound import Rows, at_random
from pnn.analysis.trace import Batch as TraceBatch
from pnn.analysis.trace import Text
from pnn.bench.timing import hardware_slug, machine
from pnn.data.batches import special_tokens
from pnn.data.corpora import open_source
from pnn.data.run_tokens import held_out
from pnn.data.shards import prepare, prepare_source
from pnn.errors import UserError
from pnn.evaluation.choosing import Batch, halting_settings, predictions, settings, steps_taken
from pnn.evaluation.passes import not_recorded
from pnn.files import write_json, write_text
from pnn.models.flops import halting_flops
from pnn.models.loading import load_run
from pnn.progress import say, track
from pnn.studies.analyses.halting import SAMPLE as ORACLE_SEQUENCES
from pnn.training.halting import fit_halting, masked_batches
from pnn.turns import take_turns

COSTS = (0.003, 0.01, 0.03)  # of a step, for units
UPDATES = 60  # that fit a unit
TOO_MUCH = 0.02  # lost on the tail: such a way is not measured further
Counts = NDArray[np.int64]


def asked(batch: TraceBatch) -> Batch:
    positions = batch.masked.positions
    hidden = replace(batch.packed, input_ids=batch.masked.input_ids)
    return Batch(hidden, positions, batch.masked.labels, batch.sequence[positions].numpy())


# Ways -------------------------------------------------------------------------------------------------------------------


def measure_ways(run: Path, home: Path, seeds: int, batch_tokens: int, fit_tokens: int, kept_tokens: int) -> None:
    loaded, config = load_run(run), runs.read_config(run)
    subject, special = Halting(loaded), special_tokens(loaded.tokenizer)
    model, evaluation = subject.model, config.evaluation

    def text(tokens: Any, sequences: Any, draw: int = 0) -> Text:
        masks = (special, config.data.mask_probability, evaluation.mask_seed + draw)
        return Text(tokens, sequences, *masks, batch_tokens)

    tail = list(text(*held_out(run, config.data, loaded.tokenizer, track)).batches())
    if TEXT not in evaluation.sets:
        raise UserError(f"{run}: its config has no evaluation.sets.{TEXT}, the text to measure on")
    chosen = evaluation.sets[TEXT]
    treatment = replace(config.data, undo_wikitext_marks=chosen.undo_wikitext_marks)
    other = prepare_source(open_source(chosen.source, treatment, "validation"), loaded.tokenizer, treatment, track)
    draws = [list(text(other, np.arange(len(other)), draw).batches()) for draw in range(evaluation.mask_draws)]
    every = [batch for draw in draws for batch in draw]

    with subject.computing():
        ways, fits = all_ways(subject, config, tail, seeds, fit_tokens)
        say(f"{len(ways)} ways")
        with torch.no_grad():
            on_tail = {way.name: right(subject, way, tail) for way in ways}
            whole = on_tail[ways[0].name]
            targets = targets_of(tail).sum()
            lost = {name: float((whole - hits).sum() / targets) for name, hits in on_tail.items()}
            ways = [way for way in ways if way.family in FIXED or lost[way.name] <= TOO_MUCH]
            say(f"{len(ways)} of them are measured on {TEXT}")
            rows = [Rows.of(model, batch) for batch in every]
            hits, random, spent = {}, {}, {}
            for way in ways:
                hits[way.name] = right(subject, way, every)
                steps, spent[way.name] = taken(subject, way, draws[0])
                if way.family not in FIXED:
                    random[way.name] = right_at_random(rows, steps, draws[0], len(whole_of(every)))
    every_right, flops = hits[ways[0].name], spent[ways[0].name]["flops"]
    described = [
        asdict(way)
        | {"lost_on_tail": lost[way.name], "accuracy": float(hits[way.name].sum() / targets_of(every).sum())}
        | spent[way.name]
        | {"flops_share": spent[way.name]["flops"] / flops}
        for way in ways
    ]
    home.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"{unit}/{key}": x.cpu() for unit, one in subject.units.items() for key, x in one.items()}, home / "units.safetensors"
    )
    kept = {"tail": tail, TEXT: draws[0]}
    save_file(
        {f"{name}/{key}": x for name, part in kept.items() for key, x in first(part, kept_tokens).items()},
        home / "sample.safetensors",
    )
    by_sequence = {
        "targets": targets_of(every).tolist(),
        "right": every_right.tolist(),
        "lost": {name: (every_right - one).tolist() for name, one in hits.items()},
        "lost_at_random": {name: (every_right - one).tolist() for name, one in random.items()},
    }
    write_text(home / "by_sequence.json", json.dumps(by_sequence, separators=(",", ":")) + "\n")
    texts = {
        name: {"source": one, "sequences": len(whole_of(part)), "targets": int(targets_of(part).sum())}
        for name, one, part in (("tail", config.data.validation, tail), (TEXT, other.manifest["name"], every))
    }
    for name in ("config.yaml", "environment.json", "evaluation.json"):  # of the run: what was trained, and how
        shutil.copy(run / name, home)
    known = {"parameters": sum(p.numel() for p in model.parameters()), "texts": texts, "mask_draws": evaluation.mask_draws}
    write_json(home / "ways.json", {"run": config.name} | known | {"units": fits, "ways": described} | machine())


def all_ways(
    subject: Halting, config: Any, tail: list[TraceBatch], seeds: int, fit_tokens: int
) -> tuple[list[Way], list[dict[str, Any]]]:
    """Those that need no unit, then a unit's, one for each seed and cost, and how the fits went. The unit learns on training
    text; thresholds are chosen on the first batch of the tail."""
    model, sample, fits = subject.model, [asked(tail[0])], []
    ways = [Way.of(setting) for setting in (*settings(model.config), *halting_settings(model, sample))]
    text = prepare(config.data, track)
    for seed in range(seeds):
        for cost in COSTS:
            batches = masked_batches(
                text.train, text.train_sequences, updates=UPDATES, batch_tokens=fit_tokens, seed=seed, device=model.device
            )
            fit, unit = fit_halting(model, batches, cost=cost, seed=seed), f"unit {seed}, cost {cost:g}"
            encoder: Any = model.base_model
            subject.units[unit] = {key: x.clone() for key, x in encoder.criterion.state_dict().items()}
            found = [Way.of(setting, unit, seed=seed, cost=cost) for setting in halting_settings(model, sample)]
            ways += [way for way in found if way.family == "learned"]
            fits.append({"unit": unit, "steps_before": fit.steps[0], "steps_after": fit.steps[-1]})
    return ways, fits


def right(subject: Halting, way: Way, batches: list[TraceBatch]) -> Counts:
    """Right predictions of each sequence. Nothing waits for the device before the last batch."""
    with subject.take(way):
        found = [predictions(subject.model, asked(batch)) for batch in batches]
    labels = torch.cat([batch.masked.labels for batch in batches])
    return per_sequence(batches, (torch.cat(found).cpu() == labels).numpy())


def per_sequence(batches: list[TraceBatch], each: NDArray[Any]) -> Counts:
    sequence = np.concatenate([asked(batch).sequence for batch in batches])
    return np.bincount(sequence, each, len(whole_of(batches))).astype(np.int64)


def whole_of(batches: list[TraceBatch]) -> NDArray[np.int64]:
    """The sequences of these batches, each once."""
    return np.unique(np.concatenate([batch.indices.numpy() for batch in batches]))


def targets_of(batches: list[TraceBatch]) -> Counts:
    return per_sequence(batches, np.ones(sum(len(batch.masked.labels) for batch in batches)))


def taken(subject: Halting, way: Way, batches: list[TraceBatch]) -> tuple[list[Counts], dict[str, float]]:
    """How many steps each token takes, batch by batch; their means; and FLOPs, of the sequences that the oracle reads."""
    with subject.take(way):
        steps = [steps_taken(subject.model, asked(batch)) for batch in batches]
    flops, config = 0.0, subject.model.config
    for batch, one in zip(batches, steps, strict=True):
        borders = batch.packed.cu_seqlens.tolist()
        targets = np.bincount(np.searchsorted(borders, batch.masked.positions.numpy(), "right") - 1, minlength=len(borders) - 1)
        for number, (start, stop) in enumerate(pairwise(borders)):
            if batch.indices[number] < ORACLE_SEQUENCES:
                flops += halting_flops(config, one[start:stop], int(targets[number]))
    masked = [one[batch.masked.positions.numpy()] for batch, one in zip(batches, steps, strict=True)]
    means = {"steps": float(np.concatenate(steps).mean()), "steps_of_masked": float(np.concatenate(masked).mean())}
    return steps, means | {"flops": flops}


def right_at_random(rows: list[Rows], steps: list[Counts], batches: list[TraceBatch], sequences: int) -> Counts:
    """Right predictions where the same steps are dealt out at random, those of masked tokens among masked tokens."""
    masked = [np.isin(np.arange(len(one)), batch.masked.positions.numpy()) for one, batch in zip(steps, batches, strict=True)]
    every, at = torch.from_numpy(np.concatenate(steps)), torch.from_numpy(np.concatenate(masked))
    pools, found = {"targets": every[at], "context": every[~at]}, np.zeros(sequences)
    for one in rows:
        hits = one.predictions(one.states(at_random(one, pools))[-1]) == one.labels
        found += np.bincount(one.sequence[one.row_of_target.cpu().numpy()], hits.cpu().numpy(), sequences)
    return found.astype(np.int64)


def first(batches: list[TraceBatch], tokens: int) -> dict[str, Tensor]:
    """The first sequences of so many tokens, with their masks, end to end."""
    ids, labels = (torch.cat(parts) for parts in zip(*((b.masked.input_ids, b.packed.input_ids) for b in batches), strict=True))
    lengths = torch.cat([batch.packed.cu_seqlens.diff() for batch in batches]).long()
    count = max(1, int((lengths.cumsum(0) <= tokens).sum()))
    end, starts = int(lengths[:count].sum()), np.cumsum([0, *(len(batch.packed.input_ids) for batch in batches)])
    positions = torch.cat([batch.masked.positions + int(start) for batch, start in zip(batches, starts, strict=False)])
    positions = positions[positions < end]
    return {"ids": ids[:end].clone(), "lengths": lengths[:count].clone(), "positions": positions, "labels": labels[positions]}


# Speed ------------------------------------------------------------------------------------------------------------------


def measure_speed(model: Path, home: Path, sizes: list[int], tokens: int, seconds: float, threads: int) -> None:
    if not torch.cuda.is_available():
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        torch.set_num_threads(threads)
    subject, described, sample = left_by_ways(model, home)
    ways = [Way.of_json(row) for row in described]
    batches = {(text, size): list(packed(sample, text, tokens, size)) for text in ("tail", TEXT) for size in sizes}

    def run(way: Way, some: list[Batch]) -> list[Tensor]:
        with subject.take(way):
            return [predictions(subject.model, batch) for batch in some]

    turns = {(way.name, *which): (way, some) for way in ways for which, some in batches.items()}
    said = {name: "|".join(map(str, name)) for name in turns}
    on_gpu = subject.model.device.type == "cuda"
    with subject.computing(), torch.no_grad():
        for _ in range(2 if on_gpu else 0):  # a pass is recorded when it comes a second time
            for one in turns.values():
                run(*one)
        if why := not_recorded(subject.model):
            raise UserError(f"some passes would be timed without a recording, others with one: {why}")
        runs_ = {said[name]: lambda one=one: run(*one) for name, one in turns.items()}
        times = take_turns(runs_, subject.model.device, seconds, warm_up=1)
        share_right = {way.name: right_share(run(way, batches[TEXT, sizes[0]]), batches[TEXT, sizes[0]]) for way in ways}
    rows = {}
    for way in ways:
        found: dict[str, dict[str, list[float]]] = {"tail": {}, TEXT: {}}
        for (text, size), some in batches.items():
            tokens_there = sum(len(batch.packed.input_ids) for batch in some)
            found[text][str(size)] = [1e6 * one / tokens_there for one in times[said[way.name, text, size]]]
        rows[way.name] = {"microseconds_per_token": found, "right": share_right[way.name]}
    precision = str(subject.precision).removeprefix("torch.")
    about = machine()
    if why := not_recorded(subject.model):  # the timed ones may have needed more room
        raise UserError(f"some passes were timed without a recording, others with one: {why}")
    what = {"tokens": tokens, "batch_tokens": sizes, "precision": precision, "threads": None if on_gpu else threads}
    write_json(home / f"speed-{slug(about['hardware'], threads)}.json", what | {"ways": rows} | about)


def slug(hardware: dict[str, Any], threads: int) -> str:
    return hardware_slug(hardware | {"cores": threads})


def right_share(found: list[Tensor], batches: list[Batch]) -> float:
    """Of the targets that were timed: beside another machine's share, a check that both compute the same."""
    labels = torch.cat([batch.labels for batch in batches])
    return float((torch.cat(found).cpu() == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    ways, speed, groups = (parts.add_parser(name) for name in ("ways", "speed", "groups"))
    for one in (ways, speed, groups):
        one.add_argument("run", type=Path)
        one.add_argument("home", type=Path)
    ways.add_argument("--seeds", type=int, default=3, help="of units")
    ways.add_argument("--batch-tokens", type=int, default=65536)
    ways.add_argument("--fit-tokens", type=int, default=8192, help="of an update that fits a unit")
    ways.add_argument("--kept-tokens", type=int, default=131072, help="of each text, for `speed`")
    on_gpu = torch.cuda.is_available()
    speed.add_argument("--batch-tokens", type=int, nargs="+", default=[16384, 65536] if on_gpu else [2048])
    speed.add_argument("--tokens", type=int, default=131072 if on_gpu else 2048, help="of each text, timed in one turn")
    speed.add_argument("--seconds", type=float, default=30, help="of turns, three at least")
    speed.add_argument("--threads", type=int, default=2, help="on a CPU")
    given = vars(parser.parse_args())
    part, run, home = (given.pop(key) for key in ("part", "run", "home"))
    if part == "ways":
        measure_ways(run, home, given["seeds"], given["batch_tokens"], given["fit_tokens"], given["kept_tokens"])
    elif part == "groups":
        measure_groups(run, home)
    else:
        measure_speed(run, home, given["batch_tokens"], given["tokens"], given["seconds"], given["threads"])


if __name__ == "__main__":
    main()
