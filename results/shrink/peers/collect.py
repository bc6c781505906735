"""From measured/MODEL/*.json to result.json, figures/ and the tables of README.md.

python results/shrink/peers/collect.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pnn.figures.shrink import beside_peers
from pnn.figures.style import png, save
from pnn.files import write_between, write_json
from pnn.runs import check_commit, read_json
from pnn.stats import NOT_SUPPORTED, SUPPORTED, UNDECIDED, Estimate, ratio_interval, seeds_and_sequences, verdict

HERE = Path(__file__).parent
OURS = ("ours", "ours_unrepaired", "ours_surgeon", "ours_width")
PEERS = ("llm_pruner", "tp_width", "tp_taylor")
CALLED = {
    "ours": "ours",
    "ours_unrepaired": "ours without repair",
    "ours_surgeon": "ours by surgeon",
    "ours_width": "ours with width",
    "llm_pruner": "LLM-Pruner's recipe",
    "tp_width": "Torch-Pruning with width",
    "tp_taylor": "Torch-Pruning by Taylor",
    "unpruned": "unpruned",
}
STAGES = ("pruned", "text", "teacher", "lora")
SAID = {"pruned": "right after pruning", "text": "after learning the text", "teacher": "after learning with the teacher"}
Found = dict[str, Any]


def file_of(folder: Path, share: int, seed: int, arm: str, stage: str) -> Path:
    return folder / (f"{share}-{seed}-{arm}.json" if stage == "pruned" else f"{share}-{seed}-{arm}-{stage}.json")


def above(one: NDArray[np.float64], other: NDArray[np.float64], targets: NDArray[np.float64]) -> Estimate:
    """Nats per token by which one lies above the other, (seeds, rows) each: over rows, paired, and over seeds if there are
    several."""
    gains = one - other
    return ratio_interval(gains[0], targets) if len(gains) == 1 else seeds_and_sequences(gains, targets)


def collected(folder: Path) -> Found:
    """Of one model: by share, what each arm lost and whether ours is ahead of each peer."""
    whole = read_json(folder / "unpruned.json")
    targets, base = np.array(whole["targets"], dtype=float), np.array(whole["nats"])
    names = [path.stem.split("-") for path in folder.glob("[0-9]*-*.json")]
    shares = sorted({int(name[0]) for name in names})
    seeds = sorted({int(name[1]) for name in names})
    found: Found = {
        "unpruned": {"parameters": whole["parameters"], "rows": len(base), "loss": ratio_interval(base, targets).as_json()},
        "settings": read_json(folder / "settings.json"),
    }
    for share in shares:
        found[str(share)] = of_share(folder, share, seeds, base, targets)
    return found


def of_share(folder: Path, share: int, seeds: list[int], base: NDArray[np.float64], targets: NDArray[np.float64]) -> Found:
    rows: dict[tuple[str, str], NDArray[np.float64]] = {}
    with_all: dict[tuple[str, str], list[int]] = {}
    for arm in (*OURS, *PEERS, "unpruned"):
        for stage in STAGES:
            there = [seed for seed in seeds if file_of(folder, share, seed, arm, stage).exists()]
            if there:
                with_all[arm, stage] = there
                rows[arm, stage] = np.array([read_json(file_of(folder, share, s, arm, stage))["nats"] for s in there])
    arms: Found = {}
    for arm in (*OURS, *PEERS):
        if (arm, "pruned") in rows:
            kept = [read_json(file_of(folder, share, seed, arm, "pruned")) for seed in with_all[arm, "pruned"]]
            arms[arm] = {
                "seeds": with_all[arm, "pruned"],
                "parameters": [one["parameters"] for one in kept],
                "flops_per_token": [one["flops_per_token"] for one in kept],
                "shape": kept[0]["shape"],
                "pruning_seconds": [one["seconds"] for one in kept],
                "above_unpruned": {
                    stage: above(rows[arm, stage], np.broadcast_to(base, rows[arm, stage].shape), targets).as_json()
                    for stage in STAGES
                    if (arm, stage) in rows
                },
            }

    def compared(one: tuple[str, str], other: tuple[str, str]) -> Found | None:
        """By how much the other lies above one, where both have the same seeds; and whether one is ahead."""
        if one not in rows or other not in rows or with_all[one] != with_all[other]:
            return None
        effect = above(rows[other], rows[one], targets)
        return {"ahead_by": effect.as_json(), "verdict": verdict(effect), "seeds": with_all[one]}

    ahead = {stage: {peer: told for peer in PEERS if (told := compared(("ours", stage), (peer, stage)))} for stage in SAID}
    whole_recipes = {
        "llm_pruner, lora": compared(("ours", "teacher"), ("llm_pruner", "lora")),
        **{f"{peer}, text": compared(("ours", "teacher"), (peer, "text")) for peer in ("tp_width", "tp_taylor")},
    }
    control = None
    if (
        ("unpruned", "text") in rows
        and ("ours", "teacher") in rows
        and with_all["unpruned", "text"] == with_all["ours", "teacher"]
    ):
        control = above(rows["ours", "teacher"], rows["unpruned", "text"], targets).on_scale(math.expm1).as_json()
    return {
        "arms": arms,
        "ours_ahead": ahead,
        "whole_recipes": {name: told for name, told in whole_recipes.items() if told},
        "worth_of_repair": {stage: told for stage in SAID if (told := compared(("ours", stage), ("ours_unrepaired", stage)))},
        "worth_of_surgeon": {stage: told for stage in SAID if (told := compared(("ours_surgeon", stage), ("ours", stage)))},
        "worth_of_width": {stage: told for stage in SAID if (told := compared(("ours_width", stage), ("ours", stage)))},
        "ours_with_width_ahead": {
            stage: {peer: told for peer in PEERS if (told := compared(("ours_width", stage), (peer, stage)))} for stage in SAID
        },
        "worth_of_teacher": {arm: told for arm in (*OURS, *PEERS) if (told := compared((arm, "teacher"), (arm, "text")))},
        "perplexity_above_control": control,
        "control": above(rows["unpruned", "text"], base[None], targets).as_json() if ("unpruned", "text") in rows else None,
        "speed": times_as_fast(folder, share, seeds),
        "reload": {arm: told for one in _measured(folder, share, seeds, "reload") for arm, told in one.items()},
    }


def _measured(folder: Path, share: int, seeds: list[int], what: str) -> list[Found]:
    """Shapes hardly depend on the seed: one's are enough. Arms that came later were measured in a run of their own."""
    return next((found for s in seeds if (found := [*map(read_json, sorted(folder.glob(f"{share}-{s}-{what}*.json")))])), [])


