"""From measured/ to result.json, figures/ and the tables of README.md.

python results/plastic_stream/collect.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from run import WITHOUT_GROWTH
from stream import CYCLES, GRID, MEASURES, PLAIN, RATES, Choice

from pnn.errors import UserError
from pnn.figures.marks import BLUE, CONTROL, GREEN, ORANGE
from pnn.figures.style import QUIET, WIDTH, png, save, styled
from pnn.files import write_between, write_json
from pnn.numbers import estimate, written
from pnn.results import Finding
from pnn.runs import check_commit, read_json
from pnn.stats import student, verdict

HERE = Path(__file__).parent
NEAR = 0.02  # nats above the best fixed choice
Records = Mapping[str, Mapping[int, Mapping[str, Any]]]  # by arm and seed
UNTOUCHED = "nothing is learnt"
FIXED = [str(choice) for choice in GRID]


def read(folder: Path) -> tuple[Records, dict[str, Any]]:
    """All records, and the plan that they share."""
    files = [read_json(path) for path in sorted(folder.glob("*.json")) if path.name != "environment.json"]
    if not files or any(one["plan"] != files[0]["plan"] for one in files):
        raise UserError(f"{folder} has records of different plans, or none: play the arms again into an empty folder")
    records: dict[str, dict[int, dict[str, Any]]] = {}
    for one in files:
        records.setdefault(one["arm"], {})[one["seed"]] = one
    if len({tuple(of_arm) for of_arm in records.values()}) > 1:
        raise UserError(f"{folder} lacks some arms of some seeds: play the rest with run.py")
    return records, files[0]["plan"]


def values(records: Records, measure: str) -> dict[str, list[float]]:
    """Of each arm, by seed."""
    return {arm: [MEASURES[measure](one) for one in of_arm.values()] for arm, of_arm in records.items()}


def finding(hypothesis: str, worse: Sequence[float], better: Sequence[float], margin: float = 0.0) -> Finding:
    """That the second is lower than the first, by seeds."""
    effect = student([one - other for one, other in zip(worse, better, strict=True)])
    return {"hypothesis": hypothesis, "effect": effect.as_json(), "margin": margin, "verdict": verdict(effect, margin)}


def findings(records: Records) -> dict[str, Finding]:
    found: dict[str, Finding] = {}
    said = {"adaptation": "adapts better", "forgetting": "forgets less", "overall": "has a lower loss overall"}
    for measure, word in said.items():
        of = values(records, measure)
        for rate in RATES:
            found[f"{measure} {rate:g}"] = finding(
                f"replacing 10 % of the heads by gradient {word} than plain fine-tuning, rate {rate:g}",
                of[str(PLAIN[rate])],
                of[str(CYCLES[rate])],
            )
    of = values(records, "overall")
    best = [min(of_seed) for of_seed in zip(*(of[arm] for arm in FIXED), strict=True)]
    last = RATES[-1]
    found["growth"] = finding(
        f"growing heads again beats pruning alone, overall, rate {last:g}", of[WITHOUT_GROWTH], of[str(CYCLES[last])]
    )
    found["learning"] = finding("the controller beats choices at random, overall", of["at random"], of["controller"])
    found["near"] = finding(
        f"the controller is at most {NEAR} nats above each seed's best fixed choice, overall", best, of["controller"], -NEAR
    )
    found["ahead"] = finding("the controller beats each seed's best fixed choice, overall", best, of["controller"])
    return found


def untouched(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the same stream would be for a model that never learns."""
    return {"rounds": [one | {"losses": record["initial"]} for one in record["rounds"]]}


def arm_rows(records: Records) -> list[dict[str, Any]]:
    records = {**records, UNTOUCHED: {seed: untouched(one) for seed, one in records[FIXED[0]].items()}}
    by_measure = {measure: values(records, measure) for measure in MEASURES}
    rows = []
    for arm in [UNTOUCHED, *FIXED, WITHOUT_GROWTH, "at random", "controller"]:
        of_arm = list(records[arm].values())
        last = [one["rounds"][-1] for one in of_arm]
        rows.append(
            {
                "arm": arm,
                **{measure: student(of[arm]).as_json() for measure, of in by_measure.items()},
                "final_losses": {name: float(np.mean([one["losses"][name] for one in last])) for name in last[0]["losses"]},
                "final_heads": [one["heads"] for one in last],
            }
        )
    return rows


def choices(records: Records, arm: str = "controller") -> dict[int, list[str]]:
    return {seed: [str(Choice(**one["choice"])) for one in record["rounds"]] for seed, record in records[arm].items()}


# For people -----------------------------------------------------------------------------------------------------------


