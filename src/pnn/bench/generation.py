"""Rows of generation: 256 new tokens after a prompt of 8, greedily, by transformers' `generate`, for 1, 8 and 64 texts at once.

With `transformers` its GPT-2 (124M parameters) takes turns with ours. Both in bf16 on a GPU that has it, in fp32 on a CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pnn.bench.inference import inference_precision
from pnn.bench.naive import DTYPES
from pnn.bench.timing import Budget, clean_slate, peak_memory
from pnn.bench.training import device_of, parameters_of, row_name, size_of
from pnn.config import RunConfig
from pnn.models import flops
from pnn.models.sections import build_model, model_config
from pnn.turns import take_turns

BATCHES = (1, 8, 64)
PROMPT, NEW = 8, 256
GPT2: dict[str, Any] = {}  # what differs from GPT2Config's defaults
THEIRS = "transformers gpt2"


def names(run: RunConfig, against: list[str]) -> list[str]:
    makers = [row_name(run), *([THEIRS] if "transformers" in against else [])]
    return [f"{name}, batch {batch}" for batch in BATCHES for name in makers]


def generation_rows(run: RunConfig, against: list[str], budget: Budget) -> dict[str, dict[str, Any]]:
    """Of ours and of GPT-2 beside it, by name."""
    device = device_of(run)
    precision = inference_precision(run) if device.type == "cuda" else "fp32"
    clean_slate(device)
    config = model_config(run.model)
    models: dict[str, Any] = {row_name(run): build_model(config)}
    if "transformers" in against:
        models[THEIRS] = GPT2LMHeadModel(GPT2Config(**GPT2))
    models = {name: model.to(device, DTYPES[precision]).eval() for name, model in models.items()}
    rows = {}
    for batch in BATCHES:
        runs: dict[str, Callable[[], Any]] = {name: partial(generate, model, batch) for name, model in models.items()}
        times = take_turns(runs, device, budget.seconds, warm_up=1)
        for name, taken in times.items():
            median = statistics.median(taken)
            model = models[name]
            rows[f"{name}, batch {batch}"] = {
                "name": f"{name}, batch {batch}",
                "what": "generate",
                "config": run.name,
                "implementation": "transformers" if name == THEIRS else "pnn",
                "compiled": False,
                "parameters": parameters_of(model),
                "precision": precision,
                "shapes": {"batch": batch, "prompt": PROMPT, "new_tokens": NEW}
                | ({} if name == THEIRS else size_of(model.config)),
                "tokens_per_second": {
                    key: batch * NEW / value for key, value in (("median", median), ("low", max(taken)), ("high", min(taken)))
                },
                "milliseconds_per_update": 1000 * median / NEW,  # of a step: one token for every text
                "turns": len(taken),
                "flops_per_token": flops.inference_flops(config, PROMPT + NEW / 2, 1.0),
                "peak_memory_bytes": peak_memory(device),
                "ours_over_it": statistics.median(b / a for a, b in zip(times[row_name(run)], taken, strict=True)),
            }
    return rows


def generate(model: Any, batch: int) -> Any:
    prompt = torch.arange(PROMPT, device=model.device).expand(batch, -1) + 5
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Speeds: of the scalar model over GPT-2's, and of expanded states over the additive decoder's."""
    timed = [row for row in rows if row["what"] == "generate" and "error" not in row]
    by_name = {(row["config"], row["name"]): row for row in timed}
    speed = {row["name"]: row["tokens_per_second"]["median"] for row in timed}
    found = {}
    for batch in BATCHES:
        end = "" if batch == 1 else f"_batch_{batch}"
        for row in timed:
            beside = by_name.get((row["config"], f"{THEIRS}, batch {batch}"))
            if row["name"] == f"ddl scalar, batch {batch}" and beside is not None:
                found[f"ddl_generate_vs_transformers_gpt2{end}"] = beside["ours_over_it"]
        for carrier in ("scalar", "channel", "token"):
            pair = [speed.get(f"ddl {name}, batch {batch}") for name in (carrier, "additive")]
            if pair[0] is not None and pair[1] is not None:
                found[f"ddl_{carrier}_generate_vs_additive{end}"] = pair[0] / pair[1]
    return found
