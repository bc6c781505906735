"""From measured.json to result.json, the figure and the tables of README.md; with a NAME, of measured_NAME.json and so on.

Each half of dev chooses a setting for the other, the fastest that loses at most 0.3 points where it is chosen, as
`pnn calibrate` does it once: so all of dev says what the choice costs.

python results/halting/classifier/collect.py [NAME]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pnn.figures.marks import AMBER, BLUE, CONTROL, GREEN, ORANGE
from pnn.figures.style import SMALL, WIDTH, per_cent_axis, png, save, styled
from pnn.files import write_between, write_json
from pnn.numbers import bare_per_cent, estimate, written
from pnn.results import Json
from pnn.runs import read_json
from pnn.stats import Estimate, seeds_and_sequences

HERE = Path(__file__).parent
LOSE = 0.003
AIM = 1.4
COMMANDS = {
    "": "results/halting/classifier/run.sh DATA RUNS",
    "pnn_base": "python results/halting/classifier/measure.py models/pnn-base DATA/glue RUNS "
    "results/halting/classifier/measured_pnn_base.json --limit 12000 --rate 1e-4",
}
Row = dict[str, Any]


def criterion(row: Json) -> str:
    return str((row["changes"]["halt"] or {"criterion": "dial"})["criterion"])


def within(rows: list[Json]) -> list[int]:
    """Within how many steps texts halt by confidence, most first."""
    return sorted({row["changes"]["num_steps"] for row in rows if criterion(row) == "confidence"}, reverse=True)


WAYS: dict[str, tuple[str, Callable[[Json], bool]]] = {
    "dial": ("fewer steps for every text", lambda row: criterion(row) == "dial"),
    "confidence": ("texts halt by confidence", lambda row: criterion(row) == "confidence"),
    "context": ("all but the first token halt", lambda row: criterion(row) == "context"),
    "any": ("any setting", lambda row: True),
}


def numbers(digits: str) -> NDArray[np.float64]:
    return np.array([float(one) for one in digits])


def right_of(row: Json) -> NDArray[np.float64]:
    return numbers(row["right"])


def at_random(seed: Json, row: Json) -> NDArray[np.float64]:
    """How often each text is right where it takes the number of steps that any text took."""
    shares = np.array(row["halted_after"]) / sum(row["halted_after"])
    by_step = np.array([numbers(one) for one in seed["right_by_step"][: len(shares)]])
    return shares @ by_step


def chosen_on(rows: list[Json], half: NDArray[np.bool_]) -> Json:
    """The fastest that loses little enough on this half, against the first row, which always may."""
    whole = right_of(rows[0])
    good = [row for row in rows if (whole - right_of(row))[half].mean() <= LOSE]
    return min(good, key=lambda row: float(row["seconds"]))


def crossed(rows: list[Json]) -> Row:
    """Each half chooses for the other: what is lost on every example, and the speed, both against the first row."""
    whole = right_of(rows[0])
    lost, seconds, said = np.zeros(len(whole)), [], []
    for start in (0, 1):
        half = np.arange(len(whole)) % 2 == start
        row = chosen_on(rows, half)
        lost[~half] = (whole - right_of(row))[~half]
        seconds.append(row["seconds"])
        said.append(row["setting"])
    return {"lost": lost, "speed": rows[0]["seconds"] / float(np.mean(seconds)), "chosen": said}


def together(lost: NDArray[np.float64]) -> Estimate:
    return seeds_and_sequences(lost, np.ones(lost.shape[1]))


def over_seeds(each: list[Row]) -> Row:
    return {
        "speed": float(np.mean([one["speed"] for one in each])),
        "speed_by_seed": [one["speed"] for one in each],
        "points_lost": together(np.array([one["lost"] for one in each])).as_json(),
        "chosen": [one["chosen"] for one in each],
    }


def choices(seeds: list[Json]) -> dict[str, Row]:
    """Against all steps."""
    found = {}
    for name, (_, among) in WAYS.items():
        of_seeds = ([s["settings"][0], *(row for row in s["settings"][1:] if among(row))] for s in seeds)
        found[name] = over_seeds([crossed(rows) for rows in of_seeds])
    return found


def beside_the_dial(seeds: list[Json]) -> dict[str, Row]:
    """Against so many steps for every text: what texts gain that halt by confidence within as many."""
    found = {}
    for steps in within(seeds[0]["settings"])[1:]:
        of_seeds = ([row for row in seed["settings"] if row["changes"]["num_steps"] == steps] for seed in seeds)
        each = [[row for row in rows if criterion(row) in ("dial", "confidence")] for rows in of_seeds]
        found[str(steps)] = over_seeds([crossed(rows) for rows in each])
    return found


def curve(seeds: list[Json]) -> list[Row]:
    """Every setting, mean over seeds. Thresholds are each seed's own, at the same shares of texts that settle."""
    found = []
    for rows in zip(*(seed["settings"] for seed in seeds), strict=True):
        assert len({(criterion(row), row["changes"]["num_steps"]) for row in rows}) == 1
        whole = [right_of(seed["settings"][0]) for seed in seeds]
        lost = np.array([all_of - right_of(row) for all_of, row in zip(whole, rows, strict=True)])
        one = {
            "setting": rows[0]["setting"] if criterion(rows[0]) in ("dial", "context") else criterion(rows[0]),
            "num_steps": rows[0]["changes"]["num_steps"],
            "criterion": criterion(rows[0]),
            "accuracy": float(np.mean([right_of(row).mean() for row in rows])),
            "points_lost": together(lost).as_json(),
            "steps": float(np.mean([row["steps"] for row in rows])),
            "speed": float(
                np.mean([seed["settings"][0]["seconds"] / row["seconds"] for seed, row in zip(seeds, rows, strict=True)])
            ),
        }
        if "halted_after" in rows[0]:
            dealt = [all_of - at_random(seed, row) for all_of, seed, row in zip(whole, seeds, rows, strict=True)]
            one["random_points_lost"] = together(np.array(dealt)).as_json()
            one["ahead_of_random"] = together(np.array(dealt) - lost).as_json()
        found.append(one)
    return found


