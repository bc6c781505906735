"""From the sweeps of run.sh, three for each optimiser, to result.json and the tables of README.md. Optimisers may come one
after another: what was collected before stays.

python results/widths/collect.py w768 RUNS   # the folder that run.sh wrote; w96: with text

A sweep of masked models compares accuracies, but the rule is about losses: these are in its runs' evaluation.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

from pnn.errors import UserError
from pnn.files import write_between, write_json
from pnn.numbers import estimate, written
from pnn.runs import check_commit, read_environment, read_json
from pnn.stats import student

HERE = Path(__file__).parent
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
NARROW = {"w768": 256, "w96": 32}  # where the rates of a width come from
NEAR = 0.01  # nats: so much above the grid's best is still the grid's best

Losses = dict[float, list[float]]  # by rate, one for each seed; none where training failed


def grids_of(wide: str) -> dict[str, str]:
    """The three sweeps of an optimiser: narrow, carried over, plain."""
    width = wide.removeprefix("w")
    return {f"w{NARROW[wide]}": str(NARROW[wide]), wide: f"{width}, with the rule", f"{wide}_plain": f"{width}, without it"}


def finished(runs: Path, name: str) -> dict[str, Any]:
    """The arms of a sweep with the folders of their runs."""
    sweep = runs / name
    found = read_json(sweep / "sweep.json")
    for arm in found["arms"]:
        arm["runs"] = [sweep / arm["name"] / f"seed-{seed}" for seed in arm["seeds"]]
        for run in arm["runs"]:
            check_commit(run)
    if not any(arm["runs"] for arm in found["arms"]):
        raise UserError(f"{sweep}: none of its runs finished")
    return found


def losses_of(sweep: dict[str, Any]) -> Losses:
    """What every rate of a grid came to on the held-out text."""
    found: Losses = {}
    for arm in sweep["arms"]:
        (setting,) = arm["settings"]  # training.learning_rate=…
        found[float(setting.partition("=")[2])] = [read_json(run / "evaluation.json")["loss"] for run in arm["runs"]]
    return found


def best_of(losses: Losses) -> float:
    """The rate with the lowest loss, the mean over seeds."""
    return min((rate for rate in losses if losses[rate]), key=lambda rate: mean(losses[rate]))


def carried_over(wide: str, grids: dict[str, Losses]) -> dict[str, Any]:
    """How the rate that is best at the narrow width does at the wide one, with the rule and without it."""
    narrow, *others = grids
    rate = best_of(grids[narrow])
    found: dict[str, Any] = {"best_when_narrow": rate}
    for name in others:
        if rate not in grids[name]:
            raise UserError(
                f"{name} has no run with a rate of {rate:g}, which is best at {narrow}: all grids need the same rates"
            )
        losses, own = grids[name][rate], best_of(grids[name])
        best = grids[name][own]
        above = mean(losses) - mean(best) if losses else None
        pairs = zip(losses, best, strict=True) if len(losses) == len(best) else ()
        found[name] = {
            "losses": losses,
            "best": own,
            "best_losses": best,
            "above_best": above,
            "over_seeds": student([one - other for one, other in pairs]).as_json() if len(losses) == len(best) > 1 else None,
        }
    above = found[wide]["above_best"]
    return found | {"carries_over": above is not None and above <= NEAR}


def table(wide: str, grids: dict[str, dict[str, Losses]], found: dict[str, dict[str, Any]]) -> str:
    rates = sorted({rate for of_one in grids.values() for losses in of_one.values() for rate in losses})
    lines = [f"| loss | width | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---|---|" + "---|" * len(rates)]
    for optimizer, of_one in grids.items():
        for name, losses in of_one.items():
            lowest = best_of(losses)
            cells = [told(losses[rate], rate == lowest) if rate in losses else "" for rate in rates]
            lines.append(f"| {OPTIMIZERS[optimizer]} | {grids_of(wide)[name]} | {' | '.join(cells)} |")
    narrow, width = NARROW[wide], wide.removeprefix("w")
    lines += [
        "",
        f"| | best rate at {narrow} | at {width}, above the best with the rule | above the best without it | carries over |",
        "|---|---|---|---|---|",
    ]
    for optimizer, one in found.items():
        above = [told_above(one[name]) for name in (wide, f"{wide}_plain")]
        verdict = "yes" if one["carries_over"] else "no"
        lines.append(f"| {OPTIMIZERS[optimizer]} | {one['best_when_narrow']:g} | {' | '.join(above)} | {verdict} |")
    return "\n".join(lines)


def told(losses: list[float], best: bool = False) -> str:
    if not losses:
        return "failed"
    return f"**{written(mean(losses), 3)}**" if best else written(mean(losses), 3)


def told_above(one: dict[str, Any]) -> str:
    if one["above_best"] is None:
        return "failed"
    return estimate(one["over_seeds"], 3) if one["over_seeds"] else written(one["above_best"], 3)


def answer(found: dict[str, dict[str, Any]]) -> str:
    """By the rule of README.md: both optimisers."""
    fails = [OPTIMIZERS[optimizer] for optimizer, one in found.items() if not one["carries_over"]]
    if fails:
        return f"It does not carry over, by the grid of {' and that of '.join(fails)}."
    missing = [name for one, name in OPTIMIZERS.items() if one not in found]
    known = " and ".join(OPTIMIZERS[one] for one in found)
    return f"It carries over with {known}; {missing[0]} is not measured yet." if missing else "It carries over."


def main(wide: str, runs: Path) -> None:
    sweeps_of = {one: [runs / f"{one}_{name}" for name in grids_of(wide)] for one in OPTIMIZERS}
    trained = [one for one, folders in sweeps_of.items() if all((folder / "sweep.json").exists() for folder in folders)]
    for one, folders in sweeps_of.items():
        if one not in trained and any(folder.exists() for folder in folders):
            print(f"{OPTIMIZERS[one]}: not all of its sweeps finished, left out (results/widths/run.sh goes on with them)")
    if not trained:
        raise UserError(f"{runs} has no finished sweeps of width {wide[1:]}: results/widths/run.sh makes them")
    sweeps = {f"{one}_{name}": finished(runs, f"{one}_{name}") for one in trained for name in grids_of(wide)}
    first = next(run for sweep in sweeps.values() for arm in sweep["arms"] for run in arm["runs"])
    file = HERE / "result.json"
    metrics = read_json(file)["metrics"] if file.exists() else {}
    before = metrics.get(wide, {"seeds": {}, "optimizers": {}})
    of_each = before["optimizers"]
    for one in trained:
        grids_of_one = {name: losses_of(sweeps[f"{one}_{name}"]) for name in grids_of(wide)}
        losses = {name: {f"{rate:g}": of_rate for rate, of_rate in grid.items()} for name, grid in grids_of_one.items()}
        of_each[one] = {"losses": losses} | carried_over(wide, grids_of_one)
    found = {one: of_each[one] for one in OPTIMIZERS if one in of_each}
    grids = {
        one: {name: {float(rate): losses for rate, losses in grid.items()} for name, grid in kept["losses"].items()}
        for one, kept in found.items()
    }
    metrics[wide] = {
        "seeds": before["seeds"] | {name: sweep["seeds"] for name, sweep in sweeps.items()},
        "hardware": read_environment(first)["hardware"],
        "optimizers": found,
        "answer": answer(found),
    }
    write_json(
        file,
        {
            "question": "Does a rate that is best at one width carry over to three times that width?",
            "protocol": "README.md beside: five rates at the narrow width, at the wide one with base_width and at the wide one "
            "without it, with AdamW and with Muon; losses on the held-out tail",
            "metrics": metrics,
            "answer": " ".join(
                f"Width {NARROW[one]} to {one[1:]}: {metrics[one]['answer']}" for one in NARROW if one in metrics
            ),
            "command": "results/widths/run.sh TOKENS RUNS; python results/widths/collect.py w768 RUNS",
        },
    )
    text = f"{table(wide, grids, found)}\n\n{answer(found)}"
    write_between(HERE / "README.md", wide, text)
    print(text)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in NARROW:
        sys.exit(__doc__)
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except UserError as error:
        sys.exit(f"collect.py: {error}")
