"""Fine-tune a model on tasks: a sweep over learning rates, several seeds, baselines, and a folder for each task.

    runs/<name>/results.json              a row a task
    runs/<name>/cola/  finetune.json      what was asked for: model, settings, data
                       environment.json   versions, hardware, time
                       metrics.jsonl      a line an epoch
                       result.json        the dev metrics of every seed, intervals, baselines, accuracy after every step
                       checkpoints/best/  the best seed's best epoch
                       predictions/       its predictions of the test sets, as the benchmark's server takes them

A task's folder appears when the task is done, whole. Tasks that are done are kept when the same command runs again. The
learning rate is chosen on dev with the first seed; dev also chooses the epoch, so its metrics are a little better than a test
set's would be.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from pnn.errors import UserError
from pnn.files import new_folder, sha256, write_checksums, write_json, write_text
from pnn.finetuning import classifiers
from pnn.finetuning.baselines import baselines
from pnn.finetuning.encoding import Encoded, encode
from pnn.finetuning.examples import TaskData, find_folder, read_hub, read_local
from pnn.finetuning.loop import Plan, Tuned, as_set, decide, fine_tune, metrics_by_step, outputs, predicted
from pnn.finetuning.metrics import Metrics, interval, measure_sets, score
from pnn.finetuning.submission import write_submission
from pnn.finetuning.tasks import TASKS, Task, parse_tasks
from pnn.memory import out_of_memory_says
from pnn.models.precision import learns_in, width_of
from pnn.models.registry import kind_of
from pnn.progress import Bars, say
from pnn.results import TunedSteps, TunedTask
from pnn.runs import find_checkpoint, read_json
from pnn.training.tracking import environment


@dataclass(frozen=True)
class Settings:
    learning_rates: tuple[float, ...] = (3e-5,)
    epochs: int = 3
    batch_size: int = 32
    seeds: int = 1
    steps: int | None = None  # refinement steps of a PNN, if not as pretrained
    limit: int | None = None  # only the first so many examples of each set
    every_step: bool = False  # learn after every step of a PNN

    def __post_init__(self) -> None:
        if not self.learning_rates or not all(0 < rate < 1 for rate in self.learning_rates):
            raise UserError(
                "--learning-rates: expected numbers above 0 and below 1 separated by commas, such as 2e-5,3e-5,5e-5"
            )

    def as_asked(self) -> dict[str, Any]:
        """As finetune.json keeps it: folders from before `every_step` are still the same fine-tuning."""
        kept = asdict(self) | {"learning_rates": list(self.learning_rates)}
        return {key: value for key, value in kept.items() if key != "every_step" or value}


@dataclass(frozen=True)
class Subject:
    """The model that is fine-tuned, before it has a head."""

    name: str
    checkpoint: Path | str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerFast
    max_length: int

    @cached_property
    def weights(self) -> str | None:
        """What tells two models of one name apart."""
        files = sorted(Path(self.checkpoint).glob("model*.safetensors"))  # one, or several with an index
        return "+".join(map(sha256, files)) or None


def parse_rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise UserError(f"--learning-rates {text}: expected numbers separated by commas, such as 2e-5,3e-5,5e-5") from None


def finetune(
    model: str, tasks: str, data: Path | None, output: Path, settings: Settings, quiet: bool = False
) -> dict[str, Any]:
    """Returns what results.json holds."""
    names, is_group = parse_tasks(tasks)
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file: choose another --output")
    checkpoint = find_checkpoint(model)
    config = classifiers.read_config(checkpoint, settings.steps)
    if settings.every_step and not (kind_of(config).has_steps and kind_of(config).masked):
        raise UserError(f"--every-step: a {config.model_type} model has no refinement steps to learn after")
    tokenizer, longest = classifiers.read_tokenizer(checkpoint, config)
    name = Path(model).name if Path(model).exists() else model
    subject = Subject(name, checkpoint, config, tokenizer, longest)
    _check_same_model(output, subject)
    if is_group and data is not None:
        names = _present(names, data)
    # all are read before one is trained: a mistake in the last task's file is told at once
    found = {task: read_hub(TASKS[task]) if data is None else read_local(TASKS[task], data) for task in names}
    asked = {
        task: {
            "model": name,
            "weights": subject.weights,
            "task": task,
            "settings": settings.as_asked(),
            "data": {"source": one.source, "checksums": one.checksums},
        }
        for task, one in found.items()
    }
    done = [task for task in names if _is_done(output / task, asked[task])]
    for task in names:
        if task in done:
            say(f"{task}: done already, kept")
            continue
        with out_of_memory_says(
            lambda: f"with batches of {settings.batch_size}: --batch-size {max(1, settings.batch_size // 2)} helps"
        ):
            kept = asked[task] | ({} if data is None else {"files": str(data.resolve())})  # where pnn calibrate looks again
            _one_task(subject, _cut(found[task], settings.limit), output / task, kept, settings, quiet)
        summarise(output)  # what is done counts, whatever comes
    return summarise(output)


def _check_same_model(output: Path, subject: Subject) -> None:
    """One folder, one model: its results.json is a table of tasks."""
    for name in TASKS:
        held = output / name / "finetune.json"
        if held.exists() and (before := read_json(held)).get("weights") != subject.weights:
            raise UserError(f"{output} holds fine-tunings of another model ({before.get('model')}): choose another --output")


def _present(names: list[str], data: Path) -> list[str]:
    """Of a group, the tasks that can be fine-tuned: those with a training set."""
    present = []
    for name in names:
        folder = find_folder(TASKS[name], data)
        has_train = folder is not None and any((folder / file).exists() for file in (TASKS[name].train, "train_text.jsonl"))
        if has_train:
            present.append(name)
        else:
            say(f"{name}: left out, {data} has no training set for it")
    if not present:
        raise UserError(f"--data {data}: no task's training set in it (looked for CoLA/train.tsv, BoolQ/train.jsonl, …)")
    return present


def _is_done(folder: Path, asked: dict[str, Any]) -> bool:
    if not folder.exists():
        return False
    if not (folder / "finetune.json").exists() or not (folder / "result.json").exists():
        raise UserError(f"{folder} exists and is not a finished fine-tuning: choose another --output")
    before = read_json(folder / "finetune.json")
    for key, now in asked.items():
        if before.get(key) != now:
            raise UserError(f"{folder} holds another fine-tuning ({key} differs): choose another --output")
    return True


def _cut(data: TaskData, limit: int | None) -> TaskData:
    """Without the test sets: a submission that lacks answers is refused."""
    if limit is None:
        return data
    return replace(
        data,
        train=data.train[:limit],
        dev={name: examples[:limit] for name, examples in data.dev.items()},
        tests={},
    )


def _one_task(subject: Subject, data: TaskData, folder: Path, asked: dict[str, Any], settings: Settings, quiet: bool) -> None:
    started = time.monotonic()
    task = data.task

    def encoded(examples: list[Any]) -> Encoded:
        types = classifiers.has_token_types(subject.config)
        return encode(task, examples, subject.tokenizer, subject.max_length, types)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dev = {name: encoded(examples) for name, examples in data.dev.items()}
    if any(len(one if one.units is None else np.unique(one.units)) < 2 for one in dev.values()):
        raise UserError(f"{task.name}: the dev set has one example or passage, and an interval needs two: raise --limit")
    tests = {name: encoded(examples) for name, examples in data.tests.items()}
    plan = Plan(
        task,
        train=encoded(data.train),
        dev=dev,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        pad=subject.tokenizer.pad_token_id,
        max_length=subject.max_length,
        device=device,
        precision=learns_in(device, width_of(subject.config)),
        every_step=settings.every_step,
    )
    tuned, tried, model = _sweep_and_seeds(subject, plan, settings, quiet)
    best = max(tuned, key=lambda one: one.score)  # the first of equals
    by_seed, by_step = [], []
    for one in tuned:
        model.load_state_dict(one.weights)
        by_seed.append(predicted(model, plan, plan.dev))
        if kind_of(subject.config).has_steps and kind_of(subject.config).masked:
            by_step.append(metrics_by_step(model, plan))
    model.load_state_dict(best.weights)

    result = _result(subject, data, plan, tests, model, best, tuned, tried, by_seed, by_step)
    with new_folder(folder) as partial:
        write_json(partial / "finetune.json", asked)
        lines = [{"learning_rate": one.learning_rate, "seed": one.seed, **epoch} for one in tried for epoch in one.epochs]
        write_text(partial / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        for name, examples in data.tests.items():
            logits = outputs(model, plan, tests[name])[-1]
            write_submission(partial / "predictions", name, task, examples, decide(task, logits).tolist())
        checkpoint = partial / "checkpoints" / "best"
        model.save_pretrained(checkpoint)
        subject.tokenizer.save_pretrained(checkpoint)
        write_checksums(checkpoint)
        write_json(partial / "result.json", result)
        seconds = round(time.monotonic() - started, 1)
        write_json(partial / "environment.json", environment(0, 1) | {"seeds": settings.seeds, "seconds": seconds})


def _sweep_and_seeds(
    subject: Subject, plan: Plan, settings: Settings, quiet: bool
) -> tuple[list[Tuned], list[Tuned], PreTrainedModel]:
    """The fine-tuning of every seed at the chosen learning rate; all that were tried, in their order; and a model."""
    task, total = plan.task, plan.updates
    work = [(rate, 0) for rate in settings.learning_rates]
    everything = total * (len(work) + settings.seeds - 1)
    tried: list[Tuned] = []
    with Bars({task.name: everything}, quiet) as bars:

        def one(rate: float, seed: int) -> PreTrainedModel:
            before, what = total * len(tried), f"seed {seed}, rate {rate:g}, "
            model = classifiers.load_classifier(subject.checkpoint, subject.config, task, subject.tokenizer, seed)
            tried.append(
                fine_tune(model, plan, rate, seed, lambda done, note: bars.update(task.name, before + done, what + note))
            )
            return model

        for rate, seed in work:
            model = one(rate, seed)
        first = max(tried, key=lambda run: run.score)
        for other in tried:
            if other is not first:
                other.weights = {}  # not needed again
        tuned = [first]
        for seed in range(1, settings.seeds):
            model = one(first.learning_rate, seed)
            tuned.append(tried[-1])
    return tuned, tried, model


def _result(
    subject: Subject,
    data: TaskData,
    plan: Plan,
    tests: dict[str, Encoded],
    model: PreTrainedModel,
    best: Tuned,
    tuned: list[Tuned],
    tried: list[Tuned],
    by_seed: list[dict[str, dict[str, Any]]],
    by_step: list[list[Metrics]],
) -> TunedTask:
    task: Task = data.task
    sets = {"train": plan.train, **plan.dev, **tests}
    metrics = [measure_sets(task, one) for one in by_seed]
    scores = [score(one) for one in metrics]
    blank = {name: as_set(one, np.zeros(len(one))) for name, one in plan.dev.items()}
    steps: TunedSteps = {}
    if by_step:
        names, count = list(metrics[0]), len(by_step[0])
        steps["by_step"] = {
            name: [float(np.mean([seed[step][name] for seed in by_step])) for step in range(count)] for name in names
        }
        steps["score_by_step"] = [float(np.mean([score(seed[step]) for seed in by_step])) for step in range(count)]
    return {
        "task": task.name,
        "benchmark": task.benchmark,
        "model": {
            "name": subject.name,
            "model_type": subject.config.model_type,
            "parameters": sum(p.numel() for p in model.parameters()),
            "precision": "bf16" if plan.precision == torch.bfloat16 else "fp32",
        },
        "score": float(np.mean(scores)),
        "score_is": "dev " + (next(iter(metrics[0])) if len(metrics[0]) == 1 else f"mean of {', '.join(metrics[0])}"),
        "score_interval": interval(task, by_seed),
        "score_std": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        "metrics": {name: float(np.mean([one[name] for one in metrics])) for name in metrics[0]},
        **steps,
        "baselines": {name: {**one, "score": score(one)} for name, one in baselines(data, blank).items()},
        "learning_rate": best.learning_rate,
        "learning_rates_tried": [{"learning_rate": one.learning_rate, "score": one.score} for one in tried if one.seed == 0],
        "seeds": [{"seed": one.seed, "best_epoch": one.best_epoch, "score": one.score, **one.metrics} for one in tuned],
        "checkpoint": {"seed": best.seed, "epoch": best.best_epoch},
        "settings": {
            "epochs": plan.epochs,
            "batch_size": plan.batch_size,
            "max_length": plan.max_length,
            **({"num_steps": subject.config.num_steps} if kind_of(subject.config).has_steps else {}),
            **({"every_step": True} if plan.every_step else {}),
        },
        "data": {
            "source": data.source,
            "examples": {name: len(one) for name, one in sets.items()},
            "truncated": {name: one.truncated for name, one in sets.items()},
            "unknown_tokens": plan.train.unknown / plan.train.tokens,
            **({"broken_lines_left_out": data.broken_lines} if data.broken_lines else {}),
        },
    }


def summarise(output: Path) -> dict[str, Any]:
    """A row for every task that is done, into results.json."""
    results: dict[str, TunedTask] = {
        name: read_json(output / name / "result.json") for name in TASKS if (output / name / "result.json").exists()
    }
    rows = {
        name: {
            "score": one["score"],
            "score_is": one["score_is"],
            "score_interval": one["score_interval"],
            "score_std": one["score_std"],
            "seeds": len(one["seeds"]),
            "metrics": one["metrics"],
            **({"score_by_step": one["score_by_step"]} if "score_by_step" in one else {}),
            **({"every_step": True} if one["settings"].get("every_step") else {}),
            "majority": one["baselines"]["majority"]["score"],
            "bag_of_words": one["baselines"]["bag_of_words"]["score"],
            "learning_rate": one["learning_rate"],
            "precision": one["model"]["precision"],  # other CPUs may have gone on with the folder
            "unknown_tokens": one["data"]["unknown_tokens"],
            "truncated": sum(one["data"]["truncated"].values()),
        }
        for name, one in results.items()
    }
    summary = {"model": next(iter(results.values()))["model"], "tasks": rows}
    write_json(output / "results.json", summary)
    return summary
