"""What halting saves on a run's held-out text: accuracy and speed of every number of steps, of each criterion, of fitted units.

python benchmarks/halting.py RUN OUT.json [--cost 0.01] [--seeds 3] [--sequences 600]

Speeds are ratios to all steps, of passes that take turns, from tokens to the states that predictions are read from. On a CPU
one thread computes and its own time is counted, so that a machine shared with others gives about the same numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pnn import runs
from pnn.bench.timing import machine
from pnn.data.batches import PackedBatch, evaluation_batches, special_tokens
from pnn.data.run_tokens import held_out
from pnn.data.shards import prepare
from pnn.evaluation.passes import states_at, to_device
from pnn.files import write_json
from pnn.models.base import Halting, MaskedLMBase
from pnn.models.loading import load_run
from pnn.progress import track
from pnn.training.halting import fit_halting, masked_batches
from pnn.turns import synchronize

CHANGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
UPDATES = 60  # that fit a unit


@dataclass(frozen=True)
class Way:
    """To compute a pass: with so many steps, or with tokens that halt; by a unit of its own, if it has one."""

    halt: Halting = False
    num_steps: int | None = None
    unit: dict[str, Tensor] | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cost", type=float, default=0.01, help="of a step, for units")
    parser.add_argument("--seeds", type=int, default=3, help="units that are fitted")
    parser.add_argument("--sequences", type=int, default=600, help="held-out sequences that are measured on")
    parser.add_argument("--turns", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    loaded, config = load_run(asked.run), runs.read_config(asked.run)
    model = loaded.model.eval()
    text = prepare(config.data, track)
    units = []
    for seed in range(asked.seeds):
        batches = masked_batches(
            text.train, text.train_sequences, updates=UPDATES, batch_tokens=2048, seed=seed, device=model.device
        )
        fit_halting(model, batches, cost=asked.cost, seed=seed)
        assert model.base_model.criterion is not None
        units.append({name: value.clone() for name, value in model.base_model.criterion.state_dict().items()})
    ways = {"all steps": Way()} | {f"{steps} steps": Way(num_steps=steps) for steps in range(model.config.num_steps - 1, 0, -1)}
    ways |= {f"change {limit}": Way({"criterion": "change", "threshold": limit}) for limit in CHANGES}
    for steps in range(model.config.num_steps, 2, -1):
        for k in range(1, steps - 1):
            ways[f"{steps} steps, context {k}"] = Way({"criterion": "context", "min_steps": k}, num_steps=steps)
    learned = {"criterion": "learned", "threshold": 0.5}
    ways |= {f"learned, seed {seed}": Way(learned, unit=unit) for seed, unit in enumerate(units)}
    tokens, sequences = held_out(asked.run, config.data, loaded.tokenizer, track)
    special = special_tokens(loaded.tokenizer)
    batches = []
    for packed, _ in evaluation_batches(tokens, sequences[: asked.sequences], 16384):
        masked = packed.mask(special, config.data.mask_probability, config.evaluation.mask_seed)
        batches.append((replace(packed, input_ids=masked.input_ids), masked.positions, masked.labels))
    precision = torch.autocast(model.device.type, loaded.precision, enabled=loaded.precision != torch.float32)
    with precision, torch.inference_mode():
        seconds = timed(
            {name: lambda way=way: states(model, batches, way) for name, way in ways.items()}, model.device, asked.turns
        )
        rows = {name: measured(model, batches, way) for name, way in ways.items()}
    whole = statistics.median(seconds["all steps"])
    for name, row in rows.items():
        row["speed"] = whole / statistics.median(seconds[name])
        print(f"{name:20} {json.dumps(row)}")
    write_json(asked.out, {"run": config.name, "cost": asked.cost, "ways": rows} | machine())


def states(model: MaskedLMBase, batches: list[tuple[PackedBatch, Tensor, Tensor]], way: Way) -> list[Tensor]:
    if way.unit is not None:
        model.base_model.criterion.load_state_dict(way.unit)
    return [states_at(model, batch, at, way.num_steps, halt=way.halt)[-1] for batch, at, _ in batches]


def timed(ways: dict[str, Callable[[], Any]], device: torch.device, turns: int) -> dict[str, list[float]]:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, run in ways.items():
            synchronize(device)
            start = clock()
            run()
            synchronize(device)
            if turn:  # the first does not count
                seconds[name].append(clock() - start)
    return seconds


def measured(model: MaskedLMBase, batches: list[tuple[PackedBatch, Tensor, Tensor]], way: Way) -> dict[str, float]:
    """Accuracy, and how many steps a token and a masked token took."""
    right, count, taken, taken_at = 0, 0, [], []
    for (batch, at, labels), h in zip(batches, states(model, batches, way), strict=True):
        right += int((model.head(h).argmax(-1) == to_device(labels, model.device)).sum())
        count += len(labels)
        if way.halt:
            borders, asked = (to_device(x, model.device) for x in (batch.cu_seqlens, at))
            ids = to_device(batch.input_ids, model.device)[None]
            how = {"num_steps": way.num_steps, "halt": way.halt, "read_out": model.read_out}
            out = model.base_model(ids, cu_seqlens=borders, last_at=asked, **how)
            taken.append(out.halted_at[0].float())
            taken_at.append(out.halted_at[0, asked].float())
    row = {"accuracy": right / count, "targets": count}
    if taken:
        row |= {"steps": torch.cat(taken).mean().item(), "steps_of_masked": torch.cat(taken_at).mean().item()}
    return row


if __name__ == "__main__":
    main()
