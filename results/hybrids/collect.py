"""From a finished sweep to measured/SIZE.json, result.json, the figure and the tables of README.md.

python results/hybrids/collect.py small SWEEP       # the folder that run.sh wrote; text, recall, attention: with TEXT
python results/hybrids/collect.py wikipedia RUNS    # on a GPU (wide.py); what is there, parts can come one after another
python results/hybrids/collect.py                   # what is in measured/
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import wide

from pnn.differences import accuracies_apart
from pnn.figures.style import png, save
from pnn.figures.sweep import sweep as draw
from pnn.files import write_between, write_json
from pnn.numbers import estimate, short_count
from pnn.runs import BY_SEQUENCE, check_commit, read_config, read_environment, read_json
from pnn.schedule import order

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
WIDE = "wikipedia"
SIZES = {
    "small": "the quickstart's size, the harder embedded corpus",
    "text": "the quickstart's width, Wikipedia",
    "recall": "the quickstart's width, Wikipedia, with recall and without",
    "attention": "the quickstart's width, Wikipedia, twice the updates, with one attention for all refiners and without",
    "again": "the quickstart's width, Wikipedia, twice the updates, with learned recall and a guess and without",
    WIDE: "width 768, Wikipedia",
}
FIRST, ENDS = "looped", "both_ends"
SHARING = ("looped_one_attention", "eight_one_attention")
HELPING = {"looped_guess": "A guess", "looped_learned_recall": "Learned recall"}  # rule 10
BOTH = "looped_again"
ADDED = ("_recall", "_one_attention")  # behind the name of the arm without
SUPPORTERS = (FIRST, "entering", "leaving")  # what both ends have to be better than


def copy_in(size: str, sweep: Path) -> None:
    """What the sweep wrote, each arm's schedule, and every pair that the rules ask about."""
    result = read_json(sweep / "sweep.json")
    result["arms"] = [arm for arm in result["arms"] if arm["seeds"]]  # the others stand under `failed`
    runs = {arm["name"]: [sweep / arm["name"] / f"seed-{seed}" for seed in arm["seeds"]] for arm in result["arms"]}
    for run in (run for of_arm in runs.values() for run in of_arm):
        check_commit(run)
    for arm in result["arms"]:
        arm["schedule"] = schedule_of(runs[arm["name"]][0])
    result["pairs"] = [above(one, other, runs) for one, other in pairs_among([*runs])]
    result["hardware"] = read_environment(runs[FIRST][0])["hardware"]
    MEASURED.mkdir(exist_ok=True)
    result["configs"] = [Path(config).name for config in result["configs"]]
    result["settings"] = [without_folder(setting) for setting in result["settings"]]
    write_json(MEASURED / f"{size}.json", result)


def pairs_among(names: list[str]) -> list[tuple[str, str]]:
    """Every pair that the rules ask about."""
    pairs = [(name, FIRST) for name in names if name != FIRST] + [(ENDS, name) for name in SUPPORTERS[1:]]
    added = [(name, name.removesuffix(end)) for name in names for end in ADDED if name.endswith(end)]
    pairs += [(one, other) for one, other in added if other != FIRST]
    pairs += [(BOTH, one) for one in HELPING]
    return [(one, other) for one, other in pairs if one in names and other in names]


def without_folder(setting: str) -> str:
    """`data.train=/home/me/part-04.txt.xz` without the place where one machine has it."""
    key, _, value = setting.partition("=")
    return f"{key}={Path(value).name}" if Path(value).is_absolute() else setting


def schedule_of(run: Path) -> list[int]:
    model = read_config(run).model
    steps = model.get("num_steps", len(model["schedule"]))
    return order(model["schedule"], model.get("repeat"), steps)


def above(one: str, other: str, runs: dict[str, list[Path]]) -> dict[str, Any]:
    """How far the accuracy of one arm lies above another's, paired by seed and by sequence."""
    totals = [{run.name: read_json(run / BY_SEQUENCE)["validation"] for run in runs[name]} for name in (one, other)]
    return {"arms": [one, other], **accuracies_apart(*totals)}


