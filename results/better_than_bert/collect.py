"""From the sweeps to measured/, result.json, figures/ and the tables of README.md.

python results/better_than_bert/collect.py [RUNS]   # RUNS: the folders that run.sh made; without it, what is in measured/

It takes what is there: parts can come one after another. What is missing or otherwise than the rules of README.md say stands
under `departures`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import prompts
from comparison import (
    MEAN_LENGTH,
    NAMES,
    OURS,
    RIVALS,
    Run,
    best_rate,
    box_of,
    departures_of,
    finished,
    flops_per_token,
    metrics_of,
    positions_of,
    rate_word,
    rates_of,
    speeds_of,
    without_gates,
)
from keep import copy_in

from pnn.figures.pareto import Point, pareto
from pnn.figures.style import png, save
from pnn.files import write_between, write_json
from pnn.numbers import estimate, interval, per_cent, short_count, written
from pnn.runs import read_config, read_json

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MEASURED = HERE / "measured"
PROMPTS = HERE / "prompts_answers.json"
BUDGETS = {"one_epoch": "one epoch", "a": "(a) three epochs", "b": "(b) ten epochs", "box": "the box"}
COSTS = {
    "tokens": "training tokens, millions",
    "parameters": "parameters, millions",
    "training_flops": "training, PFLOP",
    "training_minutes": "training, minutes on one H200",
    "inference_tokens_per_second": "inference, million tokens/s",
}
UNITS = {"tokens": 1e6, "parameters": 1e6, "training_flops": 1e15, "training_minutes": 1, "inference_tokens_per_second": 1e6}


# Tables and figure ----------------------------------------------------------------------------------------------------

NOTHING = "Not measured yet."
FIGURE = (
    "![Accuracy on WikiText-103 valid against tokens, parameters, FLOPs, minutes and inference speed](figures/pareto.png)\n"
    "*Accuracy against five costs, after one, three and ten epochs. Up and left is better; for inference, up and right. "
    "Whiskers are 95 % intervals. Grey: the committed runs of the paper's recipe ([147M tokens](../short_budget/README.md), "
    "[up to 1,181M](../pnn_paper_protocol/README.md)).*\n"
)


def or_nothing(head: str, lines: list[str]) -> str:
    columns = head.count("|") - 1
    return "\n".join([head, "|---" * columns + "|", *lines]) if lines else NOTHING


def looks_table(runs: list[Run]) -> str:
    """At forms; a model of its own stands in the other tables."""
    looks = sorted((run for run in runs if run.stage == "looks" and run.arm not in NAMES), key=lambda run: -run.tail)
    lines = [f"| `{run.arm}` | {short_count(run.evaluation['parameters'])} | {per_cent(run.tail)} |" for run in looks]
    return or_nothing("| form | parameters | tail |", lines)


def rates_table(runs: list[Run]) -> str:
    found = rates_of(runs)
    rates = sorted({run.rate for mine in found.values() for run in mine})
    lines = []
    for model, mine in found.items():
        for kind in positions_of(mine):
            by_rate = {run.rate: run for run in mine if run.positions == kind}
            cells = [per_cent(by_rate[rate].tail) if rate in by_rate else "" for rate in rates]
            best = rates.index(best_rate(list(by_rate.values())).rate)
            cells[best] = f"**{cells[best]}**"
            lines.append(f"| {NAMES[model]} | {kind} | {' | '.join(cells)} |")
    return or_nothing(f"| model, on the tail | positions | {' | '.join(map(rate_word, rates))} |", lines)


def ahead_table(metrics: dict[str, Any]) -> str:
    headline = {rival: gap for rival in RIVALS if (gap := metrics.get(f"points_ahead_of_{rival}")) is not None}
    asked = [(metrics["form"], {"a": headline, "b": metrics["points_ahead_at_b"]})]
    asked += [(OURS, metrics["first_form"])] if "first_form" in metrics else []
    lines = []
    for form, by_stage in asked:
        for stage, gaps in by_stage.items():
            for rival, gap in gaps.items():
                between = interval((gap["low"], gap["high"]), 2, scale=1) + (", over sequences" if stage == "b" else "")
                beside = "" if stage == "b" else estimate(gap["student"], 2).partition(" ")[2].strip("()")
                lines.append(
                    f"| ({stage}) | {NAMES[form]} | {rival_name(rival)} | {written(gap['mean'], 2, plus=True)} | {between} "
                    f"| {beside} | {tail(gap)} | {len(gap['seeds'])} | {gap['verdict']} |"
                )
    if not lines:
        return "Who is ahead over seeds, at (a), and with one seed at (b), is not measured yet."
    head = (
        "| | | against | points ahead | 95 %, seeds and sequences | Student's t, seeds | on the tail, Student's t | seeds | |"
    )
    return or_nothing(head, lines)


def tail(gap: dict[str, Any]) -> str:
    ahead, ends = gap["tail"]["value"], gap["tail"]["interval"]
    between = "" if ends[0] is None else f" ({interval(ends, 2, scale=1)})"
    return f"{written(ahead, 2, plus=True)}{between}"


def rival_name(rival: str) -> str:
    return NAMES.get(rival, "itself without gates")


def models_table(models: dict[str, dict[str, Any]]) -> str:
    lines = []
    for budget, words in BUDGETS.items():
        rows = {model: one for model, one in models.items() if budget in one["budgets"]}
        for one in rows.values():
            found = one["budgets"][budget]
            minutes, speed = found["training_minutes"], one["inference_tokens_per_second"]
            lines.append(
                f"| {words} | {one['name']} | {short_count(one['parameters'])} | {short_count(found['tokens'])} "
                f"| {found['training_flops'] / 1e15:.0f} | {'' if minutes is None else f'{minutes:.1f}'} "
                f"| {'' if speed is None else short_count(speed)} | {rate_word(found['learning_rate'])} "
                f"| {len(found['seeds'])} | {per_cent(found['tail'])} | {estimate(found['accuracy'], 1, scale=100)} |"
            )
    head = "budget | model | parameters | tokens | training PFLOP | training minutes | inference tokens/s | rate | seeds | tail"
    return or_nothing(f"| {head} | WikiText valid, % |", lines)


def steps_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        speed = row["inference_tokens_per_second"]
        lines.append(
            f"| {NAMES[row['model']]} | {row['steps']} | {estimate(row['accuracy'], 1, scale=100)} "
            f"| {'' if speed is None else short_count(speed)} |"
        )
    return or_nothing("| one checkpoint each | steps or layers | WikiText valid, % | inference tokens/s |", lines)


def new_points(form: str, models: dict[str, dict[str, Any]]) -> list[Point]:
    """Of the form that stands first and of those it is compared with; other candidates are in the table alone."""
    drawn = dict.fromkeys((form, without_gates(form), OURS, "bert4", "bert12", "pnn_paper"))
    points = []
    for one in (models[model] for model in drawn if model in models):
        for found in one["budgets"].values():
            costs = {cost: found.get(cost, one.get(cost)) for cost in COSTS}
            points.append(Point(one["name"], found["accuracy"], scaled(costs)))
    return points


def old_points() -> list[Point]:
    """The committed runs of the paper's recipe. Inference was timed of the published form and of BERT only."""
    timed = {
        row["config"]: row["tokens_per_second"]["median"]
        for row in reversed(read_json(ROOT / "benchmarks/results/train-nvidia-h200.json")["rows"])
        if row["what"] == "inference" and row["name"] in ("pnn", "bert")
    }
    same = {"published": "published", "pnn_delta_norm": "published", "bert": "bert"}
    points = []
    for question in ("short_budget", "pnn_paper_protocol"):
        for name, row in read_json(HERE.parent / question / "result.json")["metrics"].items():
            if name.startswith("rows_"):  # another text
                continue
            text = row["wikitext_tokens"] if question == "short_budget" else row["texts"]["tokens"]
            config = read_config(HERE.parent / question / "measured" / name)
            updates = row.get("updates", config.training.max_steps)
            tokens = updates * config.training.effective_batch_size * MEAN_LENGTH
            costs = {
                "tokens": tokens,
                "parameters": row["parameters"],
                "training_flops": tokens * flops_per_token(config),
                "training_minutes": tokens / row["tokens_per_second"] / 60,
                "inference_tokens_per_second": timed[same[name]] if name in same else None,
            }
            reached = {"value": text["accuracy"], "interval": text["accuracy_interval"]}
            points.append(Point("BERT" if name == "bert" else "PNN", reached, scaled(costs)))
    return points


