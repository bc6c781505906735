"""From the runs of run.sh to result_SIZE.json and the tables of README.md.

python results/causal_pnn/collect.py SIZE RUNS

At size mini runs come one after another (one.sh): their small files are kept in measured/, and what is missing is told.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from arms import ARMS, FAMILIES, PAIRS, SIZES, best_rates, model_of

from pnn.differences import losses_apart, pairs_table
from pnn.errors import UserError
from pnn.files import write_between, write_json, write_text
from pnn.models.flops import inference_flops, training_flops
from pnn.models.sections import model_config
from pnn.numbers import estimate, short_count
from pnn.results import median_speed
from pnn.runs import BY_SEQUENCE, check_commit, read_config, read_environment, read_json, read_metrics
from pnn.stats import student

HERE = Path(__file__).parent
MEASURED = HERE / "measured"  # at size mini
FILES = ("config.yaml", "environment.json", "metrics.jsonl", "evaluation.json")
SEEDS = 3


def keep(folder: Path) -> None:
    """Finished runs, without the places where one machine has its text, and the losses of windows in the digits that count."""
    for part in ("rates", "main"):
        for evaluation in sorted((folder / part).glob("*/seed-*/evaluation.json")):
            run, data = evaluation.parent, read_config(evaluation.parent).data
            check_commit(run)
            target = MEASURED / run.relative_to(folder)
            target.mkdir(parents=True, exist_ok=True)
            places = {data.train: "TEXT", data.tokenizer: "TOKENIZER", data.prepared: "prepared"}
            for name in FILES:
                text = (run / name).read_text(encoding="utf-8")
                for place, word in sorted(places.items(), reverse=True, key=lambda one: len(one[0])):  # one may begin another
                    text = text.replace(place, word) if "/" in place else text
                write_text(target / name, text)
            if part == "main":
                totals = read_json(run / BY_SEQUENCE)["validation"]
                kept = {"targets": totals["targets"], "loss": [round(one, 3) for one in totals["loss"]]}
                write_text(target / BY_SEQUENCE, json.dumps({"validation": kept}, separators=(",", ":")) + "\n")


def runs_of(name: str, folder: Path) -> list[Path]:
    found = sorted(path.parent for path in (folder / "main" / name).glob("seed-*/evaluation.json"))
    for run in found:
        check_commit(run)
    return found


def row(name: str, size: str, folder: Path) -> dict[str, Any]:
    runs = runs_of(name, folder)
    config = read_config(runs[0])
    shape, length = model_config(model_of(ARMS[name], SIZES[size])), config.data.max_length
    losses = [read_json(run / "evaluation.json")["loss"] for run in runs]
    counted = (length / 2, 1 - 1 / length)  # tokens that a token attends to, share of tokens that are predicted
    return {
        "arm": f"{FAMILIES[ARMS[name].family]}, {ARMS[name].told}",
        "parameters": read_json(runs[0] / "evaluation.json")["parameters"],
        "training_mflop_per_token": training_flops(shape, *counted) / 1e6,
        "inference_mflop_per_token": inference_flops(shape, *counted) / 1e6,
        "learning_rate": config.training.learning_rate,
        "loss": student(losses).as_json(),
        "loss_by_seed": losses,
        "tokens_per_second": [median_speed(read_metrics(run / "metrics.jsonl")) for run in runs],
        "loss_by_step": read_json(runs[0] / "evaluation.json").get("loss_by_step"),
    }


def difference(one: str, other: str, folder: Path) -> dict[str, Any]:
    """Of losses on the held-out text."""
    of_arms = [{run.name: read_json(run / BY_SEQUENCE)["validation"] for run in runs_of(name, folder)} for name in (one, other)]
    return {"arms": [one, other], **losses_apart(*of_arms)}


def tables(rows: dict[str, dict[str, Any]], found: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| arm | parameters | training MFLOP/token | rate | loss, three seeds |", "|---|---|---|---|---|"]
    for name, one in rows.items():
        cells = (f"`{name}`: {one['arm']}", short_count(one["parameters"]), f"{one['training_mflop_per_token']:,.1f}")
        lines.append(f"| {' | '.join(cells)} | {one['learning_rate']:g} | {estimate(one['loss'], 4)} |")
    return "\n".join([*lines, "", *pairs_table(found)])


def main() -> None:
    size, folder = sys.argv[1], Path(sys.argv[2])
    if size == "mini":
        keep(folder)
        folder = MEASURED
    done = {name: runs_of(name, folder) for name in ARMS}
    if not any(done.values()):
        raise UserError(f"{folder / 'main'}: no finished run")
    rows = {name: row(name, size, folder) for name in ARMS if done[name]}
    seeds_of = {name: {run.name for run in runs} for name, runs in done.items()}
    found = {
        question: [difference(one, other, folder) for one, other in pairs if seeds_of[one] & seeds_of[other]]
        for question, pairs in PAIRS.items()
    }
    rates = best_rates(folder / "rates")
    first = read_environment(next(runs[0] for runs in done.values() if runs))
    seeds = min(len(runs) for runs in done.values())
    edges = [family for family, rate in rates.items() if rate in (min(SIZES[size].rates), max(SIZES[size].rates))]
    departures = [f"{family}: {rates[family]:g} lies at the edge of the rates" for family in edges]
    departures += [f"`{name}` has {len(runs)} of {SEEDS} seeds" for name, runs in done.items() if len(runs) != SEEDS]
    result = {
        "question": "Do causal PNNs and loops of Deep Delta blocks predict text better than an additive decoder of equal "
        "parameters, or of equal FLOPs?",
        "size": size,
        "seeds": seeds,
        "hardware": first["hardware"],
        "rates": rates,
        "arms": rows,
        "differences": found,
        "departures": departures,
        "command": f"results/causal_pnn/run.sh {size} RUNS && python results/causal_pnn/collect.py {size} RUNS",
    }
    write_json(HERE / f"result_{size}.json", result)
    told = tables(rows, found) + "".join(f"\n\nOtherwise than planned: {one}." for one in departures)
    write_between(HERE / "README.md", size, told)
    print(told)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
