"""Evaluate a run or checkpoint: on the validation text of its own config, and on any other text.

A run folder keeps what is measured: evaluation.json; beside it evaluation_by_sequence.json, by which a report pairs runs, and
refining.json, a held-out text that a report shows being rewritten; and what was measured another way in files that say so:
evaluation_num_steps_6.json, evaluation_stride_256.json.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from pnn import runs
from pnn.config import EvaluationSet
from pnn.data import run_tokens
from pnn.data.shards import Progress
from pnn.data.tokenizers import check_masks
from pnn.errors import UserError
from pnn.evaluation.causal import evaluate_causal
from pnn.evaluation.masked import evaluate_masked
from pnn.evaluation.reading import reading_of, smaller_batches, whole_text
from pnn.evaluation.refining import example
from pnn.files import write_json, write_text
from pnn.memory import out_of_memory_says
from pnn.models.base import parts_of
from pnn.models.loading import Loaded, check_num_steps, load_any
from pnn.models.registry import kind_of
from pnn.progress import say
from pnn.results import Evaluation, SequenceTotals, Tasks, fits


def evaluate_run(
    run: str | Path,
    *,
    progress: Progress,
    sets: dict[str, EvaluationSet] | None = None,
    num_steps: int | None = None,
    stride: int | None = None,
    batch_tokens: int | None = None,
    device: str | None = None,
) -> Evaluation:
    """Evaluate RUN's best checkpoint. A run folder is evaluated on its validation text and its config's sets and keeps the
    result; `sets` adds to them. A bare checkpoint needs `sets`."""
    loaded = load_any(run, device=device)
    check_asked(loaded, num_steps, stride)
    checkpoint, model, tokenizer, kind = loaded.checkpoint, loaded.model, loaded.tokenizer, kind_of(loaded.model)
    folder, data, settings = reading_of(loaded)
    batch = batch_tokens or settings.batch_tokens
    how: dict[str, Any] = {"batch_tokens": batch, "precision": loaded.precision, "num_steps": num_steps, "progress": progress}
    if kind.causal:
        how |= {"stride": stride or settings.stride, "by_step": kind.has_steps}
    else:
        how |= {"mask_seed": settings.mask_seed, "mask_draws": settings.mask_draws, "mask_probability": data.mask_probability}

    def measure(tokens: Any, sequences: Any) -> dict[str, Any]:
        evaluate: Any = evaluate_causal if kind.causal else evaluate_masked
        with out_of_memory_says(lambda: smaller_batches("evaluate", run, tokens=batch)):
            return evaluate(model, tokens, sequences, **how)

    result: dict[str, Any] = {
        "checkpoint": Path(checkpoint).name,
        "model_type": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        **({"anatomy": parts_of(model)} if kind.ours else {}),
        "precision": "bf16" if loaded.precision == torch.bfloat16 else "fp32",
    }
    totals: dict[str, SequenceTotals] = {}
    held_out = None if folder is None else run_tokens.held_out(folder, data, tokenizer, progress)
    if held_out is not None:
        result |= measure(*held_out)
        totals["validation"] = result.pop("by_sequence")
    wanted = settings.sets | (sets or {})
    if not wanted and folder is None:
        raise UserError(f"{runs.without_text(run, checkpoint)}: say what to evaluate on with --data")
    for name, chosen in wanted.items():
        treatment = replace(data, undo_wikitext_marks=chosen.undo_wikitext_marks)
        one = measure(*whole_text(chosen.source, treatment, tokenizer, progress))
        totals[name] = one.pop("by_sequence")
        result.setdefault("sets", {})[name] = one
    if folder is not None and Path(run).resolve() == folder:
        if (folder / runs.AVERAGE).exists():
            result["average"] = evaluate_run(
                folder / runs.AVERAGE,
                progress=progress,
                sets=sets,
                num_steps=num_steps,
                stride=stride,
                batch_tokens=batch_tokens,
                device=device,
            )
        another_way = {"num_steps": num_steps, "stride": stride}
        if kind.masked and held_out is not None and num_steps is None:
            shown = example(loaded, *held_out, data.mask_probability, settings.mask_seed)
            if shown is not None:
                write_json(folder / runs.REFINING, shown)
        _keep(folder, result, totals, "".join(f"_{key}_{value}" for key, value in another_way.items() if value is not None))
    return cast(Evaluation, result)


def check_asked(loaded: Loaded[Any], num_steps: int | None, stride: int | None) -> None:
    """Whether the model can be measured so."""
    kind = kind_of(loaded.model)
    if kind.causal:
        if stride is not None and stride < 1:
            raise UserError(f"--stride {stride}: expected at least 1 token per window")
        if num_steps is not None and not kind.has_steps:
            raise UserError(f"--num-steps: a {type(loaded.model).__name__} has no refinement steps")
        check_num_steps(loaded.model, num_steps)
    elif not kind.ours:
        raise UserError(f"{loaded.checkpoint}: a {type(loaded.model).__name__} is neither one of our models nor a decoder")
    else:
        check_masks(loaded.tokenizer, str(loaded.checkpoint))
        check_num_steps(loaded.model, num_steps)
        if stride is not None:
            raise UserError("--stride is for decoders: masked models read whole lines")


def _tasks_in(held: Path) -> Tasks | None:
    """A damaged file has none: it is about to be replaced."""
    try:
        found = runs.read_json(held)
    except UserError:
        return None
    tasks = found.get("tasks") if isinstance(found, dict) else None
    return tasks if fits(tasks, Tasks) else None


def _keep(folder: Path, result: dict[str, Any], totals: dict[str, SequenceTotals], another_way: str) -> None:
    held = folder / f"evaluation{another_way}.json"
    if not another_way:
        before = _tasks_in(held) if held.exists() else None
        if before is not None and before["checkpoint"] == result["checkpoint"]:  # measured by another command: it still holds
            result["tasks"] = before
        write_text(folder / runs.BY_SEQUENCE, json.dumps(totals, separators=(",", ":")) + "\n")  # on one line: small
    else:
        say(f"kept in {held}")
    write_json(held, result)
