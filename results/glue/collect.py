"""From pretrained and fine-tuned runs to measured/, result.json and the table of README.md.

python results/glue/collect.py [RUNS [FOLDER]]      # RUNS: folders MODEL (pretrained), MODEL-glue, MODEL-superglue to copy in

FOLDER has measured/, README.md and result.json; results/downstream is another one than this.
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
MODELS = {
    "pnn": "PNN",
    "pnn_tied": "PNN, tied head",
    "bert": "BERT, 12 layers",
    "pnn_rewrite": "PNN-rewrite",
    "bert4": "BERT-4",
    "bert12": "BERT-12",
}


def copy_in(runs: Path, measured: Path | None = None) -> None:
    for model in MODELS:
        run = runs / model
        if not (run / "evaluation.json").exists():
            continue
        config = read_config(run)
        data, sets = config.data, config.evaluation.sets
        places = {Path(data.tokenizer).parent: "DATA", Path(data.prepared).parent: "RUNS", runs: "RUNS"}
        tokens = {data.train: "TOKENS", **{one.source: "WIKITEXT" for one in sets.values()}}  # of runs that read shards
        paths = [run / name for name in ("config.yaml", "environment.json", "evaluation.json")]
        for benchmark in ("glue", "superglue"):
            tuned = runs / f"{model}-{benchmark}"
            paths += [*sorted(tuned.glob("*/result.json")), *sorted(tuned.glob("*/environment.json"))]
        for folder in {path.parent for path in paths if path.name in ("environment.json", "result.json")}:
            check_commit(folder)
        for path in paths:
            if path.exists():
                target = (measured or MEASURED) / path.relative_to(runs)
                target.parent.mkdir(parents=True, exist_ok=True)
                text = path.read_text(encoding="utf-8")
                for place, name in places.items():
                    if place != Path():  # with the slash: a folder called data must not rename the keys that are called so
                        text = text.replace(f"{place}/", f"{name}/")
                for whole, name in tokens.items():
                    text = text.replace(whole, name) if Path(whole).is_absolute() else text
                write_text(target, text)


def results(measured: Path | None = None) -> dict[str, dict[str, Any]]:
    """Every task's result by model. RTE is in both benchmarks with one training set: it counts once, as GLUE's."""
    found: dict[str, dict[str, Any]] = {}
    for model in MODELS:
        for benchmark in ("glue", "superglue"):
            for path in sorted(((measured or MEASURED) / f"{model}-{benchmark}").glob("*/result.json")):
                if path.parent.name != "superglue_rte":
                    found.setdefault(path.parent.name, {})[model] = read_json(path)
    return found


def present(found: dict[str, dict[str, Any]]) -> list[str]:
    return [model for model in MODELS if any(model in by_model for by_model in found.values())]


def table(found: dict[str, dict[str, Any]]) -> str:
    models = present(found)
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
    models = present(found)
    by_name = {task: by_model for task, by_model in found.items() if all(model in by_model for model in models)}
    tasks, fair = list(by_name.values()), [one for task, one in by_name.items() if task != "wnli"]  # see `table`
    if not tasks:
        return "no task has all models yet"
    highest = [max(one[model]["score"] for model in models) for one in tasks]  # of equals, each is best
    best = {m: sum(one[m]["score"] == top for one, top in zip(tasks, highest, strict=True)) for m in models}
    means = {model: 100 * sum(one[model]["score"] for one in tasks) / len(tasks) for model in models}
    ahead = {m: sum(one[m]["score_interval"][0] > one[m]["baselines"]["bag_of_words"]["score"] for one in fair) for m in models}
    told = [
        (f"{MODELS[m]} best on {best[m]}, mean" if len(models) > 1 else f"{MODELS[m]} has a mean of")
        + f" {means[m]:.1f} and is above a bag of words by more than its interval on {ahead[m]} of {len(fair)} (without wnli)"
        for m in models
    ]
    return f"of {len(tasks)} tasks: " + "; ".join(told)


def rates_tried(found: dict[str, dict[str, Any]]) -> str:
    """In words: how the learning rate came about."""
    tried = {len(one["learning_rates_tried"]) for by_model in found.values() for one in by_model.values()}
    return "one learning rate" if tried == {1} else "learning rate chosen on dev with the first seed"


def main() -> None:
    here = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE
    measured = here / "measured"
    if len(sys.argv) > 1:
        copy_in(Path(sys.argv[1]).resolve(), measured)
    found = results(measured)
    pretrained = {
        model: {key: read_json(measured / model / "evaluation.json")[key] for key in ("accuracy", "loss", "parameters")}
        for model in MODELS
        if (measured / model / "evaluation.json").exists()
    }
    write_json(
        here / "result.json",
        {
            "question": "What is an encoder that refines worth downstream, beside BERT at equal tokens?",
            "protocol": "pretrained on the same lines in the same order; dev sets; best of the epochs; "
            f"{rates_tried(found)}; mean over seeds",
            "pretrained": pretrained,
            "metrics": {
                task: {model: {key: one[key] for key in KEPT if key in one} for model, one in by_model.items()}
                for task, by_model in found.items()
            },
            "seeds": sorted(
                {seed["seed"] for by_model in found.values() for one in by_model.values() for seed in one["seeds"]}
            ),
            "answer": answer(found),
            "command": f"results/{here.resolve().name}/run.sh DATA RUNS; python results/glue/collect.py RUNS"
            + ("" if here == HERE else f" results/{here.resolve().name}"),
        },
    )
    write_between(here / "README.md", "table", table(found))
    write_between(here / "README.md", "steps", steps(found))
    print(table(found))


if __name__ == "__main__":
    main()
