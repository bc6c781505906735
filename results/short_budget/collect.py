"""From the measured runs to result.json, figures/ and the table of README.md.

python results/short_budget/collect.py [RUNS]     # RUNS: run folders to copy in first; without it, what is in measured/
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from pnn.figures.accuracy import accuracy_by_step
from pnn.figures.style import png, save
from pnn.figures.training import training_curves
from pnn.files import write_between, write_json
from pnn.results import median_speed
from pnn.runs import check_commit, read_json, read_metrics

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
FILES = ("config.yaml", "environment.json", "metrics.jsonl", "evaluation.json")
# Accuracies on held-out Wikipedia and WikiText valid, measured with another code base before this one existed:
# text cut into full rows of 128 tokens, one seed each.
REFERENCE = {
    "pnn": (0.307, 0.269),
    "pnn_delta_norm": (0.311, 0.274),
    "pnn_tied": (0.298, 0.266),
    "bert": (0.324, 0.291),
}
NAMES = {
    "pnn": "PNN, the paper's equations",
    "pnn_delta_norm": "PNN as the published code has it",
    "pnn_tied": "the same, tied head with a transform",
    "bert": "BERT baseline, 12 layers",
}


def copy_in(runs: Path) -> None:
    for run in sorted(path.parent for path in runs.glob("*/evaluation.json")):
        check_commit(run)
        (MEASURED / run.name).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copy(run / name, MEASURED / run.name / name)


def measured(run: str) -> dict[str, Any]:
    folder = MEASURED / run
    evaluation, metrics = read_json(folder / "evaluation.json"), read_metrics(folder / "metrics.jsonl")
    wikitext = evaluation["sets"]["wikitext_tokens"]
    reference = REFERENCE[run.removeprefix("rows_")]
    return {
        "parameters": evaluation["parameters"],
        "held_out": {key: evaluation[key] for key in ("accuracy", "accuracy_interval", "accuracy_by_step", "loss")},
        "wikitext_tokens": {key: wikitext[key] for key in ("accuracy", "accuracy_interval", "accuracy_by_step", "loss")},
        "wikitext_plain_accuracy": evaluation["sets"]["wikitext_plain"]["accuracy"],
        "reference": {"held_out": reference[0], "wikitext_tokens": reference[1]},
        "difference": {
            "held_out": round(evaluation["accuracy"] - reference[0], 4),
            "wikitext_tokens": round(wikitext["accuracy"] - reference[1], 4),
        },
        "tokens_per_second": median_speed(metrics),
        "step_at_which_the_loss_falls_below_6": next(
            (row["step"] for row in metrics if row.get("last_step_loss", 99) < 6), None
        ),
    }


def order(rows: dict[str, dict[str, Any]]) -> list[str]:
    return sorted(rows, key=lambda row: rows[row]["held_out"]["accuracy"])


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| model | parameters | held out | 95 % interval | WikiText valid | reference | tokens/s | loss below 6 at update |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        low, high = row["held_out"]["accuracy_interval"]
        reference = row["reference"]
        kind = NAMES[name.removeprefix("rows_")] + (", **full rows**" if name.startswith("rows_") else "")
        lines.append(
            f"| {kind} | {row['parameters'] / 1e6:.1f}M | {100 * row['held_out']['accuracy']:.1f} "
            f"| {100 * low:.1f}–{100 * high:.1f} | {100 * row['wikitext_tokens']['accuracy']:.1f} "
            f"| {100 * reference['held_out']:.1f} / {100 * reference['wikitext_tokens']:.1f} "
            f"| {row['tokens_per_second'] / 1e3:,.0f}K | {row['step_at_which_the_loss_falls_below_6']} |"
        )
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) > 1:
        copy_in(Path(sys.argv[1]))
    lines = {name: measured(name) for name in NAMES}
    rows = {f"rows_{name}": measured(f"rows_{name}") for name in NAMES if (MEASURED / f"rows_{name}").exists()}
    reference_order = sorted(REFERENCE, key=lambda name: REFERENCE[name][0])

    def worst(results: dict[str, dict[str, Any]]) -> float:
        return max(abs(d) for row in results.values() for d in row["difference"].values())

    same_order = order(lines) == reference_order
    answer = (
        f"With lines kept apart the rows come out in {'the' if same_order else 'another'} order "
        f"({' < '.join(order(lines))}; reference {' < '.join(reference_order)}) and up to {100 * worst(lines):.1f} points away"
    )
    if rows:
        gain = {
            name: lines[name]["held_out"]["accuracy"] - row["held_out"]["accuracy"]
            for name, row in ((key.removeprefix("rows_"), row) for key, row in rows.items())
        }
        gains = ", ".join(f"{n} {100 * g:+.1f}" for n, g in gain.items())
        answer += (
            f"; on the reference's full rows the same code is at most {100 * worst(rows):.1f} points away, "
            f"so the cut of the text makes most of the difference ({gains} points for lines over rows)"
        )
    write_json(
        HERE / "result.json",
        {
            "question": "How do PNN, its variants and the BERT baseline compare after 147M tokens of Wikipedia?",
            "protocol": "3,000 updates of 49,152 real tokens, 370,000 lines of Wikipedia seen 5.1 times, packed without "
            "padding, attention within a line; 15 % of tokens masked; AdamW (0.9, 0.98), 3e-4, warm-up 500, cosine to 9e-6, "
            "bf16; evaluated on 3,000 held-out lines and on WikiText-103 valid as published (.tokens), masks fixed. "
            "full rows: [CLS] + 127 tokens cut from all lines end to end, 238,000 rows, attention across lines",
            "seeds": [0],
            "hardware": read_json(MEASURED / "pnn" / "environment.json")["hardware"]["gpus"],
            "metrics": lines | rows,
            "answer": answer + ".",
            "command": "results/short_budget/run.sh DATA RUNS && python results/short_budget/collect.py RUNS",
        },
    )
    evaluations = {name: read_json(MEASURED / name / "evaluation.json") for name in NAMES}
    save(png(accuracy_by_step(evaluations)), HERE / "figures" / "accuracy_by_step.png")
    metrics = {name: read_metrics(MEASURED / name / "metrics.jsonl") for name in lines | rows}
    save(png(training_curves(metrics)), HERE / "figures" / "training_curves.png")
    write_between(HERE / "README.md", "table", table(lines | rows))
    print(table(lines | rows))
    print(json.loads((HERE / "result.json").read_text())["answer"])


if __name__ == "__main__":
    main()
