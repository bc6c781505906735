"""Does the fast path learn what the naive one learns? Loss curves of both from the same weights, batches and masks.

python benchmarks/curves.py CONFIG OUT [KEY=VALUE …]     # 200 updates each

fp32 and bf16 without dropout must agree update by update. With dropout the two draw different masks, so their difference is
compared with the spread between seeds.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pnn.bench.curves import loss_curves
from pnn.bench.timing import machine
from pnn.config import RunConfig, load_config
from pnn.files import write_json

UPDATES = 200
LAST = 20  # updates whose mean loss stands for a curve with dropout
SEEDS = (0, 1, 2)


def with_model(run: RunConfig, seed: int = 0, **changes: Any) -> RunConfig:
    return replace(run, model={**run.model, **changes}, training=replace(run.training, seed=seed))


def main() -> None:
    config, out, *settings = sys.argv[1:]
    run = load_config(config, settings)
    result: dict[str, Any] = {**machine(), "rows": []}

    def measure(name: str, run: RunConfig, precision: str) -> dict[str, Any]:
        row = {"name": name, "seed": run.training.seed, **loss_curves(run, UPDATES, precision)}
        result["rows"].append(row)
        write_json(Path(out), result)
        print(
            f"{name}: {row['ours'][0]:.3f} → {row['ours'][-1]:.3f}, largest difference {row['largest_difference']:.2g}",
            flush=True,
        )
        return row

    plain = with_model(run, dropout=0.0, attention_dropout=0.0)
    fp32 = measure("no dropout, fp32", plain, "fp32")
    half = measure("no dropout, bf16", plain, "bf16")
    dropped = [measure(f"dropout, bf16, seed {seed}", with_model(run, seed), "bf16") for seed in SEEDS]
    ours, naive = ([statistics.mean(row[side][-LAST:]) for row in dropped] for side in ("ours", "naive"))
    result["summary"] = {
        "fp32_largest_difference": fp32["largest_difference"],
        "bf16_largest_difference": half["largest_difference"],
        "dropout_last_loss_ours": ours,
        "dropout_last_loss_naive": naive,
        "dropout_mean_difference": statistics.mean(a - b for a, b in zip(ours, naive, strict=True)),
        "seed_standard_deviation": statistics.stdev(ours),
    }
    write_json(Path(out), result)
    print(result["summary"])


if __name__ == "__main__":
    main()
