"""Fine-tune an encoder on SST-2 with a loss after every step, once for each seed, and measure every way of stopping early.

python results/halting/classifier/measure.py ENCODER DATA RUNS OUT.json [--seeds 3] [--limit 12000] [--tune-only]

DATA holds the official files (SST-2/train.tsv …). RUNS gets the classifiers, seed-0 and so on; those that are there are kept.
Each setting that `pnn calibrate` tries is measured on all dev examples: who is right, how many steps texts take, and the time
of predicting a quarter of them, in turns; speeds are ratios to all steps. On a CPU one thread computes, and its own time
counts. Who is right after each step is kept too: the control, the same numbers of steps at random, follows from it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pnn.bench.timing import machine
from pnn.evaluation.choosing import Batch, halting_settings, in_force, predictions, settings, steps_taken
from pnn.files import new_folder, write_json
from pnn.finetuning import classifiers
from pnn.finetuning.calibrate import asked_of, batches_of
from pnn.finetuning.encoding import encode
from pnn.finetuning.examples import read_local
from pnn.finetuning.loop import Plan, fine_tune, outputs
from pnn.finetuning.tasks import TASKS
from pnn.models.loading import load_as_named
from pnn.models.precision import learns_in, predicts_in
from pnn.progress import say
from pnn.runs import find_checkpoint
from pnn.turns import take_turns

SOME = 4  # every fourth batch is timed: they are sorted by length, so these are of all lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, help="training examples; default: all")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--turn-seconds", type=float, default=15, help="of timing, for each seed")
    parser.add_argument("--tune-only", action="store_true")
    asked = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    checkpoint, task = find_checkpoint(asked.encoder), TASKS[asked.task]
    config = classifiers.read_config(checkpoint, None)
    tokenizer, longest = classifiers.read_tokenizer(checkpoint, config)
    found = read_local(task, asked.data)
    train, dev = (
        encode(task, examples, tokenizer, longest, token_types=False)
        for examples in (found.train[: asked.limit], found.dev["dev"])
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    learning = Plan(
        task, train, {"dev": dev}, asked.epochs, 32, tokenizer.pad_token_id, longest, device, learns_in(device), every_step=True
    )
    plan = replace(learning, precision=predicts_in(device))
    rows = []
    for seed in range(asked.seeds):
        folder = asked.runs / f"seed-{seed}"
        if not folder.exists():
            model = classifiers.load_classifier(checkpoint, config, task, tokenizer, seed)
            tuned = fine_tune(model, learning, asked.rate, seed, lambda done, note: None)
            model.load_state_dict(tuned.weights)
            say(f"seed {seed}: {tuned.score:.4f} on dev after epoch {tuned.best_epoch}")
            with new_folder(folder) as partial:
                model.save_pretrained(partial)
        if asked.tune_only:
            continue
        model = load_as_named(folder).to(device)
        by_step = outputs(model, plan, dev, by_step=True)
        row: dict[str, Any] = {"seed": seed, "right_by_step": [digits(one) for one in by_step.argmax(-1) == dev.labels]}
        with torch.autocast(device.type, plan.precision, enabled=on_gpu):
            row["settings"] = measured(model, batches_of([dev], plan.batch_size), dev.labels, asked.turn_seconds)
        rows.append(row)
    if asked.tune_only:
        return
    known = {key: getattr(asked, key) for key in ("task", "epochs", "rate")}
    write_json(asked.out, known | {"examples": {"train": len(train), "dev": len(dev)}, "seeds": rows} | machine())


def digits(right: np.ndarray) -> str:
    return "".join(map(str, right.astype(int)))


@torch.no_grad()
def measured(model: PreTrainedModel, batches: list[Batch], labels: np.ndarray, seconds: float) -> list[dict[str, Any]]:
    model.eval()
    every = [*settings(model.config), *halting_settings(model, batches, asked_of(model))]
    order = np.concatenate([batch.sequence for batch in batches])
    rows = []

    def run(setting: Any, some: list[Batch]) -> list[torch.Tensor]:
        with in_force(model, setting):
            return [predictions(model, batch) for batch in some]

    clock = time.perf_counter if model.device.type == "cuda" else time.thread_time
    timed = batches[::SOME]
    turns = {setting.said: lambda setting=setting: run(setting, timed) for setting in every}
    times = take_turns(turns, model.device, seconds, warm_up=1, clock=clock)
    for setting in every:
        right, steps = np.empty(len(order), bool), np.empty(len(order), int)
        right[order] = torch.cat(run(setting, batches)).cpu().numpy() == labels[order]
        with in_force(model, setting):
            taken = [steps_taken(model, batch) for batch in batches]
        steps[order] = np.concatenate([one[batch.positions.numpy()] for one, batch in zip(taken, batches, strict=True)])
        row = {
            "setting": setting.said,
            "changes": setting.changes,
            "right": digits(right),
            "steps": float(steps.mean()),
            "seconds": float(np.median(times[setting.said])),
            "turns": len(times[setting.said]),
        }
        if (setting.changes["halt"] or {}).get("criterion") == "confidence":
            row["halted_after"] = np.bincount(steps, minlength=1 + int(steps.max())).tolist()  # texts, from step 0
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
