"""From measured/growth.jsonl to result.json, figures/ and the tables of README.md.

python results/shrink/growth/collect.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pnn.figures.shrink import grown_arms
from pnn.figures.style import png, save
from pnn.files import write_between, write_json
from pnn.runs import check_commit, read_metrics
from pnn.stats import SUPPORTED, Estimate, student, verdict

HERE = Path(__file__).parent
NOTHING = "nothing grows"
CONTROLS = {"zero": "all grow from zero", "revive": "all revived"}  # by what new heads start as
STRATEGIES = ("gradient", "importance")  # that choose where; the control chooses at random
SAID = {"zero": "heads that start at zero", "revive": "heads that come back with their weights"}
Rows = list[dict[str, Any]]
Found = dict[str, Any]


def collected(rows: Rows) -> Found:
    """Of one model: what each arm ends at, and what growing and choosing are worth, paired by seed."""
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_arm.setdefault(row["label"], {})[row["seed"]] = row

    def gain(one: str, other: str) -> Found | None:
        """Nats per token by which one ends below the other."""
        if one not in by_arm or other not in by_arm:
            return None
        seeds = sorted(by_arm[one].keys() & by_arm[other].keys())
        stages = {"gain": "loss", "gain_before_learning": "loss_grown"}
        found = {
            name: student([by_arm[other][seed][stage] - by_arm[one][seed][stage] for seed in seeds])
            for name, stage in stages.items()
        }
        return {**{name: one.as_json() for name, one in found.items()}, "verdict": verdict(found["gain"]), "seeds": seeds}

    found: Found = {"arms": {arm: _ended(of_arm) for arm, of_arm in by_arm.items()}, "starts": {}}
    for start, control in CONTROLS.items():
        told: Found = {"control": gain(control, NOTHING)}
        told["some"] = {label: gain(label, NOTHING) for label in by_arm if label.endswith(f", {start}")}
        told["guided"] = {
            strategy: one for strategy in STRATEGIES if (one := gain(f"{strategy}, {start}", f"random, {start}")) is not None
        }
        found["starts"][start] = told
    found["revived_above_zero"] = gain("random, revive", "random, zero")
    found["to_be_had"] = gain("retrained", NOTHING)
    return found


def _ended(of_arm: dict[int, dict[str, Any]]) -> Found:
    rows = [of_arm[seed] for seed in sorted(of_arm)]
    ends = {stage: student([row[stage] for row in rows]).as_json() for stage in ("loss_pruned", "loss_grown", "loss")}
    return {"seeds": sorted(of_arm), "heads": float(np.mean([row["heads"] for row in rows])), **ends}


# Words ----------------------------------------------------------------------------------------------------------------


def answer(found: Found) -> str:
    """A sentence for each start. Whether the place matters is asked only where growing everything helps."""
    said = []
    for start, told in found["starts"].items():
        control = told["control"]
        if control is None:
            continue
        what, gained = SAID[start].capitalize(), f"{signed(control['gain'])} nats"
        if control["verdict"] != SUPPORTED:
            said.append(f"{what} cannot be shown to help at this length (all of them: {gained}).")
            continue
        guided = told["guided"].items()
        parts = [f"places by {name} better than at random: {one['verdict']} ({signed(one['gain'])})" for name, one in guided]
        said.append(f"{what} help (all of them: {gained}); {', '.join(parts)}.")
    return " ".join(said)


def signed(found: Found) -> str:
    value, low, high = Estimate.from_json(found)  # type: ignore[arg-type]
    return f"{value:+.3f}" if np.isnan(low) else f"{value:+.3f}, {low:.3f} to {high:.3f}"


def losses(found: Found) -> str:
    lines = ["| arm | heads | as pruned | as grown | after learning | gained by growing |", "|---" * 6 + "|"]
    gains = {label: one for told in found["starts"].values() for label, one in told["some"].items()}
    gains |= {CONTROLS[start]: told["control"] for start, told in found["starts"].items()}
    for arm, row in found["arms"].items():
        ends = [f"{row[stage]['value']:.3f}" for stage in ("loss_pruned", "loss_grown", "loss")]
        gained = gains.get(arm)
        told = f"{signed(gained['gain'])}: {gained['verdict']}" if gained else ""
        lines.append(f"| {arm} | {row['heads']:.0f} | " + " | ".join(ends) + f" | {told} |")
    return "\n".join(lines)


def places(found: Found) -> str:
    lines = ["| new heads start | does growing all help? | does the place matter? |", "|---" * 3 + "|"]
    for start, told in found["starts"].items():
        if told["control"] is None:
            continue
        control = f"{told['control']['verdict']}, {signed(told['control']['gain'])}"
        guided = [f"{name}: {one['verdict']}, {signed(one['gain'])}" for name, one in told["guided"].items()]
        asked = "; ".join(guided) if told["control"]["verdict"] == SUPPORTED else "cannot be asked here"
        lines.append(f"| {'at zero' if start == 'zero' else 'as they were'} | {control} | {asked} |")
    return "\n".join(lines)


def main() -> None:
    check_commit(HERE / "measured")
    rows = read_metrics(HERE / "measured" / "growth.jsonl")
    found = collected(rows)
    about = {key: rows[0][key] for key in ("rate", "batch", "updates", "multiplier", "held_out_rows", "length", "vocabulary")}
    write_json(
        HERE / "result.json",
        {
            "question": "Can a grown head help at all, and if so, does it matter where it grows and what it starts as?",
            "protocol": "stories15M with its vocabulary cut to the text's tokens, on stories that it wrote; heads go by "
            "gradient, some grow, all arms make the same updates on the same rows; held-out nats per token; Student intervals "
            "over seeds, paired by seed. The place is judged only where growing all heads helps",
            "seeds": sorted({row["seed"] for row in rows}),
            "metrics": {"stories15M": found | {"settings": about}},
            "answer": answer(found),
            "command": "results/shrink/growth/run.py MODEL TEXT measured/growth.jsonl; results/shrink/growth/collect.py",
        },
    )
    save(png(grown_arms(found)), HERE / "figures" / "growth.png")
    for name, make in (("losses", losses), ("places", places)):
        write_between(HERE / "README.md", name, make(found))
    print(answer(found))


if __name__ == "__main__":
    main()
