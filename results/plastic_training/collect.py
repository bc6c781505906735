"""From the runs of run.sh to result_MODEL_SIZE.json and the tables of README.md.

python results/plastic_training/collect.py MODEL SIZE RUNS
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

from arms import ARMS, MODELS, PAIRS, SIZES, cost_of_update

from pnn.differences import losses_apart, pairs_table
from pnn.errors import UserError
from pnn.files import write_between, write_json
from pnn.numbers import estimate, short_count
from pnn.runs import BY_SEQUENCE, check_commit, read_config, read_environment, read_json, read_metrics
from pnn.stats import student

HERE = Path(__file__).parent


def runs_of(name: str, folder: Path) -> list[Path]:
    found = sorted(path.parent for path in (folder / "main" / name).glob("seed-*/evaluation.json"))
    if not found:
        raise UserError(f"{folder / 'main' / name}: no finished run")
    for run in found:
        check_commit(run)
    return found


def row(name: str, folder: Path, cost: dict[str, Any]) -> dict[str, Any]:
    """`time`: in updates of the full model, by what the two sizes took side by side. A run's own clock also counts what else
    the machine did."""
    runs = runs_of(name, folder)
    updates = read_config(runs[0]).training.max_steps
    assert updates is not None
    ends = [[row for row in read_metrics(run / "metrics.jsonl") if "training_flops" in row][-1] for run in runs]
    losses = [read_json(run / "evaluation.json")["loss"] for run in runs]
    return {
        "arm": ARMS[name].told,
        "updates": updates,
        "parameters": read_json(runs[0] / "evaluation.json")["parameters"],
        "training_flops": mean(end["training_flops"] for end in ends),
        "time": updates * cost_of_update(ARMS[name].shape, cost, "seconds"),
        "seconds_by_seed": [end["seconds"] for end in ends],
        "loss": student(losses).as_json(),
        "loss_by_seed": losses,
    }


def difference(one: str, other: str, folder: Path) -> dict[str, Any]:
    """Of losses on the held-out text."""
    of_arms = [{run.name: read_json(run / BY_SEQUENCE)["validation"] for run in runs_of(name, folder)} for name in (one, other)]
    return {"arms": [one, other], **losses_apart(*of_arms)}


def tables(rows: dict[str, dict[str, Any]], found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| arm | updates | parameters | FLOPs / `full` | time / `full` | loss, three seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in rows.items():
        spent = [one[key] / rows["full"][key] for key in ("training_flops", "time")]
        arm = f"`{name}`: {ARMS[name].told}"
        cells = (arm, f"{one['updates']:,}", short_count(one["parameters"]), *(f"{x:.2f}" for x in spent))
        lines.append(f"| {' | '.join(cells)} | {estimate(one['loss'], 4)} |")
    return "\n".join([*lines, "", *pairs_table(found)])


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in MODELS or sys.argv[2] not in SIZES:
        raise SystemExit(__doc__)
    model, size, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    cost = read_json(folder / "configs" / "costs.json")["flops_and_seconds"]
    rows = {name: row(name, folder, cost) for name in ARMS}
    found = {question: [difference(*pair, folder) for pair in pairs] for question, pairs in PAIRS.items()}
    departures = [f"{name}: {len(one['loss_by_seed'])} seeds" for name, one in rows.items() if len(one["loss_by_seed"]) != 3]
    result = {
        "question": "Does a model that grows, or that prunes and grows anew, while it trains predict better than the small and "
        "the full model at equal FLOPs or equal time?",
        "model": model,
        "size": size,
        "seeds": min(len(one["loss_by_seed"]) for one in rows.values()),
        "hardware": read_environment(runs_of("full", folder)[0])["hardware"],
        "costs": cost,
        "arms": rows,
        "differences": found,
        "departures": departures,
        "command": f"results/plastic_training/run.sh {model} {size} RUNS && "
        f"python results/plastic_training/collect.py {model} {size} RUNS",
    }
    write_json(HERE / f"result_{model}_{size}.json", result)
    told = tables(rows, found) + "".join(f"\n\nOtherwise than planned: {one}." for one in departures)
    write_between(HERE / "README.md", f"{model} {size}", told)
    print(told)


if __name__ == "__main__":
    main()
