"""From the folders that run.sh leaves to measured/, result.json, figures/ and the tables of README.md.

python results/plasticity_study/collect.py [RUNS]      # RUNS: copies in what is small; without it, from measured/ alone
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pnn.figures.plasticity import CYCLE_FIGURES
from pnn.figures.plasticity_study import STUDY_FIGURES
from pnn.figures.style import png, save
from pnn.files import write_between, write_json, write_text
from pnn.runs import check_commit, read_config, read_json, read_metrics
from pnn.studies.plasticity.findings import perplexity_of, rise_of
from pnn.studies.plasticity.study import collect

HERE = Path(__file__).parent
MEASURED = HERE / "measured"
STUDIES, CYCLES = ("study_llama", "study_distil", "study_small"), ("cycle_stories15M", "cycle_smollm2", "cycle_opt")
LONGER = {"control": "retrained, unpruned", "none": "nothing", "gradient": "by gradient", "random": "at random"}
PRETRAINED = ("gpt2_distil", "gpt2_small", "opt_350m")


def copy_in(runs: Path) -> None:
    """Results only: no weights, no claims of processes, no names of folders on the machine they come from."""
    clean = without_folders(runs)

    def copy(files: list[Path], folder: Path) -> None:
        check_commit(files[0].parent)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            write_text(folder / file.name, clean(file.read_text(encoding="utf-8")))

    for name in (one for one in STUDIES if (runs / one / "study.json").exists()):
        study, folder = runs / name, MEASURED / name
        copy([study / "plan.json", study / "environment.json"], folder)
        for part in ("models", "arms", "speed"):
            rows = {path.stem: read_json(path) for path in sorted((study / part).glob("*.json"))}
            lines = [json.dumps({"file": stem, **row}) + "\n" for stem, row in rows.items()]
            write_text(folder / f"{part}.jsonl", clean("".join(lines)))
    longer = tuple(sorted(path.name for path in runs.glob("longer_*") if path.is_dir()))
    for names, done, more in (
        (longer, "summary.json", ("environment.json",)),
        (CYCLES, "summary.json", ("metrics.jsonl", "environment.json")),
        (PRETRAINED, "evaluation.json", ("metrics.jsonl", "environment.json", "config.yaml")),
    ):
        for name in (one for one in names if (runs / one / done).exists()):
            copy([runs / name / file for file in (done, *more)], MEASURED / name)


def without_folders(runs: Path) -> Callable[[str], str]:
    """Puts RUNS and DATA in the place of the folders that were given to run.sh."""
    places = {str(runs.resolve()): "RUNS"}
    for name in (one for one in PRETRAINED if (runs / one / "config.yaml").exists()):
        data = read_config(runs / name).data
        places |= {str(Path(data.tokenizer).parent.parent): "DATA", str(Path(data.prepared).parent): "RUNS"}

    for name in (one for one in CYCLES if (runs / one / "summary.json").exists()):
        text = Path(read_json(runs / name / "summary.json")["dataset"])
        if text.is_absolute():
            places[str(text.parent.parent)] = "DATA"

    def clean(text: str) -> str:
        for place, name in places.items():
            text = text.replace(f"{place}/", f"{name}/")
        return text

    return clean


def unpacked(name: str, into: Path) -> Path:
    """A study's folder, as `collect` reads it."""
    folder = into / name
    for part in ("models", "arms", "speed"):
        (folder / part).mkdir(parents=True)
        for row in read_metrics(MEASURED / name / f"{part}.jsonl"):
            write_json(folder / part / f"{row.pop('file')}.json", row)
    shutil.copy(MEASURED / name / "plan.json", folder / "plan.json")
    return folder


def between(found: dict[str, Any], scale: float = 100, digits: int = 1) -> str:
    low, high = found["interval"]
    value = f"{scale * found['value']:+.{digits}f}"
    return value if low is None else f"{value} ({scale * low:+.{digits}f} to {scale * high:+.{digits}f})"


