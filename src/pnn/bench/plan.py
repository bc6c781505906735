"""What more GPUs would bring, on paper: communication against compute. docs/scaling.md explains it; its table is made by

    python -m pnn.bench.plan benchmarks/results/train-nvidia-h200.json

    T(n)    = max(host, compute) + exposed                    milliseconds an update; speedup = tokens/s over those of one GPU
    compute = fixed + (T(1) − fixed) · s · f(m) / f(s m)      s: a GPU's share of the batch, m: tokens of the measured update
    exposed = R(late) + max(0, R(early) − overlap · max(…))   R(b) = 2 (n − 1) / n · b / bandwidth: a ring all-reduce

`late` gradients are complete only when the backward pass ends, `early` ones while it still runs; f is how well matrix products
of so many rows fill the GPU. T(1) is measured; everything in capitals below is an assumption or a vendor's figure.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pnn.config import load_config
from pnn.models.sections import build_model, model_config

NVLINK = 450e9  # bytes/s each way between the GPUs of a node (vendor: 900 GB/s both ways, H200)
INFINIBAND = 50e9  # bytes/s each way between nodes: one port of 400 Gb/s a node
MEMORY = 4.8e12  # bytes/s of a GPU's memory (vendor, H200)
UNITS, TILE = 132, (128, 256)  # multiprocessors of an H200; rows and columns of a product that one of them computes at a time
HOST = 25.0  # ms to issue the kernels of one pass one by one, as several processes do (measured once; training/recording.py)
OVERLAP = 0.4  # share of an update that is backward after the head: 2/3 of the blocks' share of FLOPs
BYTES_PER_PARAMETER = 40  # that the optimiser moves: clipping reads, reads and writes; AdamW reads four arrays and writes three

MODELS = {"pnn": "pnn_wikitext103", "bert": "bert_baseline"}
SEQUENCES = 1152  # of the measured update


@dataclass(frozen=True)
class Measured:
    """One GPU's update of `SEQUENCES` sequences."""

    model: str
    milliseconds: float
    tokens: int


STAND_IN = [Measured("pnn", 55.0, 91_000)]  # until the file of `pnn bench` is at hand


def read(path: Path) -> list[Measured]:
    """PNN's training rows of a file that `pnn bench` wrote. (How long a host takes to issue a BERT was not measured.)"""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    chosen = [row for row in rows if row["what"] == "train" and row["name"] == "pnn" and "error" not in row]
    return [
        Measured(row["name"], row["milliseconds_per_update"], row["shapes"]["batch_tokens"] * row["shapes"]["micro_batches"])
        for row in chosen
        if row["shapes"]["effective_batch_size"] == SEQUENCES
    ]


@dataclass(frozen=True)
class Gradients:
    """Bytes in fp32, and the shapes of a block's matrices."""

    early: int
    late: int
    matrices: tuple[tuple[int, int], ...]

    @staticmethod
    def of(name: str) -> Gradients:
        with torch.device("meta"):
            model: Any = build_model(model_config(load_config(MODELS[name]).model))
        first = model.base_model.blocks[0]  # a PNN's only one: every step adds to its gradient
        late = _bytes(model.base_model.embeddings) + _bytes(first)
        return Gradients(
            _bytes(model) - late, late, tuple((p.shape[0], p.shape[1]) for p in first.parameters() if p.dim() == 2)
        )


def _bytes(module: torch.nn.Module) -> int:
    return 4 * sum(p.numel() for p in module.parameters())


def ring(size: float, gpus: int, bandwidth: float) -> float:
    """Milliseconds to sum `size` bytes over all GPUs."""
    return 1000 * 2 * (gpus - 1) / gpus * size / bandwidth


def filled(tokens: float, matrices: Iterable[tuple[int, int]]) -> float:
    """The share of a GPU's units that work while the products with these matrices run, forward and to the inputs' gradients:
    their last wave of tiles is rarely full. (Weights' gradients have the same few tiles for any number of tokens.)"""
    work = time = 0.0
    for rows, columns in matrices:
        for width, depth in ((rows, columns), (columns, rows)):
            tiles = math.ceil(tokens / TILE[0]) * math.ceil(width / TILE[1])
            work += tiles * depth
            time += math.ceil(tiles / UNITS) * UNITS * depth
    return work / time


@dataclass(frozen=True)
class Estimate:
    compute: float  # ms, as are all
    host: float
    exposed: float
    update: float
    speedup: float


def estimate(
    measured: Measured, gpus: int, sequences: int, *, nodes: int = 1, recorded: bool = False, wire: int = 4
) -> Estimate:
    """An update of `sequences` on so many GPUs. `recorded`: the pass is replayed and all gradients are summed after it.
    `wire`: bytes of a number on its way."""
    gradients = Gradients.of(measured.model)
    early, late = gradients.early * wire / 4, gradients.late * wire / 4
    share = sequences / SEQUENCES / gpus
    fixed = 1000 * (gradients.early + gradients.late) / 4 * BYTES_PER_PARAMETER / MEMORY
    slower = filled(measured.tokens, gradients.matrices) / filled(measured.tokens * share, gradients.matrices)
    compute = fixed + (measured.milliseconds - fixed) * share * slower
    host = 0.0 if recorded else HOST
    bandwidth = NVLINK if nodes == 1 else INFINIBAND
    hidden = 0.0 if recorded else OVERLAP * max(compute, host)
    exposed = ring(late, gpus, bandwidth) + max(0.0, ring(early, gpus, bandwidth) - hidden)
    update = max(compute, host) + exposed
    return Estimate(compute, host, exposed, update, sequences / SEQUENCES * measured.milliseconds / update)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("8 GPUs, 1,152 sequences", {"gpus": 8, "sequences": 1152}),
    ("the same, pass recorded", {"gpus": 8, "sequences": 1152, "recorded": True}),
    ("8 GPUs, 9,216 sequences", {"gpus": 8, "sequences": 9216}),
    ("2 × 8 GPUs, 1,152 sequences", {"gpus": 16, "sequences": 1152, "nodes": 2}),
    ("2 × 8 GPUs, 18,432 sequences", {"gpus": 16, "sequences": 18432, "nodes": 2}),
    ("the same, gradients sent as bf16", {"gpus": 16, "sequences": 18432, "nodes": 2, "wire": 2}),
]


def table(rows: list[Measured]) -> str:
    lines = ["| model, GPUs, update | compute | host | exposed | update, ms | speedup |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| **{row.model}**, 1 GPU, 1,152 sequences: measured | {row.milliseconds:.1f} | – | – | | 1 |")
        for name, case in CASES:
            e = estimate(row, **case)
            lines.append(f"| {name} | {e.compute:.1f} | {e.host:.0f} | {e.exposed:.2f} | {e.update:.1f} | {e.speedup:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1])) if len(sys.argv) > 1 else STAND_IN))
