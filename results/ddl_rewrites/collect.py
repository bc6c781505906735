"""From trained runs to measured/, result.json, figures/ and the tables of README.md.

python results/ddl_rewrites/collect.py [RUNS [BENCH]]   # RUNS: folders VARIANT-SEED to copy in; BENCH: by `pnn bench`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pnn.bench.training import row_name
from pnn.figures.decoders import Curve, matched_curves
from pnn.figures.style import png, save
from pnn.files import write_between, write_json, write_text
from pnn.models.flops import training_flops
from pnn.models.sections import model_config
from pnn.runs import check_commit, read_config, read_json, read_metrics
from pnn.stats import Estimate, student

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
NAMES = {
    "additive": "additive",
    "scalar": "delta, vector state",
    "delta": "delta, four channels",
    "write_only": "write-only, four channels",
    "additive_expanded": "additive, four channels",
    "token": "delta, token compressor",
}
# What a difference of two variants' losses answers: (first, second); below zero the first is better
QUESTIONS = {
    "Does rewriting a vector state help?": ("scalar", "additive"),
    "Do four channels help, written by addition?": ("additive_expanded", "additive"),
    "Does the whole design help?": ("delta", "additive"),
    "Are four channels better written along a direction through gates than by addition?": ("delta", "additive_expanded"),
    "Is it the erase term?": ("delta", "write_only"),
    "Does the token compressor help?": ("token", "delta"),
    # asked after the losses were seen
    "Does the whole design help, with the token compressor?": ("token", "additive"),
    "Do gates and four channels help, without erasing?": ("write_only", "additive"),
}
PAPER = {"additive": 2.8543, "scalar": 2.8482, "delta": 2.8329, "token": 2.8299}  # its Table 3: 124M, 49B tokens, one run each
CHOICES = {"piqa": 2, "winogrande": 2, "social_iqa": 3}  # of a question; four in the other tasks


def copy_in(runs: Path) -> None:
    for run in sorted(path.parent for path in runs.glob("*/evaluation.json")):
        check_commit(run)
        folder = MEASURED / run.name
        folder.mkdir(parents=True, exist_ok=True)
        data = read_config(run).data
        where = str(Path(data.tokenizer).parent.parent)
        for name in ("config.yaml", "environment.json", "metrics.jsonl", "evaluation.json", "analysis/rewrites.json"):
            if (run / name).exists():  # few runs are analysed
                text = (run / name).read_text(encoding="utf-8").replace(data.prepared, "prepared").replace(where, "DATA")
                write_text(folder / Path(name).name, text)
        picture = run / "figures" / "rewrites.png"
        if picture.exists():
            (HERE / "figures").mkdir(exist_ok=True)
            (HERE / "figures" / f"rewrites-{run.name}.png").write_bytes(picture.read_bytes())


def losses() -> dict[str, dict[int, float]]:
    """Held-out loss at the end of training, not at its best moment, by variant and seed."""
    found: dict[str, dict[int, float]] = {}
    for variant in NAMES:
        for folder in sorted(MEASURED.glob(f"{variant}-[0-9]*")):
            rows = [row for row in read_metrics(folder / "metrics.jsonl") if "validation_loss" in row]
            found.setdefault(variant, {})[int(folder.name.rpartition("-")[2])] = rows[-1]["validation_loss"]
    return found


def difference(found: dict[str, dict[int, float]], one: str, other: str) -> dict[str, Any] | None:
    """Paired over the seeds that both have: a seed is one order of the text."""
    seeds = sorted(found.get(one, {}).keys() & found.get(other, {}).keys())
    if len(seeds) < 2:
        return None
    gaps = [found[one][seed] - found[other][seed] for seed in seeds]
    alone, together = student(gaps), student(gaps, len(QUESTIONS))
    answer = answer_of(together)
    if answer == "undecided" and answer_of(alone) != answer:
        answer = f"{answer_of(alone)}, had it been the only question"
    return {
        "value": alone.value,
        "interval": [alone.low, alone.high],
        "interval_of_all_questions": [together.low, together.high],
        "seeds": seeds,
        "answer": answer,
    }


def answer_of(gap: Estimate) -> str:
    return "yes" if gap.high < 0 else "no: the other is better" if gap.low > 0 else "undecided"


def curves(speed: dict[str, dict[str, float]]) -> dict[str, list[Curve]]:
    found: dict[str, list[Curve]] = {}
    for variant, name in NAMES.items():
        for folder in sorted(MEASURED.glob(f"{variant}-[0-9]*")):
            config = read_config(folder)
            length = config.data.max_length
            per_update = config.training.effective_batch_size * length
            rows = [row for row in read_metrics(folder / "metrics.jsonl") if "validation_loss" in row]
            model = model_config(config.model)
            found.setdefault(name, []).append(
                Curve(
                    [row["step"] * per_update for row in rows],
                    [row["validation_loss"] for row in rows],
                    training_flops(model, (length + 1) / 2, (length - 1) / length),
                    1 / speed[row_name(config)]["median"],
                )
            )
    return found


def table(found: dict[str, dict[int, float]], speed: dict[str, dict[str, float]]) -> str:
    lines = ["| variant | parameters | held-out loss, mean over seeds | 95 % | by seed | tokens/s |", "|---" * 6 + "|"]
    for variant, by_seed in found.items():
        mean = student([*by_seed.values()]).as_json()
        low, high = mean["interval"]
        folder = next(iter(sorted(MEASURED.glob(f"{variant}-[0-9]*"))))
        seeds = ", ".join(f"{by_seed[seed]:.4f}" for seed in sorted(by_seed))
        size, rate = read_json(folder / "evaluation.json")["parameters"], speed[row_name(read_config(folder))]
        rates = f"{rate['median'] / 1000:,.0f}K ({rate['low'] / 1000:,.0f}–{rate['high'] / 1000:,.0f}K)"
        between = "" if low is None else f"{low:.4f}–{high:.4f}"
        lines.append(f"| {NAMES[variant]} | {size / 1e6:.2f}M | {mean['value']:.4f} | {between} | {seeds} | {rates} |")
    lines += [
        "",
        "| question | difference in loss, nats | 95 %, this question | 95 %, all questions | the paper | answer |",
        "|---" * 6 + "|",
    ]
    for question, (one, other) in QUESTIONS.items():
        gap = difference(found, one, other)
        if gap is not None:
            both = " | ".join(f"{low:+.3f} to {high:+.3f}" for low, high in (gap["interval"], gap["interval_of_all_questions"]))
            pair = f"{NAMES[one]} − {NAMES[other]}"
            paper = f"{PAPER[one] - PAPER[other]:+.4f}" if {one, other} <= PAPER.keys() else ""
            lines.append(f"| {question} ({pair}) | {gap['value']:+.4f} | {both} | {paper} | {gap['answer']} |")
    return "\n".join(lines)


def task_table(by_shots: dict[str, Any]) -> str:
    """Accuracies on lm-eval's tasks, in per cent, ± 1.96 standard errors."""
    lines = ["| task | questions | guessing | " + " | ".join(f"{shots}-shot" for shots in by_shots) + " |"]
    lines.append("|---" * (3 + len(by_shots)) + "|")
    for task, first in next(iter(by_shots.values()))["tasks"].items():
        rows = [result["tasks"][task] for result in by_shots.values()]
        found = " | ".join(f"{100 * row['accuracy']:.1f} ± {196 * row['standard_error']:.1f}" for row in rows)
        lines.append(f"| {task} | {first['documents']:,} | {100 / CHOICES.get(task, 4):.1f} | {found} |")
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) > 1:
        copy_in(Path(sys.argv[1]))
    if len(sys.argv) > 2:
        write_json(MEASURED / "speed.json", read_json(Path(sys.argv[2])))
    rows = read_json(MEASURED / "speed.json")["rows"]
    speed = {row["name"]: row["tokens_per_second"] for row in rows if "error" not in row}
    found = losses()
    answers = {question: difference(found, *pair) for question, pair in QUESTIONS.items()}
    answered = {question: gap for question, gap in answers.items() if gap is not None}
    first = next(iter(sorted(MEASURED.glob("*-[0-9]*"))))
    evaluation, config = read_json(first / "evaluation.json"), read_config(first)
    write_json(
        HERE / "result.json",
        {
            "question": "Is it rewriting that helps a Deep Delta decoder, and is it the erase term?",
            "protocol": f"decoders of 30M parameters, {config.training.epochs:g} epoch of Wikipedia, "
            f"{config.training.effective_batch_size} rows of {config.data.max_length} tokens an update, one recipe for all; "
            f"loss on {evaluation['targets']:,} held-out tokens; "
            "paired over seeds, each one order of the text for all; the last two questions came after the losses were seen",
            "seeds": sorted({seed for by_seed in found.values() for seed in by_seed}),
            "metrics": {
                "loss": {
                    variant: {**student([*by_seed.values()]).as_json(), "by_seed": by_seed}
                    for variant, by_seed in found.items()
                },
                "differences": answered,
            },
            "answer": "; ".join(f"{question} {gap['answer']} ({gap['value']:+.3f} nats)" for question, gap in answered.items()),
            "command": 'results/ddl_rewrites/run.sh DATA RUNS "0 1 2" 1; python results/ddl_rewrites/collect.py RUNS BENCH',
        },
    )
    save(png(matched_curves(curves(speed))), HERE / "figures" / "curves.png")
    write_between(HERE / "README.md", "table", table(found, speed))
    write_between(
        HERE / "README.md", "tasks", task_table(read_json(MEASURED / "delta-0" / "evaluation.json")["tasks"]["shots"])
    )


if __name__ == "__main__":
    main()
