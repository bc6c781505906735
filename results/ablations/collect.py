"""From a finished sweep to measured/sweep.json, result.json, the figure and the table of docs/ablations.md.

python results/ablations/collect.py [SWEEP]   # the sweep's folder, to copy in first; without it, what is in measured/
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pnn.figures.style import png, save
from pnn.figures.sweep import sweep as draw
from pnn.files import write_between, write_json
from pnn.numbers import estimate, short_count
from pnn.runs import check_commit, read_json
from pnn.stats import Estimate, differs

HERE = Path(__file__).parent
MEASURED = HERE / "measured" / "sweep.json"
NAMES = {
    "pnn": "PNN, one refiner, 4 steps",
    "no_gate": "no gate",
    "steps_2": "2 steps",
    "steps_8": "8 steps",
    "ffn_64": "half the FFN",
    "published": "the published code's variant",
    "tied_head": "tied head, with a transform",
    "delta_rule": "overwrite along one direction (`update: delta`)",
    "four_refiners_twice": "four refiners, each twice",
    "rewrite": "propose the whole next state (`update: rewrite`)",
    "rewrite_four_refiners_twice": "`update: rewrite`, four refiners, each twice",
}


def copy_in(sweep: Path) -> None:
    """What the sweep wrote, and of each run the accuracy on facts, with the best possible ones."""
    result = read_json(sweep / "sweep.json")
    for arm in result["arms"]:
        runs = [sweep / arm["name"] / f"seed-{seed}" for seed in arm["seeds"]]
        for run in runs:
            check_commit(run)
        evaluations = [read_json(run / "evaluation.json") for run in runs]
        arm["facts_by_seed"] = [one["by_kind"]["fact"]["accuracy"] for one in evaluations]
        result["ceiling"], result["facts_ceiling"] = evaluations[0]["ceiling"], evaluations[0]["by_kind"]["fact"]["ceiling"]
    MEASURED.parent.mkdir(exist_ok=True)
    write_json(MEASURED, {**result, "configs": [Path(config).name for config in result["configs"]]})


def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each arm: its accuracy, and how far it is from the first. A difference holds if both intervals leave out zero."""
    found = {}
    for arm in result["arms"]:
        measured = arm["texts"]["validation"]
        row = {
            "parameters": arm["parameters"],
            "accuracy": {key: measured[key] for key in ("value", "interval", "by_seed")},
            "facts": sum(arm["facts_by_seed"]) / len(arm["facts_by_seed"]),
        }
        if measured["against_first"]:
            both = [measured["against_first"][over] for over in ("over_seeds_and_sequences", "over_seeds")]
            row |= {"difference": both[0], "difference_over_seeds": both[1]}
            row["holds"] = all(differs(Estimate.from_json(one)) for one in both)
        found[arm["name"]] = row
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| | parameters | accuracy, by seed | of facts | difference (seeds, sequences) | over seeds | does it hold? |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        accuracy = row["accuracy"]
        seeds = ", ".join(f"{100 * one:.1f}" for one in accuracy["by_seed"])
        cells = [NAMES[name], short_count(row["parameters"]), f"**{100 * accuracy['value']:.1f}** ({seeds})"]
        cells += [f"{100 * row['facts']:.0f}", "", "", ""]
        if "holds" in row:
            gaps = (row["difference"], row["difference_over_seeds"])
            cells[-3:] = [*(estimate(one, 1, scale=100, plus=True) for one in gaps), "holds" if row["holds"] else "undecided"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def answer(found: dict[str, dict[str, Any]]) -> str:
    first, *others = found.values()
    told = [
        f"{NAMES[name]} {estimate(row['difference'], 1, scale=100, plus=True)} points"
        for name, row in found.items()
        if row.get("holds")
    ]
    said = "; ".join(told) if told else "nothing"
    return f"The first has {100 * first['accuracy']['value']:.1f} %; of {len(others)} changes these differences hold: {said}."


def main() -> None:
    if len(sys.argv) > 1:
        copy_in(Path(sys.argv[1]))
    result = read_json(MEASURED)
    found = rows(result)
    write_json(
        HERE / "result.json",
        {
            "question": "What does each part of a PNN do at a small size, on a corpus that is not at its ceiling?",
            "protocol": "configs/pnn.yaml and the others, which extend it: the harder embedded corpus, 1,000 updates of about "
            "1,000 tokens, Muon at one rate for all, accuracy on 1,000 held-out paragraphs under the same masks; differences "
            "paired by seed and sequence",
            "seeds": result["arms"][0]["seeds"],
            "metrics": {"best_possible": result["ceiling"], "best_possible_of_facts": result["facts_ceiling"], "arms": found},
            "answer": answer(found),
            "command": "results/ablations/run.sh SWEEP; python results/ablations/collect.py SWEEP",
        },
    )
    save(png(draw(result)), HERE / "figures" / "sweep.png")
    write_between(HERE.parents[1] / "docs" / "ablations.md", "table", table(found))
    print(table(found))
    print(answer(found))


if __name__ == "__main__":
    main()
