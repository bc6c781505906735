"""From the six sweeps of run.sh to result.json and the tables of README.md.

python results/widths/collect.py RUNS

A sweep of masked models compares accuracies, but the rule is about losses: these are in its runs' evaluation.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

from pnn.errors import UserError
from pnn.files import write_between, write_json
from pnn.numbers import written
from pnn.runs import check_commit, read_environment, read_json

HERE = Path(__file__).parent
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
SMALL, CARRIED, PLAIN = "w256", "w768", "w768_plain"
GRIDS = {SMALL: "256", CARRIED: "768, with the rule", PLAIN: "768, without it"}
NEAR = 0.01  # nats: so much above the grid's best is still the grid's best

Losses = dict[float, float | None]  # by rate; None where training failed


def finished(runs: Path, name: str) -> dict[str, Any]:
    """The arms of a sweep with the folders of their runs."""
    sweep = runs / name
    if not (sweep / "sweep.json").exists():
        raise UserError(f"{sweep} is not a finished sweep: results/widths/run.sh TOKENS {runs} goes on with it")
    found = read_json(sweep / "sweep.json")
    for arm in found["arms"]:
        arm["runs"] = [sweep / arm["name"] / f"seed-{seed}" for seed in arm["seeds"]]
        for run in arm["runs"]:
            check_commit(run)
    if not any(arm["runs"] for arm in found["arms"]):
        raise UserError(f"{sweep}: none of its runs finished")
    return found


def losses_of(sweep: dict[str, Any]) -> Losses:
    """What every rate of a grid came to on the held-out text, the mean over seeds."""
    found: Losses = {}
    for arm in sweep["arms"]:
        (setting,) = arm["settings"]  # training.learning_rate=…
        losses = [read_json(run / "evaluation.json")["loss"] for run in arm["runs"]]
        found[float(setting.partition("=")[2])] = mean(losses) if losses else None
    return found


def best_of(losses: Losses) -> tuple[float, float]:
    """The rate with the lowest loss, and that loss."""
    return min(((rate, loss) for rate, loss in losses.items() if loss is not None), key=lambda pair: pair[1])


def carried_over(grids: dict[str, Losses]) -> dict[str, Any]:
    """How the rate that is best at 256 does at 768, with the rule and without it."""
    rate, _ = best_of(grids[SMALL])
    found: dict[str, Any] = {"best_at_256": rate}
    for name in (CARRIED, PLAIN):
        if rate not in grids[name]:
            raise UserError(
                f"{name} has no run with a rate of {rate:g}, which is best at {SMALL}: all grids need the same rates"
            )
        own, lowest = best_of(grids[name])
        loss = grids[name][rate]
        found[name] = {"loss": loss, "best": own, "best_loss": lowest, "above_best": None if loss is None else loss - lowest}
    above = found[CARRIED]["above_best"]
    return found | {"carries_over": above is not None and above <= NEAR}


def table(grids: dict[str, dict[str, Losses]], found: dict[str, dict[str, Any]]) -> str:
    rates = sorted({rate for of_one in grids.values() for losses in of_one.values() for rate in losses})
    lines = [f"| loss | width | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---|---|" + "---|" * len(rates)]
    for optimizer, of_one in grids.items():
        for name, losses in of_one.items():
            lowest, _ = best_of(losses)
            cells = [told(losses[rate], rate == lowest) if rate in losses else "" for rate in rates]
            lines.append(f"| {OPTIMIZERS[optimizer]} | {GRIDS[name]} | {' | '.join(cells)} |")
    lines += [
        "",
        "| | best rate at 256 | at 768, above the best with the rule | above the best without it | carries over |",
        "|---|---|---|---|---|",
    ]
    for optimizer, one in found.items():
        above = [told(one[name]["above_best"]) for name in (CARRIED, PLAIN)]
        verdict = "yes" if one["carries_over"] else "no"
        lines.append(f"| {OPTIMIZERS[optimizer]} | {one['best_at_256']:g} | {' | '.join(above)} | {verdict} |")
    return "\n".join(lines)


def told(loss: float | None, best: bool = False) -> str:
    if loss is None:
        return "failed"
    return f"**{written(loss, 3)}**" if best else written(loss, 3)


def answer(found: dict[str, dict[str, Any]]) -> str:
    """By the rule of README.md: both optimisers."""
    fails = [OPTIMIZERS[optimizer] for optimizer, one in found.items() if not one["carries_over"]]
    return f"It does not carry over, by the grid of {' and that of '.join(fails)}." if fails else "It carries over."


def main(runs: Path) -> None:
    sweeps = {f"{one}_{name}": finished(runs, f"{one}_{name}") for one in OPTIMIZERS for name in GRIDS}
    grids = {one: {name: losses_of(sweeps[f"{one}_{name}"]) for name in GRIDS} for one in OPTIMIZERS}
    found = {one: carried_over(grids[one]) for one in OPTIMIZERS}
    first = next(run for sweep in sweeps.values() for arm in sweep["arms"] for run in arm["runs"])
    write_json(
        HERE / "result.json",
        {
            "question": "Does the rate that is best at width 256 carry over to width 768?",
            "protocol": "README.md beside: five rates at width 256, at 768 with base_width and at 768 without it, with AdamW "
            "and with Muon; losses on the held-out tail",
            "seeds": {name: sweep["seeds"] for name, sweep in sweeps.items()},
            "hardware": read_environment(first)["hardware"],
            "metrics": {
                one: {"losses": {name: {f"{rate:g}": loss for rate, loss in losses.items()} for name, losses in of_one.items()}}
                | found[one]
                for one, of_one in grids.items()
            },
            "answer": answer(found),
            "command": "results/widths/run.sh TOKENS RUNS; python results/widths/collect.py RUNS",
        },
    )
    text = f"{table(grids, found)}\n\n{answer(found)}"
    write_between(HERE / "README.md", "losses", text)
    print(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(f"collect.py: {error}")
