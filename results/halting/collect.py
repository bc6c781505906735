"""From analysed runs to result.json, the figure and the table of README.md.

python results/halting/collect.py [RUNS]     # RUNS: run folders to copy in first; without it, what is in measured/
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pnn.figures.studies.halting import keys, speed_panel
from pnn.figures.style import WIDTH, png, save, styled
from pnn.files import write_between, write_json
from pnn.numbers import estimate, per_cent, written
from pnn.results import Json
from pnn.runs import check_commit, read_json
from pnn.stats import SUPPORTED
from pnn.studies.analyses.halting import LOSE

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
FILES = ("config.yaml", "environment.json", "analysis/halting.json")
NAMES = {  # in this order; runs of other names come after them
    "pnn": "the quickstart's PNN",
    "pnn_1": "the same, another seed",
    "rewrite": "its rewriting form",
    "rewrite_1": "the same, another seed",
    "hard_rewrite": "rewriting, on the harder corpus",
}


def copy_in(runs: Path) -> None:
    for run in sorted(path.parents[1] for path in runs.glob("*/analysis/halting.json")):
        check_commit(run)
        (MEASURED / run.name / "analysis").mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copy(run / name, MEASURED / run.name / name)


def fastest(rows: list[Json]) -> Json | None:
    """Of those that lose little enough."""
    good = [row for row in rows if row["points_lost"]["value"] <= LOSE]
    return max(good, key=lambda row: float(row["ideal_speedup"]["value"]), default=None)


def metrics(found: Json) -> dict[str, Any]:
    bound, one, two = found["oracles"]["bound"], fastest(found["dial"]), fastest(found["two_dials"])
    assert one is not None  # all steps lose nothing
    kept = {
        "accuracy": found["dial"][-1]["accuracy"],
        "accuracy_by_step": [row["accuracy"] for row in found["dial"]],
        "dial": one,
        "two_dials": two,
        "oracles": found["oracles"],
        "bound_over_dial": found["findings"]["bound_beats_the_dial"],
        "targets": found["targets"],
        "sequences": found["sampled"],
        "num_refiners": found["num_refiners"],
    }
    if "random" in found:
        kept |= {"random": found["random"], "steps_by_kind": {k: v["steps"] for k, v in found["by_kind"].items()}}
    return kept | {"ideal_speedup": bound["ideal_speedup"]}


def times(row: Json | None) -> str:
    return "none" if row is None else f"{written(row['ideal_speedup']['value'], 2)}×"


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| model | accuracy | dial | two dials (masked/others) | oracle | from step 0 | right answers stay "
        "| oracle over dial − 1 | at random, points lost |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        one, two, oracles = row["dial"], row["two_dials"], row["oracles"]
        both = "none" if two is None else f"{times(two)} ({two['masked']}/{two['others']})"
        lost = estimate(row["random"]["points_lost"], 1, scale=100) if "random" in row else "not told"
        cells = [
            NAMES.get(name, name),
            per_cent(row["accuracy"]["value"]),
            f"{times(one)} ({one['steps']} steps)",
            both,
            *(times(oracles[which]) for which in ("bound", "from_the_start", "right_answers")),
            estimate(row["bound_over_dial"]["effect"], 2),
            lost,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@styled
def accuracy_against_speed(results: dict[str, Json]) -> Figure:
    rows = -(-len(results) // 2)
    figure = Figure(figsize=(WIDTH, 0.9 + 2.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes, (name, found) in zip(panels, results.items(), strict=False):
        speed_panel(axes, found, NAMES.get(name, name))
    for axes in panels[len(results) :]:
        axes.set_visible(False)
    figure.legend(handles=keys(list(results.values())), loc="outside upper center", ncols=2)
    return figure


def answer(rows: dict[str, dict[str, Any]]) -> str:
    ahead = [row["bound_over_dial"]["effect"]["value"] for row in rows.values()]
    hold = sum(row["bound_over_dial"]["verdict"] == SUPPORTED for row in rows.values())
    low, high = (written(1 + end(ahead), 2) for end in (min, max))
    said = (
        f"An oracle that changes no prediction could be {low} to {high} times as fast as fewer steps for everyone, in FLOPs; "
        f"more than 1.15 times in {hold} of {len(rows)} models"
    )
    both = [(row["two_dials"], row["dial"]) for row in rows.values() if row["two_dials"]]
    two = [fast["ideal_speedup"]["value"] / slow["ideal_speedup"]["value"] for fast, slow in both]
    if two:
        said += (
            f". Fewer steps for tokens that are not masked, which takes no criterion, are {written(min(two), 2)} to "
            f"{written(max(two), 2)} times as fast as the dial"
        )
    return said + "."


def main() -> None:
    if len(sys.argv) > 1:
        copy_in(Path(sys.argv[1]))
    there = {path.parents[1].name: read_json(path) for path in sorted(MEASURED.glob("*/analysis/halting.json"))}
    results = {name: there[name] for name in [*(n for n in NAMES if n in there), *(n for n in there if n not in NAMES)]}
    rows = {name: metrics(found) for name, found in results.items()}
    environment = read_json(MEASURED / next(iter(results)) / "environment.json")
    write_json(
        HERE / "result.json",
        {
            "question": "What could halting tokens save, beside fewer steps for everyone?",
            "protocol": "up to 500 held-out sequences with a masked token, 15 % masked, fixed masks; the oracle is greedy and "
            "changes no masked prediction; FLOPs as models/flops.py counts them, head included; the dial and the two dials are "
            f"the fastest that lose at most {100 * LOSE:g} points on the same sequences; intervals over sequences",
            "seeds": [0, 1],
            "hardware": environment["hardware"],
            "metrics": rows,
            "answer": answer(rows),
            "command": "results/halting/run.sh RUNS && python results/halting/collect.py RUNS",
        },
    )
    save(png(accuracy_against_speed(results)), HERE / "figures" / "accuracy_against_speed.png")
    write_between(HERE / "README.md", "table", table(rows))
    print(table(rows))
    print(answer(rows))


if __name__ == "__main__":
    main()
