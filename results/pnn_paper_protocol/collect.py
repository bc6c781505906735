"""From the measured runs to result.json, figures/ and the table of README.md.

python results/pnn_paper_protocol/collect.py [RUNS]   # RUNS: run folders to copy in first; without it, what is in measured/
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
from pnn.files import write_between, write_json, write_text
from pnn.results import median_speed
from pnn.runs import check_commit, read_config, read_json, read_metrics

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
FILES = ("config.yaml", "environment.json", "metrics.jsonl", "evaluation.json")
NAMES = {
    "published": "PNN as the published code has it",
    "equations": "PNN, the paper's equations",
    "bert": "BERT baseline, 12 layers",
}
TEXTS = {"raw": None, "tokens": "wikitext_tokens", "plain": "wikitext_plain"}  # None: the run's own validation text
# The paper's own figures, WikiText-103 valid after training on WikiText-103: Table 1, Figure 1 (steps) and its minutes on an
# A100. Figure 1 has 46.8 after the last step and 47.4 "at the head", which reads the same state.
PAPER = {"pnn": 0.474, "bert": 0.570}
PAPER_ROWS = (
    "| *the paper's PNN* | 53.7M | 15 | 4.7 | 34.4 | 39.1 | 43.2 | 46.8 (47.4) |  |  | 269.5 |  |",
    "| *the paper's BERT* | 132.1M | 15 |  |  |  |  | 57.0 |  |  | 248.2 |  |",
)
KEYS = ("accuracy", "accuracy_interval", "accuracy_by_step", "accuracy_by_step_interval", "loss", "targets")


def copy_in(runs: Path) -> None:
    for run in sorted(path.parent for path in runs.glob("*/evaluation.json")):
        check_commit(run)
        folder = MEASURED / run.name
        folder.mkdir(parents=True, exist_ok=True)
        data = read_config(run).data
        for name in FILES:  # with DATA for where the text lay, as in configs/
            text = (run / name).read_text(encoding="utf-8").replace(str(Path(data.tokenizer).parent), "DATA")
            write_text(folder / name, text.replace(data.prepared, "prepared"))
        shutil.copy(runs / f"{run.name}.wall.json", folder / "wall.json")


def measured(run: str) -> dict[str, Any]:
    folder = MEASURED / run
    evaluation, metrics = read_json(folder / "evaluation.json"), read_metrics(folder / "metrics.jsonl")
    texts = {name: evaluation if key is None else evaluation["sets"][key] for name, key in TEXTS.items()}
    return {
        **{key: evaluation[key] for key in KEYS},  # on WikiText-103 valid, raw
        "gain_over_first_step": evaluation["gain_over_first_step"],
        "texts": {name: {key: result[key] for key in KEYS} for name, result in texts.items()},
        "parameters": evaluation["parameters"],
        "epochs": read_config(folder).training.epochs,
        "updates": max(row["step"] for row in metrics),
        "wall_minutes": read_json(folder / "wall.json")["seconds"] / 60,
        "tokens_per_second": median_speed(metrics),
        "seed": read_config(folder).training.seed,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    steps = max((len(row["accuracy_by_step"]) for name, row in rows.items() if name != "bert"), default=5)
    names = " | ".join(f"step {t}" for t in range(steps))
    lines = [
        f"| model | parameters | epochs | {names} | 95 % | plain text | minutes | tokens/s |",
        "|---" * (steps + 7) + "|",
    ]
    for name, row in rows.items():
        per_step = row["accuracy_by_step"] if name != "bert" else [None] * (steps - 1) + [row["accuracy"]]
        cells = ["" if value is None else f"{100 * value:.1f}" for value in per_step]
        low, high = row["accuracy_interval"]
        lines.append(
            f"| {NAMES[name]} | {row['parameters'] / 1e6:.1f}M | {row['epochs']:g} | {' | '.join(cells)} "
            f"| {100 * low:.1f}–{100 * high:.1f} | {100 * row['texts']['plain']['accuracy']:.1f} "
            f"| {row['wall_minutes']:.1f} | {row['tokens_per_second'] / 1e3:,.0f}K |"
        )
    return "\n".join([*lines, *PAPER_ROWS])


def answer(rows: dict[str, dict[str, Any]]) -> str:
    parts = []
    for name, row in rows.items():
        low, high = row["accuracy_interval"]
        paper = PAPER["bert" if name == "bert" else "pnn"]
        parts.append(
            f"{NAMES[name]} reaches {100 * row['accuracy']:.1f} % ({100 * low:.1f}–{100 * high:.1f}) of masked tokens of "
            f"WikiText-103 valid after {row['epochs']:g} epochs in {row['wall_minutes']:.1f} minutes "
            f"(the paper: {100 * paper:.1f} %)"
        )
    return "; ".join(parts) + "."


def main() -> None:
    if len(sys.argv) > 1:
        copy_in(Path(sys.argv[1]))
    rows = {name: measured(name) for name in NAMES if (MEASURED / name).exists()}
    write_json(
        HERE / "result.json",
        {
            "question": "What does the paper's experiment give, run as its Table 2 says, and how long does it take?",
            "protocol": "1,000,000 lines sampled from 1,102,978 of English Wikipedia (in place of WikiText-103's training "
            "set), 15 epochs, 1,152 sequences an update, 15 % of tokens masked, all as [MASK]; AdamW (0.9, 0.999), 3e-4, "
            "warm-up 500, cosine to 1e-5, weight decay 0.01 on matrices, clipping 1.0, dropout 0.1, bf16; evaluated on all "
            "2,188 lines of WikiText-103 valid (raw) that pass the paper's filter, masks fixed. wall_minutes: the training "
            "command from start to end with its evaluations, tokenised text at hand",
            "seeds": sorted({row["seed"] for row in rows.values()}),
            "hardware": read_json(MEASURED / next(iter(rows)) / "environment.json")["hardware"]["gpus"],
            "metrics": rows,
            "answer": answer(rows),
            "command": "results/pnn_paper_protocol/run.sh READING DATA RUNS; python results/pnn_paper_protocol/collect.py RUNS",
        },
    )
    evaluations = {name: read_json(MEASURED / name / "evaluation.json") for name in rows}
    save(png(accuracy_by_step(evaluations)), HERE / "figures" / "accuracy_by_step.png")
    metrics = {name: read_metrics(MEASURED / name / "metrics.jsonl") for name in rows}
    save(png(training_curves(metrics)), HERE / "figures" / "training_curves.png")
    write_between(HERE / "README.md", "table", table(rows))
    print(table(rows))
    print(json.loads((HERE / "result.json").read_text())["answer"])


if __name__ == "__main__":
    main()