def arm_table(rows: Sequence[Mapping[str, Any]]) -> str:
    domains = list(rows[0]["final_losses"])
    lines = ["| arm | adaptation | forgetting | overall | " + " | ".join(f"{name}, at the end" for name in domains) + " |"]
    lines.append("|---" * (4 + len(domains)) + "|")
    for row in rows:
        cells = [estimate(row[measure], 2) for measure in MEASURES]
        cells += [written(row["final_losses"][name], 2) for name in domains]
        lines.append(f"| {row['arm']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict_table(found: Mapping[str, Finding]) -> str:
    lines = ["| claim | by, nats per token | verdict |", "|---|---|---|"]
    lines += [f"| {one['hypothesis']} | {estimate(one['effect'], 3, plus=True)} | {one['verdict']} |" for one in found.values()]
    return "\n".join(lines)


def choice_table(records: Records) -> str:
    found = choices(records)
    domains = [one["domain"] for one in next(iter(records["controller"].values()))["rounds"]]
    lines = ["| round | domain | " + " | ".join(f"seed {seed}" for seed in found) + " |", "|---" * (2 + len(found)) + "|"]
    for number, domain in enumerate(domains):
        lines.append(f"| {number + 1} | {domain} | " + " | ".join(of_seed[number] for of_seed in found.values()) + " |")
    return "\n".join(lines)


@styled
def losses_and_arms(records: Records) -> Figure:
    """Above: each domain's loss after every round, means over seeds. Below: every arm overall, a mark for each seed."""
    figure = Figure(figsize=(WIDTH, 6.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.1))
    first = next(iter(records["controller"].values()))
    low, high = RATES
    shown = {str(PLAIN[high]): CONTROL, str(PLAIN[low]): BLUE, str(CYCLES[low]): ORANGE, "controller": GREEN}
    visited = [one["domain"] for one in first["rounds"]]
    for axes, name in zip(above.subplots(1, len(first["initial"])), first["initial"], strict=True):
        for arm, colour in shown.items():
            curves = [
                [one["initial"][name], *(round_["losses"][name] for round_ in one["rounds"])] for one in records[arm].values()
            ]
            axes.plot(np.mean(curves, axis=0), color=colour, linewidth=1.5, label=arm)
        for number, domain in enumerate(visited):
            if domain == name:
                axes.axvspan(number, number + 1, color=CONTROL, alpha=0.15, linewidth=0)
        axes.set_title(name)
        axes.set_xlabel("rounds")
    above.axes[0].set_ylabel("nats per token")
    above.legend(*above.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    of = values(records, "overall")
    order = sorted(of, key=lambda arm: -float(np.mean(of[arm])))
    axes = below.subplots()
    for place, arm in enumerate(order):
        colour = shown.get(arm, QUIET)
        axes.scatter(of[arm], [place] * len(of[arm]), color=colour, s=18, zorder=3)
        axes.scatter([float(np.mean(of[arm]))], [place], color=colour, marker="|", s=160, zorder=3)
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel("overall loss, nats per token")
    axes.grid(axis="x")
    return figure


def answer(found: Mapping[str, Finding]) -> str:
    said = (
        f"{one['hypothesis']}: {estimate(one['effect'], 3, plus=True)}, {one['verdict']}"
        for name, one in found.items()
        if name.startswith(("overall", "growth", "learning", "near"))
    )
    return "; ".join(said) + "."


def main() -> None:
    check_commit(HERE / "measured")
    records, plan = read(HERE / "measured")
    found, rows = findings(records), arm_rows(records)
    seeds = list(records["controller"])
    hindsight = {seed: min(FIXED, key=lambda arm: MEASURES["overall"](records[arm][seed])) for seed in seeds}
    write_json(
        HERE / "result.json",
        {
            "question": "Does replacing heads help a model that meets domain after domain, and can a controller choose how?",
            "protocol": "stories15M with its vocabulary cut to the texts' tokens; held-out nats per token on every domain "
            "after each round; intervals over seeds, paired, by Student's t",
            "plan": plan,
            "seeds": seeds,
            "metrics": {"arms": rows, "findings": found, "best_in_hindsight": hindsight, "controller_chose": choices(records)},
            "answer": answer(found),
            "command": "results/plastic_stream/run.py MODEL TEXTS measured; results/plastic_stream/collect.py",
        },
    )
    save(png(losses_and_arms(records)), HERE / "figures" / "stream.png")
    write_between(HERE / "README.md", "arms", arm_table(rows))
    write_between(HERE / "README.md", "verdicts", verdict_table(found))
    write_between(HERE / "README.md", "choices", choice_table(records))
    print(answer(found), hindsight)


if __name__ == "__main__":
    main()
