"""From pretrained and fine-tuned runs to measured/, result.json and the table of README.md.

python results/glue/collect.py [RUNS]      # RUNS: folders MODEL (pretrained), MODEL-glue, MODEL-superglue to copy in
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pnn.files import write_between, write_json, write_text
from pnn.runs import check_commit, read_config, read_json

HERE = Path(__file__).parent
KEPT = ("score", "score_interval", "score_std", "learning_rate", "score_by_step", "baselines")
MEASURED = HERE / "measured"
MODELS = {"pnn": "PNN", "pnn_tied": "PNN, tied head", "bert": "BERT, 12 layers"}


def copy_in(runs: Path) -> None:
    for model in MODELS:
        run = runs / model
        if not (run / "evaluation.json").exists():
            continue
        data = read_config(run).data
        places = {Path(data.tokenizer).parent: "DATA", Path(data.prepared).parent: "RUNS", runs: "RUNS"}
        paths = [run / name for name in ("config.yaml", "environment.json", "evaluation.json")]
        for benchmark in ("glue", "superglue"):
            tuned = runs / f"{model}-{benchmark}"
            paths += [tuned / "results.json", *sorted(tuned.glob("*/result.json")), *sorted(tuned.glob("*/environment.json"))]
        for folder in {path.parent for path in paths if path.name in ("environment.json", "result.json")}:
            check_commit(folder)
        for path in paths:
            if path.exists():
                target = MEASURED / path.relative_to(runs)
                target.parent.mkdir(parents=True, exist_ok=True)
                text = path.read_text(encoding="utf-8")
                for place, name in places.items():
                    if place != Path():  # with the slash: a folder called data must not rename the keys that are called so
                        text = text.replace(f"{place}/", f"{name}/")
                write_text(target, text)


def results() -> dict[str, dict[str, Any]]:
    """Every task's result by model. RTE is in both benchmarks with one training set: it counts once, as GLUE's."""
    found: dict[str, dict[str, Any]] = {}
    for model in MODELS:
        for benchmark in ("glue", "superglue"):
            for path in sorted((MEASURED / f"{model}-{benchmark}").glob("*/result.json")):
                if path.parent.name != "superglue_rte":
                    found.setdefault(path.parent.name, {})[model] = read_json(path)
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    models = [model for model in MODELS if any(model in by_model for by_model in found.values())]
    lines = ["| task | metric | examples | majority | bag of words | " + " | ".join(MODELS[model] for model in models) + " |"]
    lines.append("|---" * (5 + len(models)) + "|")
    for task, by_model in found.items():
        one = next(iter(by_model.values()))
        cells = [_cell(by_model.get(model)) for model in models]
        examples, baselines = one["data"]["examples"]["train"], one["baselines"]
        known = [f"{100 * baselines[name]['score']:.1f}" for name in ("majority", "bag_of_words")]
        metric = one["score_is"].removeprefix("dev ").removeprefix("mean of ")
        lines.append(f"| {task} | {metric} | {examples:,} | {' | '.join(known)} | {' | '.join(cells)} |")
    whole = [task for task, by_model in found.items() if all(model in by_model for model in models)]
    for task in found.keys() - set(whole):
        print(f"{task} lacks a model: it counts in no mean", file=sys.stderr)
    # WNLI's dev sentences contradict its training sentences: below the majority is where learning leads
    means_of = {"": whole, ", without wnli": [task for task in whole if task != "wnli"]}
    for which, tasks in means_of.items():
        if not tasks:
            continue
        means = [sum(found[task][model]["score"] for task in tasks) / len(tasks) for model in models]
        names = ("majority", "bag_of_words")
        firsts = [next(iter(found[task].values()))["baselines"] for task in tasks]
        known = [sum(one[name]["score"] for one in firsts) / len(tasks) for name in names]
        row = " | ".join(f"{100 * value:.1f}" for value in (*known, *means))
        lines.append(f"| **mean of {len(tasks)}{which}** | | | {row} |")
    return "\n".join(lines)


def steps(found: dict[str, dict[str, Any]]) -> str:
    """What a refining model scores when it stops after fewer steps than it was fine-tuned with."""
    lines = []
    for model, name in MODELS.items():
        by_task = {task: one[model]["score_by_step"] for task, one in found.items() if "score_by_step" in one.get(model, {})}
        if by_task:
            count = len(next(iter(by_task.values())))
            lines += ["", f"| {name}, steps | " + " | ".join(map(str, range(count))) + " |", "|---" * (1 + count) + "|"]
            lines += [f"| {task} | " + " | ".join(f"{100 * score:.1f}" for score in by_task[task]) + " |" for task in by_task]
            means = [sum(scores) / len(by_task) for scores in zip(*by_task.values(), strict=True)]
            lines.append("| **mean** | " + " | ".join(f"{100 * score:.1f}" for score in means) + " |")
    return "\n".join(lines)


def _cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return ""
    low, high = one["score_interval"]
    seeds = "" if one["score_std"] is None else f" ± {100 * one['score_std']:.1f}"
    return f"{100 * one['score']:.1f}{seeds} ({100 * low:.1f}–{100 * high:.1f})"


def answer(found: dict[str, dict[str, Any]]) -> str:
    """One sentence: who is ahead on how many tasks, and by how much on average."""
    tasks = [by_model for by_model in found.values() if all(model in by_model for model in MODELS)]
    if not tasks:
        return "no task has all models yet"
    best = {model: sum(max(one, key=lambda name: one[name]["score"]) == model for one in tasks) for model in MODELS}
    means = {model: 100 * sum(one[model]["score"] for one in tasks) / len(tasks) for model in MODELS}
    return f"of {len(tasks)} tasks: " + ", ".join(f"{MODELS[m]} best on {best[m]}, mean {means[m]:.1f}" for m in MODELS)


def main() -> None:
    if len(sys.argv) > 1:
        copy_in(Path(sys.argv[1]).resolve())
    found = results()
    pretrained = {
        model: {key: read_json(MEASURED / model / "evaluation.json")[key] for key in ("accuracy", "loss", "parameters")}
        for model in MODELS
        if (MEASURED / model / "evaluation.json").exists()
    }
    write_json(
        HERE / "result.json",
        {
            "question": "What is an encoder that refines worth downstream, beside BERT at equal tokens?",
            "protocol": "pretrained on the same lines in the same order; dev sets; best of the epochs; learning rate chosen "
            "on dev with the first seed; mean over seeds",
            "pretrained": pretrained,
            "metrics": {
                task: {model: {key: one[key] for key in KEPT if key in one} for model, one in by_model.items()}
                for task, by_model in found.items()
            },
            "seeds": sorted(
                {seed["seed"] for by_model in found.values() for one in by_model.values() for seed in one["seeds"]}
            ),
            "answer": answer(found),
            "command": "results/glue/run.sh DATA RUNS; python results/glue/collect.py RUNS",
        },
    )
    write_between(HERE / "README.md", "table", table(found))
    write_between(HERE / "README.md", "steps", steps(found))
    print(table(found))


if __name__ == "__main__":
    main()
