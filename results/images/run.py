"""Digits: a PNN and two ViTs, three seeds each, on images that none has seen. Writes result.json and the README's table.

python results/images/run.py            # some minutes on one CPU core
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from transformers import ViTForImageClassification

import pnn
from pnn.files import write_between, write_json
from pnn.images import Images, Recipe, hits_by_step, train, vit_of_equal_size
from pnn.images.baseline import vit_config
from pnn.numbers import bare_per_cent, estimate, interval
from pnn.stats import Estimate, of_a_share, seeds_and_sequences

HERE = Path(__file__).resolve().parent
SEEDS = (0, 1, 2)
RATES = (2e-3, 4e-3)  # each arm has its own best, with one seed, on a fifth of what it learns from
RECIPE = {"epochs": 40, "batch_size": 32, "shift": 1}
CONFIG = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "num_steps": 4,
    "update": "rewrite",
    "initializer_range": 0.1,
    "num_labels": 10,
}


def digits() -> tuple[Images, Images]:
    """1,797 images of handwritten digits, 8 × 8 pixels: to learn from, and a quarter of each class held out."""
    found = load_digits()
    processor = pnn.PNNImageProcessor(image_size=8, num_channels=1)
    return Images.of(found.images / 16, found.target, [str(one) for one in range(10)], processor).split(0.25)


def arms() -> dict[str, Callable[[], Any]]:
    config = pnn.PNNImageConfig(**CONFIG)
    return {
        "PNN, one refiner four times": lambda: pnn.PNNForImageClassification(config),
        "ViT, 4 layers, equal parameters": lambda: ViTForImageClassification(vit_of_equal_size(config)),
        "ViT, 4 layers, equal width": lambda: ViTForImageClassification(vit_config(config, 64, 4)),
    }


def trained(make: Callable[[], Any], learn: Images, rate: float, seed: int) -> Any:
    torch.manual_seed(seed)
    model = make()
    train(model, learn, Recipe(**RECIPE, learning_rate=rate, seed=seed))
    return model


def main(learn: Images, held_out: Images) -> dict[str, Any]:
    rows, hits = [], {}
    some, rest = learn.split(0.2, seed=1)
    for name, make in arms().items():
        tried = {rate: float(hits_by_step(trained(make, some, rate, SEEDS[0]), rest)[-1].mean()) for rate in RATES}
        rate, found = max(tried, key=lambda one: tried[one]), []
        for seed in SEEDS:
            model = trained(make, learn, rate, seed)
            found.append(hits_by_step(model, held_out))
            print(f"{name}, {tried}, seed {seed}: {found[-1][-1].mean():.4f}", flush=True)
        by_step = np.stack(found).astype(np.float64)  # (seeds, steps, images)
        hits[name] = by_step[:, -1]
        ones = np.ones(len(held_out))
        accuracy = of_a_share(seeds_and_sequences(hits[name], ones), len(held_out))
        row = {"name": name, "parameters": model.num_parameters(), "rate": rate, "rates": {str(k): v for k, v in tried.items()}}
        row["accuracy"] = accuracy.as_json()
        row["seeds"] = by_step[:, -1].mean(axis=1).tolist()
        row["by_step"] = by_step.mean(axis=(0, 2)).tolist()
        rows.append(row)
    first = next(iter(hits))
    for row in rows[1:]:
        row["pnn_above"] = seeds_and_sequences(hits[first] - hits[row["name"]], ones).as_json()
    images = {"learnt from": len(learn), "held out": len(held_out)}
    return {"images": images, "seeds": list(SEEDS), "recipe": RECIPE, "model": CONFIG, "rows": rows}


def table(result: dict[str, Any]) -> str:
    lines = ["| | parameters | accuracy, % | each seed | the PNN's lead, points |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        found = Estimate.from_json(row["accuracy"])
        seeds = ", ".join(bare_per_cent(one) for one in row["seeds"])
        above = estimate(row["pnn_above"], 1, scale=100, plus=True) if "pnn_above" in row else ""
        shown = f"{bare_per_cent(found.value)} ({interval(found[1:])})"
        lines.append(f"| {row['name']} | {row['parameters']:,} | {shown} | {seeds} | {above} |")
    steps = result["rows"][0]["by_step"]
    lines += ["", "| the PNN after step | " + " | ".join(str(one) for one in range(len(steps))) + " |"]
    lines += ["|---" * (len(steps) + 1) + "|", "| accuracy, % | " + " | ".join(bare_per_cent(one) for one in steps) + " |"]
    return "\n".join(lines)


if __name__ == "__main__":
    result = main(*digits())
    write_json(HERE / "result.json", result)
    write_between(HERE / "README.md", "digits", table(result))