def times_as_fast(folder: Path, share: int, seeds: list[int]) -> Found:
    """Of each arm, how many times as fast as the unpruned model in the same run."""
    found: Found = {}
    for one in _measured(folder, share, seeds, "speed"):
        rates = {"reading": one["reading"]["tokens_per_second"], "writing": one["writing"]}
        for arm in (arm for arm in one["writing"] if arm != "unpruned"):
            found[arm] = {what: of[arm] / of["unpruned"] for what, of in rates.items()}
    return found


# Words ----------------------------------------------------------------------------------------------------------------


def answer(found: Found) -> str:
    """One sentence for each model and share."""
    said = []
    for model, of_model in found.items():
        for share in (key for key in of_model if key.isdigit()):
            for called, which in (("ours", "ours_ahead"), ("ours with width", "ours_with_width_ahead")):
                parts = [
                    f"{SAID[stage]} {words}" for stage, peers in of_model[share][which].items() if (words := told_of(peers))
                ]
                if parts:
                    said.append(f"{model}, −{share} %: {called} is " + "; ".join(parts) + ".")
    return " ".join(said)


def told_of(peers: Found) -> str:
    """Which peers are behind, ahead, or neither."""
    ways = (("ahead of", SUPPORTED), ("behind", NOT_SUPPORTED), ("not to be told from", UNDECIDED))
    found = [(how, [CALLED[peer] for peer, told in peers.items() if told["verdict"] == kind]) for how, kind in ways]
    return " and ".join(f"{how} {', '.join(names)}" for how, names in found if names)


def signed(found: Found | None) -> str:
    if found is None:
        return ""
    value, low, high = Estimate.from_json(found)
    return f"{value:+.2f}" if math.isnan(low) else f"{value:+.2f} ({low:.2f} to {high:.2f})"


