"""From the runs of run.sh to result_SIZE.json and the tables of README.md.

python results/causal_pnn/collect.py SIZE RUNS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from arms import ARMS, FAMILIES, PAIRS, SIZES, best_rates, model_of

from pnn.differences import losses_apart, pairs_table
from pnn.errors import UserError
from pnn.files import write_between, write_json
from pnn.models.flops import inference_flops, training_flops
from pnn.models.sections import model_config
from pnn.numbers import estimate, short_count
from pnn.results import median_speed
from pnn.runs import BY_SEQUENCE, check_commit, read_config, read_environment, read_json, read_metrics
from pnn.stats import student

HERE = Path(__file__).parent


def runs_of(name: str, folder: Path) -> list[Path]:
    found = sorted(path.parent for path in (folder / "main" / name).glob("seed-*/evaluation.json"))
    for run in found:
        check_commit(run)
    return found


def row(name: str, size: str, folder: Path) -> dict[str, Any]:
    runs = runs_of(name, folder)
    if not runs:
        raise UserError(f"{folder / 'main' / name}: no finished run")
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
    rows = {name: row(name, size, folder) for name in ARMS}
    found = {question: [difference(*pair, folder) for pair in pairs] for question, pairs in PAIRS.items()}
    rates = best_rates(folder / "rates" / "sweep.json")
    first = read_environment(runs_of("additive_once", folder)[0])
    seeds = min(len(one["loss_by_seed"]) for one in rows.values())
    edges = [family for family, rate in rates.items() if rate in (min(SIZES[size].rates), max(SIZES[size].rates))]
    departures = [f"{family}: {rates[family]:g} lies at the edge of the rates" for family in edges]
    departures += [f"{name}: {len(one['loss_by_seed'])} seeds" for name, one in rows.items() if len(one["loss_by_seed"]) != 3]
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
    main()
