"""Decoders on the eight multiple-choice tasks of the Deep Delta Learning paper, through lm-eval.

    answer = argmax over choices of log p(choice | prompt)                          acc
             argmax over choices of log p(choice | prompt) / bytes of the choice    acc_norm

Prompts and scoring are lm-eval's, by its own task definitions and its `HFLM`; we hand it the model, say where documents come
from (`task_files`) and, for our own models, compute what it asks for (`requests`). The paper does not say which of the two it
reports: tables show acc_norm, and acc for Social IQA and WinoGrande, where lm-eval has no other; results hold both.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn import runs
from pnn.data.tokenizers import end_of_text
from pnn.errors import UserError, first_line
from pnn.evaluation.reading import smaller_batches
from pnn.evaluation.requests import log_likelihoods
from pnn.evaluation.task_files import TASKS, check_names, read_documents, write_tasks
from pnn.files import write_json
from pnn.memory import out_of_memory_says
from pnn.models.loading import load_decoder, longest_input
from pnn.models.precision import gpu_has_bf16
from pnn.models.registry import kind_of
from pnn.progress import console, say
from pnn.results import TaskRow, Tasks, TasksAtShots, TaskScore

SEQUENCES_ON_CPU, SEQUENCES_ON_GPU = 8, 64  # of a batch; lm-eval sorts by length


def parse_tasks(names: str) -> list[str]:
    """`all`, or names with commas between them."""
    chosen = list(TASKS) if names.strip() == "all" else [name.strip() for name in names.split(",")]
    check_names(chosen)
    return list(dict.fromkeys(chosen))


def parse_shots(shots: str) -> list[int]:
    numbers = [number.strip() for number in shots.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise UserError(f"--shots {shots}: expected numbers of examples separated by commas, such as 0,1")
    return list(dict.fromkeys(map(int, numbers)))


def evaluate_run_on_tasks(
    run: str | Path,
    *,
    tasks: Sequence[str],
    shots: Sequence[int],
    local: Path | None = None,
    limit: int | None = None,
    batch_tokens: int | None = None,
    device: str | None = None,
) -> Tasks:
    """RUN's best checkpoint on `tasks`, with each number of examples in `shots`. A run folder keeps the result in its
    evaluation.json, under `tasks`, beside what is there; with a limit it is only returned, as a trial."""
    _check_installed()
    checkpoint = runs.find_checkpoint(run)
    folder = runs.run_of(checkpoint)
    kept = folder is not None and Path(run).resolve() == folder and limit is None
    held = folder / "evaluation.json" if folder is not None and kept else None
    if held is not None and not held.exists():
        command = f"pnn evaluate {shlex.quote(str(folder))}"
        raise UserError(f"{folder} has no evaluation.json: let its training finish, or run `{command}` first")
    _read_held(held)  # what is wrong with it or with the task files shows before hours of work
    if local is not None:
        for name in tasks:
            read_documents(local, name, max(shots))
    loaded = load_decoder(run, device=device)
    model, tokenizer = loaded.model, loaded.tokenizer
    device = model.device.type
    longest = longest_input(model)
    batch_size = _batch_size(device) if batch_tokens is None else max(1, batch_tokens // longest)
    by_shots = {}
    for number in shots:
        say(f"{number}-shot: {', '.join(tasks)}")
        with out_of_memory_says(lambda: smaller_batches("evaluate", run, tokens=batch_size * longest)):
            by_shots[str(number)] = evaluate_tasks(
                model, tokenizer, tasks, number, local=local, limit=limit, batch_size=batch_size, device=device
            )
    result: Tasks = {
        "checkpoint": Path(checkpoint).name,
        "model_type": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "precision": _precision(model, device),
        "shots": by_shots,
    }
    if held is not None:
        before = _read_held(held)
        write_json(held, before | {"tasks": _joined(before.get("tasks", {}), result)})
    return result


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Sequence[str],
    num_fewshot: int,
    *,
    local: Path | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
) -> TasksAtShots:
    """Accuracy with its standard error on each of `tasks`, after `num_fewshot` examples in the prompt, and the average.
    Documents come from the hub or from the folder `local`; `limit` takes the first so many of each task."""
    check_names(tasks)
    _check_installed()
    import lm_eval.tasks
    from lm_eval.models.huggingface import HFLM

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    definitions = Path(lm_eval.tasks.__file__).parent
    bf16 = {"mixed_precision_dtype": "bfloat16"} if gpu_has_bf16(device) else {}
    # sums of log-probabilities need more than 16 bits
    settings: dict[str, Any] = {"max_length": longest_input(model), **bf16, "softmax_dtype": "float32"}
    same = f"dtype={str(model.dtype).removeprefix('torch.')}," + ",".join(f"{key}={value}" for key, value in settings.items())
    if tokenizer.eos_token_id is None:  # made from a corpus: lm-eval asks for an end of text, and would frame prompts as lines
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_of_text(tokenizer))
        settings["add_bos_token"] = False
        same = ""  # its own command cannot read such a tokenizer
    was_training, used_cache = model.training, getattr(model.config, "use_cache", None)
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        if local is None:
            folders = sorted({str((definitions / TASKS[name].definition).parent) for name in tasks})
        else:
            write_tasks(local, definitions, tasks, num_fewshot, Path(scratch))
            folders = [scratch]
        manager = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
        try:
            model.config.use_cache = False  # nothing is generated
            lm = HFLM(
                pretrained=model.to(device),
                tokenizer=tokenizer,
                backend="causal",
                batch_size=batch_size or _batch_size(device),
                **settings,
            )
            if kind_of(model).ours:
                lm._loglikelihood_tokens = partial(log_likelihoods, lm)
            measured = lm_eval.simple_evaluate(
                model=lm, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
            )
        except OSError as error:
            if local is not None:
                raise
            raise UserError(
                f"cannot get the tasks' documents from the hub ({first_line(error)}): give them with --task-files"
            ) from error
        finally:
            model.config.use_cache = used_cache
            model.train(was_training)
    rows = {name: _row(name, num_fewshot, measured) for name in tasks}
    return {
        "shots": num_fewshot,
        "protocol": _protocol(lm_eval.__version__, num_fewshot, local, limit, same),
        "limit": limit,
        "tasks": rows,
        "average": _average(rows),
    }


def _joined(before: Tasks, result: Tasks) -> Tasks:
    """The result, and what was measured before of the same checkpoint: other numbers of examples, and by the same protocol
    other tasks."""
    if any(before.get(key) != result.get(key) for key in ("checkpoint", "parameters", "precision")):
        return result
    shots = before["shots"] | result["shots"]
    for number in before["shots"].keys() & result["shots"].keys():
        old, new = before["shots"][number], result["shots"][number]
        if old["protocol"] == new["protocol"]:
            rows = old["tasks"] | new["tasks"]
            shots[number] = {**new, "tasks": rows, "average": _average(rows)}
    return {**result, "shots": shots}


def _row(name: str, num_fewshot: int, measured: dict[str, Any]) -> TaskRow:
    scores = measured["results"][name]
    found: dict[str, TaskScore] = {}
    for metric in ("acc", "acc_norm"):
        if f"{metric},none" in scores:
            error = scores[f"{metric}_stderr,none"]  # "N/A" for a single document
            found[metric] = {
                "accuracy": scores[f"{metric},none"],
                "standard_error": error if isinstance(error, float) else None,
            }
    metric = TASKS[name].metric
    count = measured["n-samples"][name]["effective"]
    return {**found[metric], "metric": metric, "documents": count, "shots": num_fewshot, "by_metric": found}


def _average(rows: dict[str, TaskRow]) -> TaskScore:
    """Every task counts alike. The error is that of drawing other documents, independently for each task."""
    errors = [row["standard_error"] for row in rows.values()]
    known = [error for error in errors if error is not None]
    return {
        "accuracy": sum(row["accuracy"] for row in rows.values()) / len(rows),
        "standard_error": math.hypot(*known) / len(rows) if len(known) == len(rows) else None,
    }


def _protocol(version: str, num_fewshot: int, local: Path | None, limit: int | None, model_args: str) -> str:
    whence = "the hub" if local is None else f"files in {local}"
    sentences = [f"lm-eval {version}, {num_fewshot}-shot; its own prompts and scoring; documents from {whence}."]
    if num_fewshot and local is None:
        sentences.append("Examples are drawn from the training split, as lm-eval does.")
    elif num_fewshot:
        sentences.append(
            "There is no training split: examples are drawn from the documents that are evaluated, never the one that is asked."
        )
    if limit is not None:
        sentences.append(f"Only the first {limit:,} documents of each task.")
    sentences.append("`accuracy` is acc_norm where lm-eval has it, else acc.")
    if model_args:
        sentences.append(f"lm-eval's own command computes the same with --model_args pretrained=CHECKPOINT,{model_args}.")
    return " ".join(sentences)


def _check_installed() -> None:
    try:
        import lm_eval  # noqa: F401  (an extra: imported only when tasks are asked for)
    except ImportError as error:
        if error.name != "lm_eval":
            raise
        raise UserError("tasks need lm-eval: pip install lm-eval") from None


def _read_held(path: Path | None) -> dict[str, Any]:
    """What an evaluation.json holds, if there is one."""
    held = runs.read_json(path) if path is not None and path.exists() else {}
    if not isinstance(held, dict):
        raise UserError(f"{path} is damaged: it holds no results")
    return held


def _batch_size(device: str) -> int:
    return SEQUENCES_ON_CPU if device == "cpu" else SEQUENCES_ON_GPU


def _precision(model: PreTrainedModel, device: str) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return "bf16" if gpu_has_bf16(device) else names.get(model.dtype, str(model.dtype))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Bars on a terminal; elsewhere none. lm-eval's remarks on what it was given are for its own command line."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        if console.is_terminal:
            yield
        else:
            with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
                yield
    finally:
        logger.setLevel(before)
