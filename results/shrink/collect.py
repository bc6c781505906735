"""From measured/MODEL/*.json to result.json, figures/ and the table of README.md.

python results/shrink/collect.py

The perplexity of each smaller model above that of the control with the same seed; intervals over seeds and held-out rows
together (over rows alone where there is one seed). Ours is compared with each peer in the same way, by nats per token.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pnn.differences import LEAST_SEEDS, TOO_FEW
from pnn.figures.shrink import smaller_models
from pnn.figures.style import png, save
from pnn.files import write_between, write_json
from pnn.numbers import estimate, per_cent
from pnn.runs import check_commit, read_json
from pnn.stats import Estimate, ratio_interval, seeds_and_sequences, verdict

HERE = Path(__file__).parent
WITHIN = 0.05  # of the control's perplexity: as good
CLAIMED = "20"  # per cent fewer parameters of the source's fourth claim
PEERS = {
    "llm_pruner": "LLM-Pruner's recipe",
    "tp_width": "Torch-Pruning with width",
    "tp_taylor": "Torch-Pruning by Taylor",
}  # of peers/recipes.py
OURS = (CLAIMED, f"{CLAIMED}, tokens too")  # which are compared with them
Arms = list[dict[str, Any]]


def above(arms: Arms, controls: Arms) -> Estimate:
    """Perplexity of the arms above the controls' of the same seeds, as a share."""
    return nats_above(arms, controls, controls[0]["targets"]).on_scale(lambda value: math.exp(value) - 1)


def nats_above(arms: Arms, others: Arms, asked: list[int]) -> Estimate:
    """Nats per token of the arms above those of the others with the same seeds. `asked`: the targets of whole rows."""
    of_seed = {one["seed"]: one for one in others}
    targets = np.array(asked, dtype=float)
    gains = np.array([of_whole_rows(arm, targets) - of_whole_rows(of_seed[arm["seed"]], targets) for arm in arms])
    return ratio_interval(gains[0], targets) if len(gains) == 1 else seeds_and_sequences(gains, targets)


