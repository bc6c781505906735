"""From measured/losses.jsonl to result.json, figures/ and the table of README.md.

python results/shrink/scores/collect.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pnn.figures.shrink import scores_and_repair
from pnn.figures.style import png, save
from pnn.files import write_between, write_json
from pnn.numbers import estimate
from pnn.runs import check_commit, read_json, read_metrics
from pnn.stats import Estimate, differs, ratio_interval, seeds_and_sequences, verdict

HERE = Path(__file__).parent
Rows = list[dict[str, Any]]
KEYS = ("arm", "budget", "repaired", "seed")
ROUNDS, SEEDS = "fisher, rounds", (0, 1, 2)


def mean_nats(rows: Rows) -> NDArray[np.float64]:
    """Of each held-out row, over seeds."""
    return np.mean([row["nats"] for row in rows], axis=0)


def collected(rows: Rows) -> dict[str, Any]:
    whole = next(row for row in rows if row["arm"] == "unpruned")
    targets = np.array(whole["targets"], dtype=float)
    base = np.array(whole["nats"])
    cells = sorted({(row["arm"], row["budget"]) for row in rows if row["arm"] != "unpruned"})
    arms: dict[str, list[dict[str, Any]]] = {}
    for arm, budget in cells:
        of_cell = [row for row in rows if (row["arm"], row.get("budget")) == (arm, budget)]
        by_repair = {
            repaired: {row["seed"]: row for row in of_cell if row["repaired"] is repaired} for repaired in (False, True)
        }
        seeds = sorted(by_repair[False].keys() & by_repair[True].keys())
        if not seeds:
            continue
        cut, mended = ([by_repair[repaired][seed] for seed in seeds] for repaired in (False, True))
        arms.setdefault(arm, []).append(
            {
                "budget": budget,
                "seeds": seeds,
                "fewer_parameters": float(np.mean([1 - row["parameters"] / whole["parameters"] for row in cut])),
                "heads": float(np.mean([row["heads"] for row in cut])),
                "neurons": float(np.mean([row["neurons"] for row in cut])),
                "pruned": ratio_interval(mean_nats(cut) - base, targets).as_json(),
                "repaired": ratio_interval(mean_nats(mended) - base, targets).as_json(),
                "repair_gains": ratio_interval(mean_nats(cut) - mean_nats(mended), targets).as_json(),
                "spread_over_seeds": {
                    name: [min(found), max(found)]
                    for name, of in (("pruned", cut), ("repaired", mended))
                    for found in [[(sum(row["nats"]) - base.sum()) / targets.sum() for row in of]]
                },
            }
        )
    return {
        "unpruned": {"parameters": whole["parameters"], "heads": whole["heads"], "neurons": whole["neurons"]}
        | {"loss": ratio_interval(base, targets).as_json(), "rows": len(base), "targets": int(targets.sum())},
        "arms": arms,
    }


def of_rounds(rows: Rows) -> list[dict[str, Any]]:
    """How many nats less are lost if the Fisher score is taken anew in every round, paired by seed and row."""
    targets = np.array(next(row for row in rows if row["arm"] == "unpruned")["targets"], dtype=float)
    nats = {tuple(row.get(key) for key in KEYS): np.array(row["nats"]) for row in rows}
    found = []
    for budget, repaired in sorted({(row["budget"], row["repaired"]) for row in rows if row["arm"] == ROUNDS}):
        both = [(("fisher, shared", budget, repaired, seed), (ROUNDS, budget, repaired, seed)) for seed in SEEDS]
        gains = np.array([nats[once] - nats[rounds] for once, rounds in both])
        gain = seeds_and_sequences(gains, targets)
        found.append(
            {"budget": budget, "repaired": repaired, "seeds": list(SEEDS), "gain": gain.as_json(), "verdict": verdict(gain)}
        )
    return found


def after_learning() -> dict[str, Any]:
    """The same after 100 updates: of models that lost 20 % at once, as on the page above, and in four rounds."""
    at_once = [read_json(HERE.parent / "measured" / "stories15m" / f"less-20-none-{seed}.json") for seed in SEEDS]
    rounds = [read_json(HERE / "measured" / "learned" / f"less-20-none-{seed}-look-8-1e-4-adamw-4.json") for seed in SEEDS]
    gains = np.array([one["nats"] for one in at_once]) - np.array([one["nats"] for one in rounds])
    gain = seeds_and_sequences(gains, np.array(at_once[0]["targets"], dtype=float))
    return {"budget": 0.2, "learned": True, "seeds": list(SEEDS), "gain": gain.as_json(), "verdict": verdict(gain)}


def rounds_table(found: list[dict[str, Any]]) -> str:
    lines = ["| budget | | four rounds instead of one gain, nats | |", "|---|---|---|---|"]
    for one in found:
        after = "repaired, 100 updates" if "learned" in one else "repaired" if one["repaired"] else "cut"
        told = f"{estimate(one['gain'], 2, plus=True)} | {one['verdict']}"
        lines.append(f"| −{100 * one['budget']:.0f} % | {after} | {told} |")
    return "\n".join(lines)


def table(found: dict[str, Any]) -> str:
    budgets = sorted({row["budget"] for rows in found["arms"].values() for row in rows})
    head = " | ".join(f"−{100 * budget:.0f} %, cut | repaired" for budget in budgets)
    lines = [f"| scored by, budget | {head} |", "|---" * (1 + 2 * len(budgets)) + "|"]
    for arm, rows in found["arms"].items():
        by_budget = {row["budget"]: row for row in rows}
        cells = [cell(by_budget.get(budget), kind) for budget in budgets for kind in ("pruned", "repaired")]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(row: dict[str, Any] | None, kind: str) -> str:
    if row is None:
        return ""
    value, low, high = Estimate.from_json(row[kind])
    return f"+{value:.2f} ({low:.2f} to {high:.2f})"


def answer(found: dict[str, Any]) -> str:
    cells = [(arm, row) for arm, rows in found["arms"].items() for row in rows]
    helped = sum(row["repair_gains"]["value"] > 0 and differs(Estimate.from_json(row["repair_gains"])) for _, row in cells)
    best = {
        budget: min((one for one in cells if one[1]["budget"] == budget), key=lambda one: one[1]["repaired"]["value"])
        for budget in sorted({row["budget"] for _, row in cells})
    }
    said = [f"−{100 * b:.0f} %: {arm}, +{row['repaired']['value']:.2f} nats" for b, (arm, row) in best.items()]
    return f"Repair lowers the loss in {helped} of {len(cells)} cases. Least is lost, after repair, at {'; '.join(said)}."


def main() -> None:
    for folder in (HERE / "measured", HERE / "measured" / "learned"):
        check_commit(folder)
    rows = read_metrics(HERE / "measured" / "losses.jsonl")
    found, rounds = collected(rows), [*of_rounds(rows), after_learning()]
    write_json(
        HERE / "result.json",
        {
            "question": "Which score, with or without repair, loses least right after pruning heads and neurons?",
            "protocol": "stories15M on stories that it wrote, rows of 128 tokens; nats per token on held-out rows above the "
            "unpruned model's; intervals over held-out rows, paired, means over seeds; seeds draw the calibration rows",
            "seeds": sorted({seed for rows in found["arms"].values() for row in rows for seed in row["seeds"]}),
            "metrics": {"stories15M": found | {"rounds": rounds}},
            "answer": answer(found),
            "command": "results/shrink/scores/run.py MODEL TEXT measured/losses.jsonl; results/shrink/scores/collect.py",
        },
    )
    save(png(scores_and_repair(found)), HERE / "figures" / "scores.png")
    write_between(HERE / "README.md", "table", table(found))
    write_between(HERE / "README.md", "rounds", rounds_table(rounds))
    print(answer(found))


if __name__ == "__main__":
    main()
