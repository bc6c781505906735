"""Where the time of a training update goes: each kernel's, summed by what it is for.

python benchmarks/where_time_goes.py OUT CONFIG… [KEY=VALUE …]     # half a minute for each config

Updates are those of `pnn train`, in its own loop. `products` are all matrix products, and `products_at_the_matrix_rate` what
they would take at the rate of one large product on the same rested machine: the rest of an update is what could still go.
On a CPU the table is of torch's operations.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from pnn.bench.timing import clean_slate, machine, matrix_rate
from pnn.bench.training import device_of, text_of, trainer_of, updates_of
from pnn.config import RunConfig, load_config
from pnn.files import write_json
from pnn.models import flops
from pnn.training.optim import learning_rate
from pnn.turns import synchronize

BEFORE, PROFILED = 8, 10  # updates: until everything is compiled and recorded, then those that count
GROUPS = {  # the first that a kernel's name matches
    "products": r"gemm|nvjet|cutlass|xmma|addmm|\bmm\b|\bbmm\b|linear",
    "attention": r"attention|flash|softmax_warp",
    "norm": r"norm",
    "gate": r"gate",
    "GELU and dropout": r"pointwise_kernel|gelu",
    "rotary positions": r"turn|rotary",
    "loss": r"losses_and_gradients|cross_entropy|nll",
    "optimiser": r"adam|multi_tensor|foreach|lerp",
    "sums for biases": r"reduce|sum",
    "gather and scatter": r"index|gather|scatter|embedding|sort",
    "copies": r"memcpy|memset|copy|fill",
}


def main() -> None:
    out, *words = sys.argv[1:]
    settings = [word for word in words if "=" in word]
    result: dict[str, Any] = {**machine(), "rows": []}
    for name in (word for word in words if "=" not in word):
        run = load_config(name, settings)
        result["matrix_rate"] = matrix_rate(device_of(run))
        result["rows"].append(row_of(run, result["matrix_rate"]["flops_per_second"]["median"]))
        write_json(Path(out), result)
        print(table(result["rows"][-1]), flush=True)


def row_of(run: RunConfig, rate: float) -> dict[str, Any]:
    device = device_of(run)
    clean_slate(device)
    with trainer_of(run) as trainer:
        text = text_of(trainer)
        trainer.wrapped.train()
        with closing(updates_of(trainer)) as updates:  # type: ignore[type-var]

            def apply(count: int) -> int:
                tokens = 0
                for _ in range(count):
                    update = next(updates)
                    trainer.apply(update, learning_rate(trainer.step, trainer.plan.updates, trainer.config.training))
                    trainer.step += 1
                    tokens += update.tokens
                synchronize(device)
                return tokens

            apply(BEFORE)
            on_gpu = device.type == "cuda"
            with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
                tokens = apply(PROFILED)
        per_token = flops.training_flops(trainer.model.config, text.attended, text.target_share)
    kernels = [
        (event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000 / PROFILED, event.count)
        for event in profiled.key_averages()
    ]
    return {
        "config": run.name,
        "tokens_per_update": tokens / PROFILED,
        "products_at_the_matrix_rate": 1000 * per_token * tokens / PROFILED / rate,
        **by_group(kernels),
    }


def by_group(kernels: list[tuple[str, float, int]]) -> dict[str, Any]:
    """Milliseconds of an update: all of them, by group, and the twenty longest kernels."""
    groups: dict[str, float] = defaultdict(float)
    for name, milliseconds, _ in kernels:
        groups[group_of(name)] += milliseconds
    longest = sorted(kernels, key=lambda kernel: -kernel[1])[:20]
    return {
        "milliseconds_per_update": sum(groups.values()),
        "groups": dict(sorted(groups.items(), key=lambda group: -group[1])),
        "longest": [{"kernel": name[:120], "milliseconds": ms, "calls": count / PROFILED} for name, ms, count in longest],
    }


def group_of(kernel: str) -> str:
    return next((group for group, names in GROUPS.items() if re.search(names, kernel, re.IGNORECASE)), "everything else")


def table(row: dict[str, Any]) -> str:
    whole = row["milliseconds_per_update"]
    lines = [f"{row['config']}: {whole:.2f} ms of kernels, {row['products_at_the_matrix_rate']:.2f} at the matrix rate"]
    lines += [f"  {group:20} {ms:8.2f} ms {ms / whole:6.1%}" for group, ms in row["groups"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