def of_whole_rows(arm: dict[str, Any], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nats of each row. Without rare tokens a row ends earlier: what it lacks counts as the arm's mean, so that differences
    of sums are differences of means."""
    nats, own = np.array(arm["nats"]), np.array(arm["targets"], dtype=float)
    return nats + (targets - own) * nats.sum() / own.sum()


def perplexity(arms: Arms) -> float:
    return math.exp(float(np.mean([sum(one["nats"]) / sum(one["targets"]) for one in arms])))


def speed(arms: Arms, control: dict[str, Any]) -> dict[str, float]:
    """Times as fast as the whole model at reading and at writing, and as a share of what FLOPs and bytes allow: reading many
    tokens is bound by FLOPs, writing one token after another by the weights that are read for it. A row's last token alone is
    read out."""
    found: dict[str, list[float]] = {}

    def reads(flops: float, of: dict[str, Any]) -> float:
        return flops - of["vocabulary_flops_per_token"] * (1 - 1 / of["length"])

    for arm in arms:
        told = arm["summary"]
        before, after = told["before"], told["after"]
        bounds = {
            "reading": reads(before["flops_per_token"], control) / reads(after["flops_per_token"], arm),
            "writing": before["parameters"] / after["parameters"],
        }
        for what, bound in bounds.items():
            rates = told[what]["tokens_per_second"]
            found.setdefault(what, []).append(rates["after"] / rates["before"])
            found.setdefault(f"{what}_share_of_bound", []).append(rates["after"] / rates["before"] / bound)
    return {name: float(np.median(values)) for name, values in found.items()}


def collected(arms: Arms) -> dict[str, Any]:
    """Of one model: what is known before, and for each share, in per cent, and each teacher what came of it."""
    controls = [one for one in arms if one["arm"] == "control"]
    known = {one["seed"] for one in controls}
    less = [one for one in arms if one["arm"] == "less" and one["seed"] in known]
    out: dict[str, Any] = {
        "perplexity": {
            name: perplexity([one for one in arms if one["arm"] == name]) for name in ("whole", "adapted", "control")
        },
        "parameters": controls[0]["parameters"],
        "learning": {key: controls[0][key] for key in ("updates", "adapt", "rate", "batch", "length")},
    }
    by_name: dict[str, Arms] = {}
    for one in sorted(less, key=lambda one: (one["share"], named(one))):
        by_name.setdefault(named(one), []).append(one)
    for name, chosen in by_name.items():
        found = above(chosen, controls)
        row = {
            "seeds": sorted(one["seed"] for one in chosen),
            "fewer_parameters": float(np.mean([one["summary"]["fewer_parameters"] for one in chosen])),
            "perplexity_right_after_pruning": float(np.median([one["summary"]["pruned"]["perplexity"] for one in chosen])),
            "perplexity": perplexity(chosen),
            "perplexity_above_control": {"mean": found.value, "low": found.low, "high": found.high},
            f"within_{100 * WITHIN:g}_per_cent": TOO_FEW
            if f"{100 * chosen[0]['share']:g}" == CLAIMED and len(chosen) < LEAST_SEEDS
            else verdict(-found.on_scale(lambda value: value - WITHIN)),
            "speed": speed(chosen, controls[0]),
        }
        out[name] = row
    out["ahead"] = {
        ours: {
            peer: ahead(by_name[ours], by_name[f"{CLAIMED}, {peer}"], controls[0]["targets"])
            for peer in PEERS.values()
            if f"{CLAIMED}, {peer}" in by_name
        }
        for ours in OURS
        if ours in by_name
    }
    return out


def named(arm: dict[str, Any]) -> str:
    """Which row of the table."""
    words = [f"{100 * arm['share']:g}"]
    if "peer" in arm:
        words.append(PEERS[arm["peer"]])
    elif "token" in arm.get("kinds", ()):
        words.append("tokens too")
    if arm["teacher"] != "logits":
        words.append(f"teacher {arm['teacher']}")
    return ", ".join(words)


def ahead(ours: Arms, peers: Arms, asked: list[int]) -> dict[str, Any]:
    """How many nats per token a peer loses more, over the seeds that both have."""
    seeds = sorted({one["seed"] for one in ours} & {one["seed"] for one in peers})
    if not seeds:
        return {"seeds": []}
    found = nats_above([one for one in peers if one["seed"] in seeds], ours, asked)
    said = TOO_FEW if len(seeds) < LEAST_SEEDS else verdict(found)
    return {"seeds": seeds, "nats": found.as_json(), "verdict": said}


def rows_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in found.items() if isinstance(row, dict) and "perplexity_above_control" in row}


def table(models: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| model | fewer parameters, % | seeds | perplexity right after | perplexity | above the control "
        "| reading, times | writing, times |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, found in models.items():
        whole = found["perplexity"]
        lines.append(f"| {model} | 0 (control) | | | {whole['control']:.2f} | | 1 | 1 |")
        for name, row in rows_of(found).items():
            gap, fast = row["perplexity_above_control"], row["speed"]
            told = f"{per_cent(gap['mean'])} ({per_cent(gap['low'])} to {per_cent(gap['high'])})"
            speeds = [
                f"{fast[what]:.2f} ({fast[f'{what}_share_of_bound']:.2f} of the bound)" for what in ("reading", "writing")
            ]
            after = f"{row['perplexity_right_after_pruning']:.2f} | {row['perplexity']:.2f}"
            lines.append(f"| {model} | {name} | {len(row['seeds'])} | {after} | {told} | {' | '.join(speeds)} |")
    return "\n".join(lines)


def peers_table(models: dict[str, dict[str, Any]]) -> str:
    lines = []
    for model, found in models.items():
        for ours, gaps in found["ahead"].items():
            for peer, gap in gaps.items():
                if gap["seeds"]:
                    told = f"{len(gap['seeds'])} | {estimate(gap['nats'], 3, plus=True)} | {gap['verdict']}"
                    lines.append(f"| {model} | {ours} | {peer} | {told} |")
    if not lines:
        return "Not measured yet."
    return "\n".join(["| model | ours | ahead of | seeds | nats per token | |", "|---|---|---|---|---|---|", *lines])


def main() -> None:
    models = {}
    for folder in sorted(path for path in (HERE / "measured").iterdir() if path.is_dir()):
        check_commit(folder)
        arms = [read_json(path) for path in sorted(folder.glob("*.json")) if not path.name.startswith("environment")]
        models[folder.name] = collected(arms)
    write_json(
        HERE / "result.json",
        {
            "question": "Is a model with a fifth fewer parameters as good as the whole one, if both learn alike?",
            "protocol": "heads, neurons and layers go by their worth per parameter ('tokens too': after tokens that the text "
            "has rarely or never), the rest is repaired and taught by the whole model; the control learns as many updates on "
            f"the same rows; as good is a perplexity within {per_cent(WITHIN, 0)} of its",
            "metrics": models,
            "verdicts": {
                f"{model}{more}": found[f"{CLAIMED}{more}"][f"within_{100 * WITHIN:g}_per_cent"]
                for model, found in models.items()
                for more in ("", ", tokens too")
                if f"{CLAIMED}{more}" in found
            },
            "command": "results/shrink/run.py MODEL TEXT RUNS; results/shrink/collect.py",
        },
    )
    curves = {model: found for model, found in models.items() if len({name.partition(",")[0] for name in rows_of(found)}) > 1}
    if curves:
        save(png(smaller_models(curves)), HERE / "figures" / "shrink.png")
    write_between(HERE / "README.md", "table", table(models))
    write_between(HERE / "README.md", "peers", peers_table(models))


if __name__ == "__main__":
    main()