def losses(of_share: Found) -> str:
    lines = ["| pruned by | parameters | right after | text learnt | with the teacher | LoRA, text |", "|---" * 6 + "|"]
    for arm, row in of_share["arms"].items():
        cells = [signed(row["above_unpruned"].get(stage)) for stage in STAGES]
        lines.append(f"| {CALLED[arm]} | {np.mean(row['parameters']) / 1e6:.2f}M | " + " | ".join(cells) + " |")
    if of_share["control"]:
        lines.append(f"| nothing, the control | | 0 | {signed(of_share['control'])} | | |")
    return "\n".join(lines)


def verdicts(of_share: Found, which: str = "ours_ahead", called: str = "ours") -> str:
    lines = [f"| {called} ahead of | " + " | ".join(SAID.values()) + " |", "|---" * (1 + len(SAID)) + "|"]
    for peer in (peer for peer in PEERS if peer in of_share["arms"]):
        told = [of_share[which][stage].get(peer) for stage in SAID]
        cells = [f"{one['verdict']}, {signed(one['ahead_by'])}" if one else "" for one in told]
        lines.append(f"| {CALLED[peer]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_width(of_share: Found) -> str:
    """Ours with width against ours without, then against the peers."""
    lines = verdicts(of_share, "ours_with_width_ahead", "ours with width").splitlines()
    told = [of_share["worth_of_width"].get(stage) for stage in SAID]
    cells = [f"{one['verdict']}, {signed(one['ahead_by'])}" if one else "" for one in told]
    return "\n".join([*lines[:2], "| ours | " + " | ".join(cells) + " |", *lines[2:]])


def costs(of_share: Found) -> str:
    lines = [
        "| | reading | writing | pruning took | transformers alone loads it | after `import pnn` |",
        "|---" * 6 + "|",
    ]
    speed, reload = of_share["speed"], of_share["reload"]
    for arm in (arm for arm in of_share["arms"] if arm in speed):
        times = [speed[arm]["reading"], speed[arm]["writing"]]
        loads = ["yes" if reload[arm][key] is None else "no" for key in ("transformers alone", "after import pnn")]
        seconds = np.mean(of_share["arms"][arm]["pruning_seconds"])
        lines.append(f"| {CALLED[arm]} | {times[0]:.2f} × | {times[1]:.2f} × | {seconds:.0f} s | " + " | ".join(loads) + " |")
    return "\n".join(lines)


def main() -> None:
    folders = sorted(path for path in (HERE / "measured").iterdir() if path.is_dir())
    for folder in folders:
        check_commit(folder)
    found = {folder.name: collected(folder) for folder in folders}
    seeds = sorted(
        {s for of in found.values() for key in of if key.isdigit() for a in of[key]["arms"].values() for s in a["seeds"]}
    )
    write_json(
        HERE / "result.json",
        {
            "question": "Is `pnn shrink` ahead of Torch-Pruning and of LLM-Pruner's recipe at the same number of parameters?",
            "protocol": "the same model, calibration rows and parameters left within 1 %; the same rows, updates and rate of "
            "learning afterwards, from the text and with the unpruned model as the teacher; nats per token on held-out rows, "
            "paired; intervals over rows, and over seeds where there are several",
            "seeds": seeds,
            "metrics": found,
            "answer": answer(found),
            "command": "results/shrink/peers/run.py MODEL TEXT measured/MODEL; results/shrink/peers/collect.py",
        },
    )
    page = (HERE / "README.md").read_text(encoding="utf-8")
    for model, of_model in found.items():  # what the page has a place for: not every run is worth all tables
        for share in (key for key in of_model if key.isdigit()):
            figure = f"figures/{model}-{share}.png"
            if figure in page:
                save(png(beside_peers(of_model[share], CALLED)), HERE / figure)
            tables = {"losses": losses, "verdicts": verdicts, "width": with_width, "costs": costs}
            for name, make in tables.items():
                place = f"{name} {model} {share}"
                if f"<!-- {place} -->" in page:
                    write_between(HERE / "README.md", place, make(of_model[share]))
    print(answer(found))


if __name__ == "__main__":
    main()
