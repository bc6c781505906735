"""Can a grown head help at all, and if so, does it matter where it grows and what it starts as?

python results/shrink/growth/run.py MODEL DATA OUTPUT.jsonl [--seeds 0 1 2 --prune 0.98 --grow 0.2 --updates 120 --rate 3e-4 …]

Every arm makes the same updates on the same rows in the same order; the seed draws the rows, their order and what is random.
The model's vocabulary is cut to the tokens of the text, most of a small model's work. What is in OUTPUT already is not done
again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "plastic_stream"))
from stream import cut_vocabulary

from pnn.files import write_json
from pnn.plasticity.phases import score_heads
from pnn.plasticity.run import open_model
from pnn.plasticity.text import read_text
from pnn.progress import track
from pnn.runs import read_metrics
from pnn.studies.plasticity.arms import FIRST_ROUND, StudySettings, cycle_of, growth_control, run_arm
from pnn.training.tracking import environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "output"):
        parser.add_argument(name)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prune", type=float, default=0.98)
    parser.add_argument("--grow", type=float, default=0.2)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--multiplier", type=float, default=3.0, help="How many times as fast new heads learn.")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=48)
    parser.add_argument("--arms", nargs="+", default=None, choices=growth_control(), help="These alone.")
    asked = parser.parse_args()
    output = Path(asked.output)
    done = {(row["label"], row["seed"]) for row in read_metrics(output)} if output.exists() else set()
    plan = StudySettings(1, asked.updates, asked.rate, asked.batch, evaluate_every=asked.updates)
    loaded = open_model(asked.model)
    text = read_text(
        loaded.model, loaded.tokenizer, asked.data, length=asked.length, held_out_rows=asked.held_out, progress=track
    )
    model, texts = cut_vocabulary(loaded.model, {"text": text})
    text = texts["text"]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output.parent / "environment.json", environment(0, 1))
    settings = {"rate": asked.rate, "batch": asked.batch, "held_out_rows": len(text.held_out)}
    settings |= {"length": text.train.shape[1], "train_rows": len(text.train), "vocabulary": model.config.vocab_size}
    for seed in asked.seeds:
        arms = growth_control(asked.prune, asked.grow, asked.multiplier)
        scores = score_heads(model, text, cycle_of(arms["nothing grows"], plan, seed), FIRST_ROUND)
        for label, arm in arms.items():
            if (label, seed) in done or (asked.arms and label not in asked.arms):
                continue
            found = run_arm(model, text, arm, plan, seed, scores)
            row = {"label": label, **settings, **found}
            with open(output, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(
                seed, label, round(found["loss_pruned"], 4), round(found["loss_grown"], 4), round(found["loss"], 4), flush=True
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