def reaches(way: Row) -> bool:
    return way["speed"] >= AIM and way["points_lost"]["interval"][0] <= 0


def table_of_choices(found: dict[str, Row], beside: dict[str, Row]) -> str:
    lines = ["| what may be chosen | against | speed, mean (by seed) | points lost (95 %) |", "|---|---|---|---|"]
    named = {f"{WAYS[name][0]} | all steps": way for name, way in found.items()}
    named |= {f"texts halt by confidence within {k} steps | {k} steps for every text": way for k, way in beside.items()}
    for said, way in named.items():
        by_seed = ", ".join(written(one, 2) for one in way["speed_by_seed"])
        lost = estimate(way["points_lost"], 2, scale=100)
        lines.append(f"| {said} | {written(way['speed'], 2)}× ({by_seed}) | {lost} |")
    return "\n".join(lines)


def table_of_settings(rows: list[Row]) -> str:
    lines = [
        "| setting | steps of a text | speed | accuracy, % | points lost (95 %) | the same steps at random, points lost |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        within = f" within {row['num_steps']} steps" if row["criterion"] == "confidence" else ""
        cells = [
            row["setting"] + within,
            written(row["steps"], 2),
            f"{written(row['speed'], 2)}×",
            bare_per_cent(row["accuracy"]),
            estimate(row["points_lost"], 1, scale=100),
            estimate(row["random_points_lost"], 1, scale=100) if "random_points_lost" in row else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@styled
def accuracy_against_speed(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    sure: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: -row["num_steps"]):
        if row["criterion"] == "confidence":
            sure.setdefault(row["num_steps"], []).append(row)
    (_, of_all), *of_fewer = sure.items()
    dial = [row for row in rows if row["criterion"] == "dial"]
    lines = [
        (of_all, "points_lost", ORANGE, "D", "texts halt by confidence"),
        *((shown, "points_lost", AMBER, "v", f"the same within {k} steps") for k, shown in of_fewer[-1:]),
        (of_all, "random_points_lost", CONTROL, "X", "as many steps at random (of the first)"),
        (dial, "points_lost", BLUE, "o", "fewer steps for every text"),
        ([row for row in rows if row["criterion"] == "context"], "points_lost", GREEN, "s", "all but the first token halt"),
    ]
    for shown, key, colour, marker, said in lines:
        ordered = sorted(shown, key=lambda row: row["speed"])
        whole = dial[0]["accuracy"]
        y = [whole - row[key]["value"] for row in ordered]
        ends = [[whole - end for end in row[key]["interval"]] for row in ordered]
        whiskers = np.abs([[middle - high, low - middle] for middle, (low, high) in zip(y, ends, strict=True)]).T
        linked = "-" if marker != "s" else ""
        x = [row["speed"] for row in ordered]
        axes.errorbar(x, y, whiskers, color=colour, marker=marker, ms=5, ls=linked, lw=1.2, elinewidth=0.7, label=said)
    for row in dial:
        axes.annotate(
            str(row["num_steps"]), (row["speed"], row["accuracy"]), (5, 5), textcoords="offset points", fontsize=SMALL
        )
    axes.axvline(AIM, color=CONTROL, lw=0.8, ls=":")
    axes.set(xscale="log", xlabel="measured speed, all steps = 1×", ylabel="dev accuracy (%)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}×" if round(value, 1) in (2, 3, 4, 6, 8) else "")
    per_cent_axis(axes)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def answer(found: dict[str, Row]) -> str:
    halting, dial = found["confidence"], found["dial"]

    def said(way: Row) -> str:
        return (
            f"{written(way['speed'], 2)} times the speed of all steps, {estimate(way['points_lost'], 2, scale=100)} points lost"
        )

    return (
        f"{AIM} times the speed at no loss beyond the interval is {'' if reaches(halting) else 'not '}reached by texts that "
        f"halt by confidence ({said(halting)}), "
        f"and {'' if reaches(dial) else 'not '}by fewer steps for every text ({said(dial)})."
    )


def main(name: str = "") -> None:
    of = f"_{name}" if name else ""
    measured = read_json(HERE / f"measured{of}.json")
    found, rows = choices(measured["seeds"]), curve(measured["seeds"])
    halting, beside = found["confidence"], beside_the_dial(measured["seeds"])
    write_json(
        HERE / f"result{of}.json",
        {
            "question": "What does a classifier save whose texts halt when it is sure of them?",
            "protocol": f"{measured['task']}, {measured['examples']['train']:,} training examples, a loss after every step, "
            f"{len(measured['seeds'])} fine-tuning seeds; each half of dev ({measured['examples']['dev']} examples) chooses "
            f"for the other the fastest setting that loses at most {100 * LOSE:g} points; paired intervals over both; "
            "speeds are of prediction from tokens to labels, settings in turns, on a CPU one thread's own time",
            "seeds": [seed["seed"] for seed in measured["seeds"]],
            "hardware": measured["hardware"],
            "git": measured["git"],
            "ratios": {
                "classifier_halting_speedup": halting["speed"],
                **({"classifier_halting_vs_dial": min(way["speed"] for way in beside.values())} if beside else {}),
                "classifier_halting_points_lost": 100 * halting["points_lost"]["value"],
            },
            "metrics": {
                "accuracy_by_step": [
                    float(np.mean([numbers(seed["right_by_step"][step]).mean() for seed in measured["seeds"]]))
                    for step in range(len(measured["seeds"][0]["right_by_step"]))
                ],
                "choices": found,
                "beside_the_dial": beside,
                "settings": rows,
            },
            "answer": answer(found),
            "command": COMMANDS[name],
        },
    )
    save(png(accuracy_against_speed(rows)), HERE / "figures" / f"accuracy_against_speed{of}.png")
    write_between(HERE / "README.md", f"choices{of}", table_of_choices(found, beside))
    write_between(HERE / "README.md", f"settings{of}", table_of_settings([row for row in rows if row["criterion"] != "change"]))
    print(table_of_choices(found, beside), table_of_settings(rows), answer(found), sep="\n\n")


if __name__ == "__main__":
    if sys.argv[1:] and (len(sys.argv) > 2 or sys.argv[1] not in COMMANDS):
        sys.exit(__doc__)
    main(*sys.argv[1:])
