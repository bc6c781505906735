"""Plays every arm on the stream, one JSON file each; what is there already is not played again.

python results/plastic_stream/run.py MODEL TEXTS OUTPUT [--seeds 0 1 2]     # TEXTS/{stories,encyclopaedia,questions}.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from stream import CYCLES, GRID, RATES, Always, AtRandom, Chooser, Controller, Plan, cut_vocabulary, overall, play

from pnn.files import write_json
from pnn.plasticity.run import open_model
from pnn.plasticity.text import read_text
from pnn.progress import track
from pnn.training.tracking import environment

DOMAINS = ("stories", "encyclopaedia", "questions")  # in the order of the stream
LENGTH, TRAIN_ROWS, HELD_OUT_ROWS = 64, 192, 12
WITHOUT_GROWTH = f"{CYCLES[RATES[-1]]}, nothing grows"
ARMS: dict[str, Callable[[int], Chooser]] = {
    "controller": lambda seed: Controller(GRID),
    "at random": lambda seed: AtRandom(GRID, seed),
    **{str(choice): lambda seed, choice=choice: Always(choice) for choice in GRID},  # type: ignore[misc]
    WITHOUT_GROWTH: lambda seed: Always(CYCLES[RATES[-1]]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "texts", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked = parser.parse_args()
    loaded, plan = open_model(str(asked.model)), Plan()
    sizes = {"length": LENGTH, "train_rows": TRAIN_ROWS, "held_out_rows": HELD_OUT_ROWS}
    model, domains = cut_vocabulary(
        loaded.model,
        {
            name: read_text(loaded.model, loaded.tokenizer, str(asked.texts / f"{name}.txt"), progress=track, **sizes)
            for name in DOMAINS
        },
    )
    asked.output.mkdir(parents=True, exist_ok=True)
    write_json(asked.output / "environment.json", environment(0, 1))
    about = {**asdict(plan), **sizes, "vocabulary": model.config.vocab_size}
    for seed in asked.seeds:
        for arm, chooser in ARMS.items():
            file = asked.output / f"{arm.replace(' ', '_').replace(',', '').replace('%', 'per_cent')}-{seed}.json"
            if not file.exists():
                record = play(model, domains, chooser(seed), plan, seed, grows=arm != WITHOUT_GROWTH)
                write_json(file, {"arm": arm, "seed": seed, "plan": about} | record)
                print(f"seed {seed}, {arm}: {overall(record):.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