def scaled(costs: dict[str, float | None]) -> dict[str, float | None]:
    return {cost: None if value is None else value / UNITS[cost] for cost, value in costs.items()}


def answer_of(metrics: dict[str, Any]) -> str:
    three, more = [], []
    for rival in RIVALS:
        if (gap := metrics.get(f"points_ahead_of_{rival}")) is not None:
            between = interval((gap["low"], gap["high"]), 2, scale=1)
            how = f"{gap['verdict']} ({written(gap['mean'], 2, plus=True)} points, {between}; on the tail {tail(gap)})"
            three.append(f"against {rival_name(rival)} {how}")
    if (gap := metrics["points_ahead_at_b"].get("bert12")) is not None:
        more.append(f"at (b) against {NAMES['bert12']} {written(gap['mean'], 2, plus=True)} points")
    if "box_wikitext_valid" in metrics:
        more.append(f"the box's model gets {per_cent(metrics['box_wikitext_valid'])} of WikiText's masked tokens right")
    said = [
        f"{NAMES[metrics['form']]}, at (a) {', '.join(three)}" if three else "Who is ahead at (a) is not measured yet",
        *more,
    ]
    return f"{'; '.join(said)}."


def main() -> None:
    if len(sys.argv) > 1:
        copy_in(Path(sys.argv[1]), MEASURED)
    runs = finished(MEASURED)
    speeds, box = speeds_of(MEASURED / "speeds.json"), box_of(runs, MEASURED / "box.json")
    metrics, departures = metrics_of(runs, speeds, box), departures_of(runs, MEASURED / "speeds.json")
    write_json(
        HERE / "result.json",
        {
            "question": "Can a PNN beat BERT, fairly: same text, same recipe, same tokens, at most 41 % of the parameters?",
            "protocol": "README.md beside, written before the long runs: 1M lines of Wikipedia, one recipe, each model at its "
            "own best rate; masked tokens of WikiText-103 valid .tokens, four fixed draws; differences in points, paired by "
            "seed and sequence, 95 % by bootstrap over both (low, high), Student's t over seeds beside",
            "seeds": sorted({run.seed for run in runs}),
            "hardware": sorted({gpu for run in runs for gpu in run.environment["hardware"]["gpus"]}),
            "metrics": metrics,
            "departures": departures,
            "answer": answer_of(metrics),
            "command": "results/better_than_bert/run.sh PART TOKENS WIKITEXT RUNS; results/better_than_bert/collect.py RUNS",
        },
    )
    tables = {
        "ahead": ahead_table(metrics),
        "models": models_table(metrics["models"]),
        "figure": FIGURE if metrics["models"] else NOTHING,
        "steps": steps_table(metrics["steps"]),
        "rates": rates_table(runs),
        "looks": looks_table(runs),
        "prompts": prompts.table(read_json(PROMPTS)) if PROMPTS.exists() else NOTHING,
        "departures": "\n".join(f"- {one}" for one in departures) or "None.",
    }
    for name, table in tables.items():
        write_between(HERE / "README.md", name, table)
        print(f"{table}\n")
    if metrics["models"]:
        save(png(pareto(new_points(metrics["form"], metrics["models"]), old_points(), COSTS)), HERE / "figures" / "pareto.png")
    print(answer_of(metrics))


if __name__ == "__main__":
    main()
