"""From measured/MODEL/*.json to result.json, figures/ and the table of README.md.

python results/shrink/collect.py

The perplexity of each smaller model above that of the control with the same seed; intervals over seeds and held-out rows
together (over rows alone where there is one seed).
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
from pnn.numbers import per_cent
from pnn.runs import check_commit, read_json
from pnn.stats import Estimate, ratio_interval, seeds_and_sequences, verdict

HERE = Path(__file__).parent
WITHIN = 0.05  # of the control's perplexity: as good
CLAIMED = "20"  # per cent fewer parameters of the source's fourth claim
Arms = list[dict[str, Any]]


def above(arms: Arms, controls: Arms) -> Estimate:
    """Perplexity of the arms above the controls' of the same seeds, as a share."""
    of_seed = {one["seed"]: one for one in controls}
    targets = np.array(controls[0]["targets"], dtype=float)
    gains = np.array([of_whole_rows(arm, targets) - of_whole_rows(of_seed[arm["seed"]], targets) for arm in arms])
    nats = ratio_interval(gains[0], targets) if len(gains) == 1 else seeds_and_sequences(gains, targets)
    return nats.on_scale(lambda value: math.exp(value) - 1)


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
    for share, tokens_too, teacher in sorted({_about(one) for one in less}):
        chosen = [one for one in less if _about(one) == (share, tokens_too, teacher)]
        found = above(chosen, controls)
        row = {
            "seeds": sorted(one["seed"] for one in chosen),
            "fewer_parameters": float(np.mean([one["summary"]["fewer_parameters"] for one in chosen])),
            "perplexity_right_after_pruning": float(np.median([one["summary"]["pruned"]["perplexity"] for one in chosen])),
            "perplexity": perplexity(chosen),
            "perplexity_above_control": {"mean": found.value, "low": found.low, "high": found.high},
            f"within_{100 * WITHIN:g}_per_cent": TOO_FEW
            if f"{100 * share:g}" == CLAIMED and len(chosen) < LEAST_SEEDS
            else verdict(-found.on_scale(lambda value: value - WITHIN)),
            "speed": speed(chosen, controls[0]),
        }
        name = f"{100 * share:g}" + (", tokens too" if tokens_too else "")
        out[name if teacher == "logits" else f"{name}, teacher {teacher}"] = row
    return out


def _about(arm: dict[str, Any]) -> tuple[float, bool, str]:
    return arm["share"], "token" in arm.get("kinds", ()), arm["teacher"]


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


if __name__ == "__main__":
    main()
