"""One benchmark: a list of rows timed one after another in one run, their ratios, and the file that holds them.

The file is rewritten after every row, so an interrupted benchmark keeps what it has. A row that does not fit into memory says
so and what to change, and the others still run.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from pnn.bench import generation, inference, latency, processes, scaling, training
from pnn.bench.bounds import bound_by_bytes
from pnn.bench.naive import check_published_design
from pnn.bench.timing import Budget, clean_slate, copy_rate, hardware_slug, machine, matrix_rate
from pnn.bench.transformers_bert import check_transformers_has
from pnn.config import RunConfig
from pnn.errors import UserError, did_you_mean
from pnn.files import make_folder, write_json
from pnn.memory import is_out_of_memory
from pnn.models.sections import model_config
from pnn.numbers import several
from pnn.progress import say

# the first stands beside a PNN, the second beside a BERT baseline, and with the others beside every model's latency
AGAINST = ("naive", *latency.BESIDE, generation.BATCHED)
CPU_MEMORY = "peak_memory_bytes is null: on a CPU one process times all rows, and its peak would be that of the largest"

Row = dict[str, Any]
Timed = Iterator[tuple[str, Callable[[], Row]]]  # of one config: rows by name, and what times each


def benchmark(
    runs: list[RunConfig],
    what: list[str],
    against: list[str],
    budget: Budget,
    out: Path | None = None,
    *,
    overwrite: bool = False,
) -> tuple[dict[str, Any], Path]:
    """Time all rows that are asked for and write the file. Returns what it holds, and its path. A file that nobody named, a
    committed result perhaps, is replaced only with `overwrite`."""
    check(runs, what, against)
    device = training.device_of(runs[0])
    result: dict[str, Any] = {
        **machine(),
        "date": datetime.date.today().isoformat(),
        "matrix_rate": None,
        "rows": [],
        "ratios": {},
        "notes": [] if device.type == "cuda" else [CPU_MEMORY],
    }
    if out is None:
        hardware = result["hardware"] if device.type == "cuda" else {**result["hardware"], "gpus": []}
        out = Path("benchmarks/results") / f"{what[0]}-{hardware_slug(hardware)}.json"
        if out.exists() and not overwrite:
            raise UserError(f"{out} exists: --output FILE writes elsewhere, --overwrite replaces it")
    make_folder(out.parent)
    result["matrix_rate"] = matrix_rate(device)
    if device.type == "cuda" and any(run.kind.type == "ddl" for run in runs):
        result["copy_rate"] = copy_rate(device)
    for kind, run in itertools.product(what, runs):
        for name, time_row in WAYS[kind](run, against, budget):
            say(f"timing {run.name}, {kind}: {name} …")
            row = attempt({"name": name, "what": kind, "config": run.name}, time_row)
            add_share(row, result["matrix_rate"])
            result["rows"].append(row)
            result["ratios"] = ratios(result["rows"], device.type == "cuda", result.get("copy_rate"))
            write_json(out, result)
            say(f"  {row['error']}" if "error" in row else f"  {row['tokens_per_second']['median']:,.0f} tokens/s")
    clean_slate(device)
    return result, out


def check(runs: list[RunConfig], what: list[str], against: list[str]) -> None:
    """What can be wrong is found before anything is timed."""
    for given, known, option in ((what, WAYS, "--what"), (against, AGAINST, "--against")):
        for name in given:
            if name not in known:
                raise UserError(f"{option} {name}: no such choice{did_you_mean(name, known)}")
    if not what:
        raise UserError(f"--what: nothing to time (choose from {', '.join(WAYS)})")
    for run in runs:
        config = model_config(run.model)
        if "naive" in against and training.row_name(run) == "pnn" and {"train", "inference"} & set(what):
            check_published_design(config)
        if "transformers" in against and run.kind.type == "bert" and {"train", "inference"} & set(what):
            check_transformers_has(config)
        if "processes" in what:
            processes.check_shape(run)
        if run.kind.type == "transformers":
            raise UserError(f"{run.name}: transformers decoders cannot be timed here (benchmarks/heads.py times attention)")
        of_decoders = set(what) <= {"train", "generate"}
        if run.kind.causal and not of_decoders:
            raise UserError(f"--what {','.join(what)}: for decoders only train and generate are timed")
        if not run.kind.causal and "generate" in what:
            raise UserError(f"--what generate: {run.name} is not a decoder")
    if len({training.device_of(run).type for run in runs}) > 1:
        raise UserError("training.device differs between the configs: time them in two runs")


def training_rows(run: RunConfig, against: list[str], budget: Budget) -> Timed:
    yield training.row_name(run), partial(training.train_row, run, budget)
    if "naive" in against and training.row_name(run) == "pnn":
        yield "naive pnn", partial(training.naive_train_row, run, budget)
    if "transformers" in against and run.kind.type == "bert":
        yield "transformers bert", partial(training.transformers_train_row, run, budget)


def inference_rows(run: RunConfig, against: list[str], budget: Budget) -> Timed:
    name = training.row_name(run)
    yield name, partial(inference.inference_row, run, budget)
    if run.kind.type == "pnn":
        config = model_config(run.model)
        weights = config.step_weights or [1.0] * config.num_steps
        for steps in (step for step in range(1, config.num_steps) if weights[step - 1] > 0):  # those with a loss can be read
            yield f"{name}, {several(steps, 'step')}", partial(inference.inference_row, run, budget, steps)
        if "naive" in against and name == "pnn":
            yield "naive pnn", partial(inference.naive_inference_row, run, budget)
    elif "transformers" in against:
        yield "transformers bert", partial(inference.transformers_inference_row, run, budget)


def in_turns(rows: Any, run: RunConfig, against: list[str], budget: Budget, names: list[str]) -> Timed:
    """Rows that are timed together: the first that is asked for times all."""
    together = cache(partial(rows, run, against, budget))
    for name in names:
        yield name, lambda name=name: together()[name]  # type: ignore[misc]


def latency_rows(run: RunConfig, against: list[str], budget: Budget) -> Timed:
    return in_turns(latency.latency_rows, run, against, budget, latency.names(run, against))


def generation_rows(run: RunConfig, against: list[str], budget: Budget) -> Timed:
    return in_turns(generation.generation_rows, run, against, budget, generation.names(run, against))


def process_rows(run: RunConfig, against: list[str], budget: Budget) -> Timed:
    for count in (1, 2):
        yield processes.process_name(count), partial(processes.processes_row, run, budget, count)


def scaling_rows(run: RunConfig, against: list[str], budget: Budget) -> Timed:
    yield from scaling.jobs(run, budget)


WAYS: dict[str, Callable[[RunConfig, list[str], Budget], Timed]] = {
    "train": training_rows,
    "inference": inference_rows,
    "latency": latency_rows,
    "generate": generation_rows,
    "processes": process_rows,
    "scaling": scaling_rows,
}


def attempt(identity: Row, time_row: Callable[[], Row]) -> Row:
    """The row, or what kept it from being timed where that is memory."""
    try:
        return time_row()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        key = "evaluation.batch_tokens" if identity["what"] == "inference" else "training.batch_size"
        return {**identity, "error": "out of memory", "advice": f"a smaller {key} needs less"}


def add_share(row: Row, rate: dict[str, Any]) -> None:
    if "error" not in row:
        done = row["tokens_per_second"]["median"] * row["flops_per_token"]
        # more processes than one have more than one process's threads: their share of its rate would mislead
        row["share_of_matmul_rate"] = None if "processes" in row else done / rate["flops_per_second"]["median"]


def muon_share(row: Row | None) -> float | None:
    """Of an update's time."""
    if row is None or "muon_milliseconds" not in row:
        return None
    return row["muon_milliseconds"] / row["milliseconds_per_update"]


