"""Scores × repair on a model: held-out loss right after pruning heads and neurons to 10, 20 and 30 % fewer parameters.

python results/shrink/scores/run.py MODEL TEXT OUTPUT.jsonl [--seeds 0 1 2] [--arms gradient-shared surgeon-even …]

What is in OUTPUT already is not done again; several processes can share it, each with seeds or arms of its own. The seed
draws the rows that units are scored and models repaired on; held-out rows are the same for all.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pnn.files import write_json
from pnn.plasticity import prune
from pnn.plasticity.measure import held_out_nats
from pnn.plasticity.repair import repair
from pnn.plasticity.run import open_model
from pnn.plasticity.text import Text, read_text
from pnn.plasticity.unit_scores import score_units
from pnn.plasticity.units import Unit, UnitScores, parameters_of, unit_map
from pnn.progress import track
from pnn.runs import read_metrics
from pnn.training.tracking import environment

KINDS = ("head", "neuron")
BUDGETS = (0.1, 0.2, 0.3)
LENGTH, CALIBRATION_ROWS, HELD_OUT_ROWS, BATCH_ROWS = 128, 32, 24, 8
ROUNDS = 4
# how units are scored, and whether the budget is shared out over all matrices by score per parameter or evenly; in rounds: part
# by part, shared out likewise, with scores anew, on other rows, after each
ARMS = (
    ("fisher", "shared"),
    ("fisher", "rounds"),
    ("gradient", "shared"),
    ("surgeon", "even"),
    ("wanda", "even"),
    ("gradient", "even"),
    ("magnitude", "even"),
    ("random", "even"),
)


def chosen(model: PreTrainedModel, scores: UnitScores, share: float, sharing: str) -> list[Unit]:
    """The units that go: the least useful, until the model has this share of its parameters less."""
    wanted = share * model.num_parameters()
    maps = {kind: unit_map(model, kind) for kind in KINDS}
    rows = [(kind, layer) for kind in KINDS for layer in range(len(maps[kind]))]
    sizes = {at: parameters_of(model, *at) for at in rows}
    if sharing == "even":
        part = wanted / sum(sizes[kind, layer] * len(maps[kind][layer]) for kind, layer in rows)
        return [
            Unit(kind, layer, maps[kind][layer][place])
            for kind, layer in rows
            for place in scores.of[kind][layer].argsort(stable=True)[: round(part * len(maps[kind][layer]))].tolist()
        ]
    order = sorted(
        (float(value) / sizes[kind, layer], Unit(kind, layer, maps[kind][layer][place]))
        for kind, layer in rows
        for place, value in enumerate(scores.of[kind][layer])
    )
    left = {(kind, layer): len(maps[kind][layer]) - 1 for kind, layer in rows}  # one of each stays in every layer
    gone: list[Unit] = []
    for _, unit in order:
        at = unit.kind, unit.layer
        if wanted >= sizes[at] / 2 and left[at]:
            gone.append(unit)
            wanted, left[at] = wanted - sizes[at], left[at] - 1
    return gone


def in_rounds(model: PreTrainedModel, text: Text, method: str, share: float, seed: int) -> PreTrainedModel:
    now, whole = model, model.num_parameters()
    for round_ in range(1, ROUNDS + 1):
        scores = score_units(now, calibration(text, seed, round_), method, KINDS, seed=seed)
        now = prune(now, chosen(now, scores, 1 - (1 - share * round_ / ROUNDS) * whole / now.num_parameters(), "shared"))
    return now


def calibration(text: Text, seed: int, round_: int = 1) -> list[dict[str, torch.Tensor]]:
    return list(text.batches(text.sample(CALIBRATION_ROWS, seed, round_), BATCH_ROWS))


def measured(model: PreTrainedModel, text: Text, labels: dict[str, Any]) -> dict[str, Any]:
    nats, targets = held_out_nats(model, text)
    return labels | {
        "parameters": model.num_parameters(),
        "heads": sum(map(len, unit_map(model, "head"))),
        "neurons": sum(map(len, unit_map(model, "neuron"))),
        "nats": [round(float(one), 4) for one in nats],
        "targets": [int(one) for one in targets],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "text", "output"):
        parser.add_argument(name)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=["-".join(arm) for arm in ARMS], choices=["-".join(arm) for arm in ARMS])
    asked = parser.parse_args()
    output = Path(asked.output)
    done = [tuple(row.get(key) for key in LABELS) for row in read_metrics(output)] if output.exists() else []
    loaded = open_model(asked.model)
    model = loaded.model
    text = read_text(model, loaded.tokenizer, asked.text, length=LENGTH, held_out_rows=HELD_OUT_ROWS, progress=track)
    write_json(output.parent / "environment.json", environment(0, 1))

    def keep(row: dict[str, Any]) -> None:
        with open(output, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print({key: row.get(key) for key in LABELS}, round(sum(row["nats"]) / sum(row["targets"]), 4), flush=True)

    if not done:
        keep(measured(model, text, {"arm": "unpruned"}))
    for seed in asked.seeds:
        batches = calibration(text, seed)
        for method, sharing in (arm for arm in ARMS if "-".join(arm) in asked.arms):
            left = [
                (budget, repaired)
                for budget in BUDGETS
                for repaired in (False, True)
                if (f"{method}, {sharing}", budget, repaired, seed) not in done
            ]
            if not left:
                continue
            scores = score_units(model, batches, method, KINDS, seed=seed)
            for budget, repaired in left:
                if sharing == "rounds":
                    small = in_rounds(model, text, method, budget, seed)
                else:
                    small = prune(model, chosen(model, scores, budget, sharing))
                if repaired:
                    small = repair(small, model, batches)
                labels = {"arm": f"{method}, {sharing}", "budget": budget, "repaired": repaired, "seed": seed}
                keep(measured(small, text, labels))


LABELS = ("arm", "budget", "repaired", "seed")

if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
