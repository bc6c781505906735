"""From finished sweeps to measured/, result.json, the figures and the tables of README.md.

python results/more_steps/collect.py small RUNS   # the folder that run.sh wrote; text, text_lower: with TEXT
python results/more_steps/collect.py              # what is in measured/
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pnn.differences import LEAST_SEEDS
from pnn.errors import UserError
from pnn.figures.marks import AMBER, BLUE, GREEN, ORANGE, PINK, line
from pnn.figures.style import WIDTH, per_cent_axis, png, save, styled
from pnn.files import write_between, write_json
from pnn.numbers import estimate
from pnn.runs import check_commit, read_json
from pnn.stats import SUPPORTED, student

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
TEXTS = {"small": "the harder embedded corpus", "text": "Wikipedia", "text_lower": "Wikipedia, at a lower rate"}
UPDATES = {"gated": "gated (the paper)", "rewrite": "rewriting"}
TRAINED = {
    "fixed": "always 4 steps",
    "random": "1 to 7, drawn",
    "long": "1 to 12, drawn",
    "recall": "always 4 steps, recall",
    "recall_long": "1 to 12, drawn, recall",
}
LOOKS = {  # with recall: full lines
    "fixed": (ORANGE, "--"),
    "random": (AMBER, "--"),
    "long": (PINK, "--"),
    "recall": (BLUE, "-"),
    "recall_long": (GREEN, "-"),
}
FAR = 32
STEPS = [*range(1, 9), FAR]
FINDINGS = {
    "more_rounds_keep_the_accuracy": ("accuracy, 8 steps less 4, points", 100),
    "the_far_state_predicts_as_well": ("loss, 4 steps less 32, nats", 1),
    "every_round_moves_less": ("smallest contraction, 1 − ratio", 1),
    "states_near_a_point": ("nearer to the far state after 8 than after 4", 1),
}


def copy_in(text: str, runs: Path) -> None:
    """Of every run what more_steps found, and of every sweep the price at four steps."""
    (MEASURED / text).mkdir(parents=True, exist_ok=True)
    for update in UPDATES:
        sweep = runs / update
        if not (sweep / "sweep.json").exists():
            print(f"{sweep}: no sweep.json yet, left out")
            continue
        arms = [arm for arm in read_json(sweep / "sweep.json")["arms"] if arm["seeds"]]
        folders = {(arm["name"], seed): sweep / arm["name"] / f"seed-{seed}" for arm in arms for seed in arm["seeds"]}
        for run in folders.values():
            check_commit(run)
            if not (run / "analysis" / "more_steps.json").exists():
                raise UserError(f"{run} was not analysed yet: pnn analyze more_steps {run}")
        found = {
            f"{name}/seed-{seed}": read_json(run / "analysis" / "more_steps.json") for (name, seed), run in folders.items()
        }
        at_four = {arm["name"]: arm["texts"]["validation"] for arm in arms}
        write_json(MEASURED / text / f"{update}.json", {"at_four_steps": at_four, "runs": found})


def rows(text: str) -> dict[str, dict[str, Any]]:
    """By update and way of training: every finding's effect over seeds and its verdicts, and accuracy after four steps."""
    found: dict[str, dict[str, Any]] = {}
    for update in UPDATES:
        if not (MEASURED / text / f"{update}.json").exists():
            continue
        measured = read_json(MEASURED / text / f"{update}.json")
        for trained in TRAINED:
            name = f"{update}_{trained}"
            if name not in measured["at_four_steps"]:
                continue  # not asked for
            runs = [one for run, one in measured["runs"].items() if run.startswith(f"{name}/")]
            row: dict[str, Any] = {"seeds": len(runs), "at_four_steps": measured["at_four_steps"][name], "findings": {}}
            for finding in FINDINGS:
                each = [run["findings"][finding] for run in runs]
                effects = [one["effect"]["value"] for one in each]
                verdicts = [one["verdict"] for one in each]
                row["findings"][finding] = {"effect": student(effects).as_json(), "by_seed": effects, "verdicts": verdicts}
            of_all = [verdict for one in row["findings"].values() for verdict in one["verdicts"]]
            row["an_iteration_toward_something"] = len(runs) >= LEAST_SEEDS and all(verdict == SUPPORTED for verdict in of_all)
            for key in ("accuracy_by_round", "loss_by_round"):
                each_step = zip(*(run[key] for run in runs), strict=True)
                row[key] = [student([one["value"] for one in step]).as_json() for step in each_step]
            found[name] = row
    return found


