"""The arms of the comparison, written as configs for `pnn sweep`.

    python results/plastic_training/arms.py FOLDER [--model gpt2] [--size toy] [--updates 240]

`full` trains for so many updates. Every other arm trains for as many as cost the same: in FLOPs, which are counted, or in
seconds, which are measured here, small and full model in turns. Costs are taken to be linear in the share of units, so a model
that grows from 1/2 to 1 costs what its mean size costs. What each run has really spent is in its metrics.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel

from pnn.config import PlasticityConfig, TrainingConfig, load_config
from pnn.files import write_json, write_text
from pnn.models.sections import build_model, model_config
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.measure import training_flops_per_token
from pnn.plasticity.units import rearrange
from pnn.training.optim import descend, make_optimizer
from pnn.turns import take_turns

SMALL = 0.5
FULL = PlasticityConfig(start=1.0, end=1.0, changes=8)


@dataclass(frozen=True)
class Size:
    extends: str  # text, length and rates
    train: str | None  # None: what `extends` has, or --set data.train=…
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    updates: int


SIZES = {
    "toy": Size("ddl_tiny", "synthetic_hard", 128, 64, 2, 4, 240),
    "text": Size(str(Path(__file__).resolve().parents[1] / "causal_pnn" / "text.yaml"), None, 1024, 64, 4, 4, 1000),
    "mini": Size("ddl_mini", None, 50304, 384, 6, 6, 1000),
}
MODELS = ("gpt2", "ddl", "pnn_causal")


@dataclass(frozen=True)
class Arm:
    told: str
    shape: PlasticityConfig
    budget: str  # what it has as much of as `full`: "flops", "seconds" or "updates" of `of`
    of: str = "full"


SMALLER, GROWING = replace(FULL, start=SMALL, end=SMALL), replace(FULL, start=SMALL)
ARMS = {
    "full": Arm("the whole model", FULL, "updates"),
    "small_flops": Arm("half of the heads and neurons", SMALLER, "flops"),
    "growing_flops": Arm("grows from half to the whole", GROWING, "flops"),
    "small_seconds": Arm("half of the heads and neurons", SMALLER, "seconds"),
    "growing_seconds": Arm("grows from half to the whole", GROWING, "seconds"),
    "small_updates": Arm("half of the heads and neurons", SMALLER, "updates", "growing_flops"),
    "turnover": Arm("a tenth of its units is replaced, 8 times", replace(FULL, turnover=0.1), "updates"),
    "turnover_random": Arm("the same, units chosen at random", replace(FULL, turnover=0.1, prune_by="random"), "updates"),
}
# What is asked, in advance: the loss of the first less that of the second. Below zero is better.
PAIRS = {
    "positive control: do grown units help at all? (equal updates)": [("growing_flops", "small_updates")],
    "growing, equal FLOPs": [("growing_flops", "full"), ("growing_flops", "small_flops")],
    "growing, equal time": [("growing_seconds", "full"), ("growing_seconds", "small_seconds")],
    "pruning and growing anew, equal FLOPs": [("turnover", "full")],
    "does it matter who goes?": [("turnover", "turnover_random")],
}


def model_of(model: str, size: Size) -> dict[str, Any]:
    width = size.hidden_size
    if model == "gpt2":
        shape = {"n_embd": width, "n_layer": size.layers, "n_head": size.heads}
        return {"type": "transformers", "architecture": "gpt2", "vocab_size": size.vocab_size, **shape}
    shared = {"vocab_size": size.vocab_size, "hidden_size": width, "num_attention_heads": size.heads}
    if model == "ddl":
        return {"type": "ddl", **shared, "num_hidden_layers": size.layers}
    inner = {"ffn": "geglu", "intermediate_size": 2 * width, "update": "rewrite"}
    return {"type": "pnn_causal", **shared, **inner, "schedule": [*range(size.layers)]}


def mean_share(shape: PlasticityConfig) -> float:
    """Of a model's units, over the whole run."""
    before = shape.start + (shape.end - shape.start) * (shape.changes - 1) / (2 * shape.changes)
    return shape.until * before + (1 - shape.until) * shape.end


def cut(model: PreTrainedModel, share: float) -> PreTrainedModel:
    architecture = architecture_of(model)
    counts = {kind: architecture.original(kind, model.config) for kind in ("head", "neuron")}
    layers = len(architecture.blocks(model))
    rearrange(model, {kind: [list(range(round(share * count)))] * layers for kind, count in counts.items()})
    return model


def costs(model: str, size: Size, length: int, rows: int, device: torch.device) -> dict[str, tuple[float, float]]:
    """(FLOPs of a token, seconds of an update) of the small and of the full model."""
    models = {}
    for name, share in (("small", SMALL), ("full", 1.0)):
        shape = model_config(model_of(model, size), max_position_embeddings=length)
        models[name] = cut(build_model(shape), share).to(device)
    ids = torch.randint(0, size.vocab_size, (rows, length), device=device)
    optimizers = {name: make_optimizer(one, TrainingConfig()) for name, one in models.items()}

    def update(name: str) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = models[name](input_ids=ids, labels=ids, use_cache=False).loss
        descend(models[name], optimizers[name], loss, 1e-4)

    times = take_turns({name: lambda name=name: update(name) for name in models}, device, seconds=4.0)
    return {name: (training_flops_per_token(one, length), median(times[name])) for name, one in models.items()}


def cost_of_update(shape: PlasticityConfig, cost: Mapping[str, Sequence[float]], budget: str) -> float:
    """The mean over a run, as a share of what an update of the full model costs."""
    at = ("flops", "seconds").index(budget)
    small, full = cost["small"][at], cost["full"][at]
    return (small + (full - small) * (mean_share(shape) - SMALL) / (1 - SMALL)) / full


def updates_of(arm: Arm, full: int, cost: Mapping[str, Sequence[float]]) -> int:
    if arm.budget == "updates":
        return full if arm.of == "full" else updates_of(ARMS[arm.of], full, cost)
    return round(full / cost_of_update(arm.shape, cost, arm.budget))


def config_of(name: str, model: str, size: Size, updates: int) -> dict[str, Any]:
    return {
        "extends": size.extends,
        "name": name,
        "model": model_of(model, size),
        **({"data": {"train": size.train}} if size.train else {}),
        "training": {"max_steps": updates, "warmup_steps": max(1, updates // 12), "compile": False, "tensorboard": False},
        "plasticity": asdict(ARMS[name].shape),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--updates", type=int)
    asked = parser.parse_args()
    size, device = SIZES[asked.size], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = load_config(size.extends)
    cost = costs(asked.model, size, base.data.max_length, base.training.batch_size, device)
    full = asked.updates or size.updates
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name, arm in ARMS.items():
        config = config_of(name, asked.model, size, updates_of(arm, full, cost))
        write_text(asked.folder / f"{name}.yaml", yaml.safe_dump(config, sort_keys=False))
    write_json(asked.folder / "costs.json", {"model": asked.model, "size": asked.size, "flops_and_seconds": cost})


if __name__ == "__main__":
    main()