def verdicts(result: dict[str, Any]) -> str:
    findings, models = result["findings"], list(result["models"])
    lines = ["| the source says | verdict | " + " | ".join(models) + " |", "|---" * (2 + len(models)) + "|"]
    for name, found in findings.items():
        by_model = found["by_model"]
        cells = [by_model[model].get("verdict", "") for model in models]
        if name == "F0":
            stages = [[by_model[model]["by_ratio"][ratio]["after_learning"] for ratio in ("0.3", "0.5")] for model in models]
            rises = [[100 * stage["rise"]["value"] for stage in both] for both in stages]
            cells = [f"{cell}: {third:+.1f} %, at half {half:+.1f}" for cell, (third, half) in zip(cells, rises, strict=True)]
        if name == "F1":
            gains = (100 * by_model[model]["best_growth_gains"]["value"] for model in models)
            cells = [f"{cell}: the best growth gains {gain:.2f} points" for cell, gain in zip(cells, gains, strict=True)]
        if name == "F3":
            shares = (by_model[model]["share_that_can_go"] for model in models)
            cells = [f"{100 * share['value']:.0f} % can go" for share in shares]
        lines.append(f"| {name}: {found['claim']} | **{found['verdict']}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables(result: dict[str, Any]) -> str:
    """One for each question."""
    models, lines = list(result["models"]), []

    def add(title: str, first: str, rows: list[tuple[str, list[str]]]) -> None:
        lines.extend(["", title, "", f"| {first} | " + " | ".join(models) + " |", "|---" * (1 + len(models)) + "|"])
        lines.extend(f"| {label} | " + " | ".join(cells) + " |" for label, cells in rows)

    def rises(table: str, label: Callable[[dict[str, Any]], str]) -> list[tuple[str, list[str]]]:
        """How far each row of a table ends above the control."""
        rows = zip(*(result["tables"][model][table] for model in models), strict=True)
        return [(label(of_models[0]), [between(row["rise_over_control"]) for row in of_models]) for of_models in rows]

    first = result["tables"][models[0]]
    sizes = [(result["models"][m], result["tables"][m]["control"]) for m in models]
    add(
        "**The models**: perplexity before, and retrained without pruning (the control).",
        "",
        [
            ("parameters", [f"{before['parameters'] / 1e6:.1f}M" for before, _ in sizes]),
            ("heads", [str(before["heads"]) for before, _ in sizes]),
            ("before", [f"{before['perplexity']:.2f}" for before, _ in sizes]),
            ("retrained", [f"{control['perplexity']['value']:.2f}" for _, control in sizes]),
        ],
    )
    add(
        "**Pruning alone**: perplexity above the control's after learning, per cent (95 % over seeds, paired).",
        "pruned by, share",
        rises("pruning", lambda row: f"{row['prune_by']}, {100 * row['prune']:g} %"),
    )
    add(
        "**Growth**, prune 30 %, grow 10 %: the same.",
        "grown by",
        rises("growth", lambda row: row["grow_by"]),
    )
    add("**New heads' learning rate**: the same.", "times", rises("multipliers", lambda row: f"{row['multiplier']:g}"))
    add(
        "**Ratios**, by gradient: perplexity above the control's; heads and parameters of the whole model that are gone.",
        "pruned, grown",
        [
            (
                f"{100 * row['prune']:g} %, {100 * row['grow']:g} %",
                [ratio_cell(result["tables"][m]["ratios"][at]) for m in models],
            )
            for at, row in enumerate(first["ratios"])
        ],
    )
    if all_timed(result):
        shape = result["speed"][models[0]]["rows"][-1]
        device = result["speed"][models[0]]["device"]
        timed = [arm for arm in shape["tokens_per_second"] if arm != first["control"]["arm"]]
        add(
            f"**Speed** of reading {shape['batch']} × {shape['length']} tokens ({device}), times the whole model's.",
            "arm",
            [(arm, [f"{speed_of(result, model, arm):.2f}" for model in models]) for arm in timed],
        )
    return "\n".join(lines)


def all_timed(result: dict[str, Any]) -> bool:
    return all(model in result["speed"] for model in result["models"])


def ratio_cell(row: dict[str, Any]) -> str:
    fewer = row["fewer"]
    return f"{between(row['rise_over_control'])}; {100 * fewer['heads']:.0f} % and {100 * fewer['parameters']:.1f} %"


def speed_of(result: dict[str, Any], model: str, arm: str) -> float:
    rates = result["speed"][model]["rows"][-1]["tokens_per_second"]
    return rates[arm] / rates[result["tables"][model]["control"]["arm"]]


def hardware(name: str) -> str:
    found = read_json(MEASURED / name / "environment.json")["hardware"]
    return found["gpus"][0] if found["gpus"] else f"{found['cores']} CPU cores"


def cycles() -> str:
    lines = ["| cycle | on | heads | parameters | perplexity before → pruned → after | tokens read/s |", "|---" * 6 + "|"]
    for name in (one for one in CYCLES if (MEASURED / one).exists()):
        summary, records = read_json(MEASURED / name / "summary.json"), read_metrics(MEASURED / name / "metrics.jsonl")
        before, after, speed = summary["initial"], summary["final"], summary["speed"][-1]
        pruned = next(record for record in records if record["phase"] == "measurement")["perplexity"]
        rates = speed["tokens_per_second"]
        cells = [
            summary["model_name"],
            hardware(name),
            f"{before['heads']} → {after['heads']}",
            f"{before['parameters'] / 1e6:.1f}M → {after['parameters'] / 1e6:.1f}M",
            f"{before['perplexity']:.2f} → {pruned:.2f} → {after['perplexity']:.2f}",
            f"{rates['initial']:,.0f} → {rates['final']:,.0f} ({speed['batch']} × {speed['length']})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        for figure, draw in CYCLE_FIGURES.items():
            save(png(draw(records)), HERE / "figures" / f"{name}_{figure}.png")
    return "\n".join(lines)


def longer() -> str:
    """Perplexity after ten times the updates; differences to growing nothing, paired by seed."""

    def losses(kind: str) -> dict[str, float]:
        paths = MEASURED.glob(f"longer_{kind}_*")
        return {path.name: math.log(read_json(path / "summary.json")["final"]["perplexity"]) for path in paths}

    found = {kind: {name.rsplit("_", 1)[1]: loss for name, loss in losses(kind).items()} for kind in LONGER}
    seeds = sorted(set.intersection(*map(set, found.values())))  # a cycle that is missing takes its seed with it
    lines = [f"| grown ({len(seeds)} seeds) | perplexity | against growing nothing, per cent |", "|---|---|---|"]
    for kind, label in LONGER.items() if seeds else ():
        against = "" if kind == "none" else between(rise_of([found[kind][one] - found["none"][one] for one in seeds]))
        lines.append(f"| {label} | {perplexity_of([found[kind][one] for one in seeds])['value']:.3f} | {against} |")
    return "\n".join(lines)


def studies(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = collect(*(unpacked(name, Path(folder)) for name in names))
    settings = result["settings"]
    write_json(
        HERE / "result.json",
        {
            "question": "Which of the source's findings about the plasticity cycle hold?",
            "protocol": f"{settings['learn_steps']} updates of {settings['batch_rows']} rows for every arm, "
            f"{settings['seeds']} seeds (orders of the text), heads scored on {settings['score_rows']} rows; held-out "
            "perplexity by token; differences paired by seed; the control is retrained as long and not pruned",
            "seeds": list(range(settings["seeds"])),
            "metrics": result,
            "answer": " ".join(f"{name} ({found['claim']}): {found['verdict']}." for name, found in result["findings"].items()),
            "command": "results/plasticity_study/run.sh DATA RUNS; python results/plasticity_study/collect.py RUNS",
        },
    )
    for name, draw in STUDY_FIGURES.items():
        if name == "pareto" and not all_timed(result):
            continue
        save(png(draw(result)), HERE / "figures" / f"{name}.png")
    write_between(HERE / "README.md", "verdicts", verdicts(result))
    write_between(HERE / "README.md", "tables", tables(result))


def main() -> None:
    if len(sys.argv) > 1:
        copy_in(Path(sys.argv[1]))
    there = [name for name in STUDIES if (MEASURED / name).exists()]
    if there:
        studies(there)
    write_between(HERE / "README.md", "cycles", cycles())
    if any(MEASURED.glob("longer_*")):
        write_between(HERE / "README.md", "longer", longer())


if __name__ == "__main__":
    main()