def table(result: dict[str, Any]) -> str:
    lines = [
        "| arm | schedule | parameters | accuracy, by seed | above `looped` (seeds, sequences) | over seeds | |",
        "|---|---|---|---|---|---|---|",
    ]
    pairs = {pair["arms"][0]: pair for pair in result["pairs"] if pair["arms"][1] == FIRST}
    for arm in result["arms"]:
        found = arm["texts"][text_of(result)]
        seeds = ", ".join(f"{100 * one:.1f}" for one in found["by_seed"])
        cells = [f"`{arm['name']}`", " ".join(map(str, arm["schedule"])), short_count(arm["parameters"])]
        cells += [f"**{100 * found['value']:.1f}** ({seeds})", *told(pairs.get(arm["name"]))]
        lines.append("| " + " | ".join(cells) + " |")
    others = [pair for pair in result["pairs"] if pair["arms"][1] != FIRST]
    if others:
        lines += ["", "| accuracy of | less that of | over seeds and sequences | over seeds | |", "|---|---|---|---|---|"]
    lines += [f"| `{pair['arms'][0]}` | `{pair['arms'][1]}` | {' | '.join(told(pair))} |" for pair in others]
    return "\n".join(lines)


def text_of(result: dict[str, Any]) -> str:
    """What arms are judged on."""
    return str(result.get("text", "validation"))


def told(pair: dict[str, Any] | None) -> list[str]:
    if pair is None:
        return ["", "", ""]
    ends = (pair[over] for over in ("over_seeds_and_sequences", "over_seeds"))
    return [*(estimate(one, 2, scale=100, plus=True) for one in ends), pair["verdict"]]


def answer(result: dict[str, Any]) -> str:
    """By rules 4, 6, 9 and 10."""
    if not result["pairs"]:
        return f"Not known yet: no arm beside `{FIRST}` has its seeds."
    said = {tuple(pair["arms"]): pair["verdict"] for pair in result["pairs"]}
    better = [one for (one, other), verdict in said.items() if other == FIRST and verdict == "better"]
    asked = [said.get((ENDS, other)) for other in SUPPORTERS]
    if all(verdict == "better" for verdict in asked):
        ends = "supported"
    elif "worse" in asked:
        ends = "not supported"
    else:
        ends = "not asked" if None in asked else "undecided"
    beaten = (
        f"better than `{FIRST}`: {', '.join(f'`{one}`' for one in better)}" if better else f"no arm is better than `{FIRST}`"
    )
    helping = {"better": "supported", "worse": "not supported"}
    helps = [
        f"{what} helps: {helping.get(said[arm, FIRST], 'undecided')}" for arm, what in HELPING.items() if (arm, FIRST) in said
    ]
    if helps:
        return f"{beaten}. {'. '.join(helps)}."
    sharing = [verdict for arm in SHARING if (verdict := said.get((arm, FIRST)))]
    if sharing:
        shared = "supported" if "better" in sharing else "not supported" if set(sharing) == {"worse"} else "undecided"
        return f"{beaten}. Attention can be shared: {shared}."
    return f"{beaten}. Distinct weights belong at the ends: {ends}."


def main() -> None:
    if len(sys.argv) > 1:
        size, runs = sys.argv[1], Path(sys.argv[2])
        if size == WIDE:
            wide.keep(runs)
        else:
            copy_in(size, runs)
    if (found := wide.result_of(pairs_among)) is not None:
        write_json(MEASURED / f"{WIDE}.json", found)
    measured = {size: read_json(MEASURED / f"{size}.json") for size in SIZES if (MEASURED / f"{size}.json").exists()}
    write_json(
        HERE / "result.json",
        {
            "question": "Where should distinct weights stand in a schedule of refiners?",
            "protocol": "README.md beside: schedules of rewriting refiners; one recipe per table, three seeds; differences in "
            "masked-token accuracy on held-out text, paired by seed and sequence",
            "seeds": {size: result["seeds"] for size, result in measured.items()},
            "metrics": {
                size: {
                    "hardware": result["hardware"],
                    "accuracy": {arm["name"]: arm["texts"][text_of(result)] for arm in result["arms"]},
                    **({"tail_after_one_epoch": result["looks"]} if "looks" in result else {}),
                    "pairs": result["pairs"],
                }
                for size, result in measured.items()
            },
            "answer": {size: answer(result) for size, result in measured.items()},
            "command": "results/hybrids/run.sh seeds RUNS; python results/hybrids/collect.py SIZE RUNS/seeds",
        },
    )
    for size, result in measured.items():
        told = [wide.looks_table(result)] if size == WIDE else []
        if result["arms"]:
            save(png(draw(result)), HERE / "figures" / f"{size}.png")
            told.append(table(result))
        write_between(HERE / "README.md", size, "\n\n".join(told))
        print(SIZES[size], *told, answer(result), sep="\n\n")


if __name__ == "__main__":
    main()