def names(row: str) -> list[str]:
    update, _, trained = row.partition("_")
    return [UPDATES[update], TRAINED[trained]]


def verdict_table(found: dict[str, dict[str, Any]]) -> str:
    head = [title for title, _ in FINDINGS.values()]
    lines = [f"| update | trained with | {' | '.join(head)} | an iteration toward something? |", "|---" * (len(head) + 3) + "|"]
    for name, row in found.items():
        cells = names(name)
        for finding, (_, scale) in FINDINGS.items():
            one = row["findings"][finding]
            supported = one["verdicts"].count(SUPPORTED)
            cells.append(f"{estimate(one['effect'], 2, scale=scale, plus=True)}; supported in {supported} of {row['seeds']}")
        lines.append("| " + " | ".join([*cells, "yes" if row["an_iteration_toward_something"] else "no"]) + " |")
    return "\n".join(lines)


def step_table(found: dict[str, dict[str, Any]]) -> str:
    lines = [f"| update | trained with | {' | '.join(map(str, STEPS))} | price at 4 |", "|---" * (len(STEPS) + 3) + "|"]
    for name, row in found.items():
        cells = [f"{100 * one['value']:.1f}" for one in row["accuracy_by_round"]]
        price = row["at_four_steps"]["against_first"]
        said = estimate(price["over_seeds_and_sequences"], 1, scale=100, plus=True) if price else ""
        lines.append("| " + " | ".join([*names(name), *cells, said]) + " |")
    return "\n".join(lines)


@styled
def picture(found: dict[str, dict[str, Any]]) -> Figure:
    """Accuracy after so many steps, one panel for each update. The far state stands behind a gap."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    panels = figure.subplots(1, len(UPDATES), sharey=True)
    places = [*range(1, 9), 10]
    for axes, (update, title) in zip(panels, UPDATES.items(), strict=True):
        for beside, (trained, (colour, style)) in enumerate(LOOKS.items(), -2):
            row = found.get(f"{update}_{trained}")
            if row is None:
                continue
            accuracy = row["accuracy_by_round"]
            at = [place + 0.1 * beside for place in places]  # side by side, where arms are level
            looks = {"ms": 3.5, "lw": 1.3, "elinewidth": 0.7, "capsize": 0}
            line(axes, at[:-1], accuracy[:-1], colour, ls=style, label=TRAINED[trained], **looks)
            line(axes, at[-1:], accuracy[-1:], colour, **looks | {"ls": "none", "ms": 5})
        axes.axvline(4, color="#c8c8c8", lw=0.8, zorder=0)
        axes.set(title=title, xlabel="steps at test time", xticks=places, xticklabels=STEPS, ylim=(0, None))
    panels[0].set(ylabel="masked words right (%)")
    per_cent_axis(panels[0])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, handlelength=3)
    return figure


def answer(found: dict[str, dict[str, Any]]) -> str:
    said = [
        f"{', '.join(names(name))}: {'yes' if row['an_iteration_toward_something'] else 'no'}" for name, row in found.items()
    ]
    return "All four hypotheses supported in every seed? " + "; ".join(said) + "."


def main() -> None:
    if len(sys.argv) > 1:
        copy_in(sys.argv[1], Path(sys.argv[2]))
    of_text = {text: found for text in TEXTS if (found := rows(text))}
    write_json(
        HERE / "result.json",
        {
            "question": "Is refinement an iteration toward something?",
            "protocol": "README.md beside: models of the quickstart's width, with and without recall, always four steps or "
            "other numbers drawn at every update, on the harder embedded corpus and on Wikipedia; states at masked tokens of "
            "held-out text",
            "seeds": sorted({row["seeds"] for found in of_text.values() for row in found.values()}),
            "metrics": of_text,
            "answer": " ".join(f"On {TEXTS[text]}: {answer(found)}" for text, found in of_text.items()),
            "command": "results/more_steps/run.sh RUNS; python results/more_steps/collect.py small RUNS",
        },
    )
    for text, found in of_text.items():
        save(png(picture(found)), HERE / "figures" / f"{text}.png")
        for name, table in (("verdicts", verdict_table(found)), ("steps", step_table(found))):
            write_between(HERE / "README.md", f"{text}_{name}", table)
            print(table, end="\n\n")


if __name__ == "__main__":
    if len(sys.argv) not in (1, 3) or (len(sys.argv) == 3 and sys.argv[1] not in TEXTS):
        sys.exit(__doc__)
    try:
        main()
    except UserError as error:
        sys.exit(f"collect.py: {error}")
