"""Rows of generation: 256 new tokens after a prompt of 8, greedily, by transformers' `generate`, for 1, 8 and 64 texts at once.
With `batches` also 256 prompts of 4 to 64 tokens whose texts end by chance, after 64 tokens on average: in batches of 64, and
continuously (`models/continuous`).

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
from pnn.models.continuous import continue_all, sampled
from pnn.models.sections import build_model, model_config
from pnn.turns import take_turns

BATCHES = (1, 8, 64)
PROMPT, NEW = 8, 256
MANY, LENGTHS, MEAN = 256, (4, 64), 64  # prompts, their tokens, and new tokens on average
GPT2: dict[str, Any] = {}  # what differs from GPT2Config's defaults
THEIRS = "transformers gpt2"
CONTINUOUS, BATCHED = "continuous", "batches"


def names(run: RunConfig, against: list[str]) -> list[str]:
    makers = [row_name(run), *([THEIRS] if "transformers" in against else [])]
    many = [f"{row_name(run)}, {MANY} prompts, {how}" for how in (CONTINUOUS, BATCHED) if BATCHED in against]
    return [f"{name}, batch {batch}" for batch in BATCHES for name in makers] + many


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

    def row(name: str, model: Any, taken: list[float], tokens: float, steps: float, shapes: dict[str, Any]) -> dict[str, Any]:
        """`tokens` and `steps`: of one turn."""
        median = statistics.median(taken)
        return {
            "name": name,
            "what": "generate",
            "config": run.name,
            "implementation": "transformers" if model is models.get(THEIRS) else "pnn",
            "compiled": False,
            "parameters": parameters_of(model),
            "precision": precision,
            "shapes": shapes | ({} if model is models.get(THEIRS) else size_of(model.config)),
            "tokens_per_second": {
                key: tokens / value for key, value in (("median", median), ("low", max(taken)), ("high", min(taken)))
            },
            "milliseconds_per_update": 1000 * median / steps,  # of a step: one token for every text
            "turns": len(taken),
            "flops_per_token": flops.inference_flops(config, PROMPT + NEW / 2, 1.0),
            "peak_memory_bytes": peak_memory(device),
        }

    for batch in BATCHES:
        runs: dict[str, Callable[[], Any]] = {name: partial(generate, model, batch) for name, model in models.items()}
        times = take_turns(runs, device, budget.seconds, warm_up=1)
        for name, taken in times.items():
            of_turn = {"batch": batch, "prompt": PROMPT, "new_tokens": NEW}
            found = row(f"{name}, batch {batch}", models[name], taken, batch * NEW, NEW, of_turn)
            found["ours_over_it"] = statistics.median(b / a for a, b in zip(times[row_name(run)], taken, strict=True))
            rows[found["name"]] = found
    if BATCHED not in against:
        return rows
    ours = models[row_name(run)]
    made: dict[str, list[int]] = {}  # tokens of each turn: texts end by chance
    ways = {how: partial(generate_many, ours, how == CONTINUOUS, made.setdefault(how, [])) for how in (CONTINUOUS, BATCHED)}
    for how, taken in take_turns(ways, device, budget.seconds, warm_up=1).items():
        tokens = statistics.mean(made[how])
        shapes: dict[str, Any] = {"batch": BATCHES[-1], "prompts": MANY, "prompt": list(LENGTHS), "new_tokens": tokens / MANY}
        found = row(f"{row_name(run)}, {MANY} prompts, {how}", ours, taken, tokens, tokens / BATCHES[-1], shapes)
        rows[found["name"]] = found
    return rows


def generate_many(model: Any, continuously: bool, made: list[int]) -> None:
    """Samples: any of 1/MEAN of the vocabulary ends a text. `made` is told how many tokens came of it."""
    size = model.config.vocab_size
    ends = range(max(1, round(size / MEAN)))
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTHS[0], LENGTHS[1] + 1, (MANY,), generator=draw).tolist()
    prompts = [torch.randint(0, size, (length,), generator=draw).tolist() for length in lengths]
    torch.manual_seed(0)
    if continuously:
        made.append(sum(map(len, continue_all(model, prompts, NEW, ends, sampled(1.0, None), BATCHES[-1]))))
        return
    tokens = 0
    settings = {"max_new_tokens": NEW, "eos_token_id": list(ends), "pad_token_id": 0, "do_sample": True, "top_k": 0}
    for at in range(0, MANY, BATCHES[-1]):
        part = prompts[at : at + BATCHES[-1]]
        longest = max(map(len, part))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in part], device=model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in part], device=model.device)
        new = model.generate(ids, attention_mask=mask, **settings)[:, longest:]
        ended = torch.isin(new, torch.tensor(list(ends), device=new.device))
        tokens += int(((ended.cumsum(1) - ended.long()) == 0).sum())  # up to the first end, that one too
    made.append(tokens)


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
    for name, value in speed.items():
        beside_it = speed.get(name.replace(CONTINUOUS, BATCHED))
        if name.endswith(CONTINUOUS) and beside_it is not None:
            found[f"{name.split(',')[0].replace(' ', '_')}_continuous_vs_batches"] = value / beside_it
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
