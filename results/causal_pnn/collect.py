"""From the runs of run.sh to result_SIZE.json and the tables of README.md.

python results/causal_pnn/collect.py SIZE RUNS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from arms import ARMS, FAMILIES, PAIRS, RATES, SIZES, best_rates, model_of

from pnn.errors import UserError
from pnn.files import write_between, write_json
from pnn.models.flops import inference_flops, training_flops
from pnn.models.sections import model_config
from pnn.numbers import estimate, short_count
from pnn.results import median_speed
from pnn.runs import BY_SEQUENCE, check_commit, read_config, read_environment, read_json, read_metrics
from pnn.stats import Estimate, seeds_and_sequences, student

HERE = Path(__file__).parent
TEXT = "validation"


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
    """Of losses, paired by seed and by window of text."""
    totals = {name: {run.name: read_json(run / BY_SEQUENCE)[TEXT] for run in runs_of(name, folder)} for name in (one, other)}
    seeds = sorted(totals[one].keys() & totals[other].keys())
    gains = np.array([np.subtract(totals[one][seed]["loss"], totals[other][seed]["loss"]) for seed in seeds])
    trials = np.array(totals[one][seeds[0]]["targets"], dtype=np.float64)
    drawn, by_seed = seeds_and_sequences(gains, trials), student((gains.sum(1) / trials.sum()).tolist())
    return {
        "arms": [one, other],
        "seeds": len(seeds),
        "over_seeds_and_windows": drawn.as_json(),
        "over_seeds": by_seed.as_json(),
        "verdict": verdict(drawn, by_seed),
    }


def verdict(*intervals: Estimate) -> str:
    """Both intervals have to say so: that over windows knows little of seeds, that over three seeds little of anything."""
    if all(one.high < 0 for one in intervals):
        return "better"
    return "worse" if all(one.low > 0 for one in intervals) else "undecided"


def tables(rows: dict[str, dict[str, Any]], found: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| arm | parameters | training MFLOP/token | rate | loss, three seeds |", "|---|---|---|---|---|"]
    for name, one in rows.items():
        cells = (f"`{name}`: {one['arm']}", short_count(one["parameters"]), f"{one['training_mflop_per_token']:,.1f}")
        lines.append(f"| {' | '.join(cells)} | {one['learning_rate']:g} | {estimate(one['loss'], 4)} |")
    lines += ["", "| question | loss of | less that of | over seeds and windows | over seeds | |", "|---|---|---|---|---|---|"]
    for question, pairs in found.items():
        for pair in pairs:
            one, other = pair["arms"]
            ends = (estimate(pair[key], 4, plus=True) for key in ("over_seeds_and_windows", "over_seeds"))
            lines.append(f"| {question} | `{one}` | `{other}` | {' | '.join(ends)} | {pair['verdict']} |")
    return "\n".join(lines)


def main() -> None:
    size, folder = sys.argv[1], Path(sys.argv[2])
    rows = {name: row(name, size, folder) for name in ARMS}
    found = {question: [difference(*pair, folder) for pair in pairs] for question, pairs in PAIRS.items()}
    rates = best_rates(folder / "rates" / "sweep.json")
    first = read_environment(runs_of("additive_once", folder)[0])
    seeds = min(len(one["loss_by_seed"]) for one in rows.values())
    edges = [family for family, rate in rates.items() if rate in (min(RATES), max(RATES))]
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