def ratios(rows: list[Row], on_gpu: bool, copied: dict[str, Any] | None = None) -> dict[str, float]:
    """What the rows say about each other, by the names that are looked for. Ours over theirs. From `copied`, the rate of a
    copy, follows how near to the additive decoder one that rewrites can come."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        if "error" not in row:
            found.setdefault((row["name"], row["what"]), row)  # of several configs, the first

    def ratio(one: tuple[str, str], other: tuple[str, str], *keys: str, configs: bool = False) -> float | None:
        """Of two rows of one config; `configs`: of two configs of one shape."""
        pair: list[Any] = [found.get(one), found.get(other)]
        if None in pair or pair[0]["shapes" if configs else "config"] != pair[1]["shapes" if configs else "config"]:
            return None
        for key in keys:
            pair = [None if value is None else value[key] for value in pair]
        return None if None in pair else pair[0] / pair[1]

    speed = ("tokens_per_second", "median")
    pnn, naive, bert, hf = ((name, "train") for name in ("pnn", "naive pnn", "bert", "transformers bert"))
    possible = {
        "pnn_train_vs_naive" if on_gpu else "pnn_cpu_train_vs_naive": ratio(pnn, naive, *speed),
        "bert_train_vs_transformers": ratio(bert, hf, *speed),
        "pnn_share_of_matmul_rate": found.get(pnn, {}).get("share_of_matmul_rate"),
        "bert_share_of_matmul_rate": found.get(bert, {}).get("share_of_matmul_rate"),
        "pnn_memory_vs_naive": ratio(pnn, naive, "peak_memory_bytes"),
        "pnn_inference_share_of_matmul_rate": found.get(("pnn", "inference"), {}).get("share_of_matmul_rate"),
        "pnn_inference_vs_naive": ratio(("pnn", "inference"), ("naive pnn", "inference"), *speed),
        "bert_inference_vs_transformers": ratio(("bert", "inference"), ("transformers bert", "inference"), *speed),
        "rewrite_share_of_matmul_rate": found.get(("pnn rewrite", "train"), {}).get("share_of_matmul_rate"),
        "muon_share_of_update": muon_share(found.get(("pnn rewrite", "train"))),
        "bert_muon_share_of_update": muon_share(found.get(bert)),
        "two_processes_vs_one": ratio(("2 processes", "processes"), ("1 process", "processes"), *speed),
    }
    additive = ("ddl additive", "train")
    possible["ddl_additive_share_of_matmul_rate"] = found.get(additive, {}).get("share_of_matmul_rate")
    for name in ("scalar", "channel", "token", "write-only channel", "additive channel"):
        variant, key = (f"ddl {name}", "train"), f"ddl_{name.replace(' ', '_').replace('-', '_')}"
        compared = ratio(variant, additive, *speed, configs=True)
        possible[f"{key}_vs_additive"] = compared
        moved = found.get(variant, {}).get("rewriting_bytes_per_token")
        if copied is not None and compared is not None and moved is not None:
            additive_speed = found[additive]["tokens_per_second"]["median"]
            possible[f"{key}_bound_by_bytes"] = bound_by_bytes(moved, copied["bytes_per_second"]["median"], additive_speed)
        possible[f"{key}_memory_vs_additive"] = ratio(variant, additive, "peak_memory_bytes", configs=True)
    return (
        {name: value for name, value in possible.items() if value is not None} | latency.ratios(rows) | generation.ratios(rows)
    )
