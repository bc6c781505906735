"""Runs side by side on the same text and masks: each is evaluated there, and the differences are paired (`differences`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pnn import runs
from pnn.config import DataConfig, EvaluationConfig, EvaluationSet, RunConfig
from pnn.data import run_tokens
from pnn.data.corpora import open_source
from pnn.data.shards import Progress, TokenSet, held_out, prepare, prepare_source
from pnn.data.tokenizers import fingerprint
from pnn.differences import DRAWS, differences
from pnn.errors import UserError
from pnn.evaluation.masked import evaluate_masked
from pnn.evaluation.reading import smaller_batches
from pnn.memory import out_of_memory_says
from pnn.models.loading import LoadedRun, load_run
from pnn.models.registry import kind_of
from pnn.results import ComparedRun, Comparison, MaskedText

OF_DECODERS = "the perplexity of decoders is measured one at a time, by `pnn evaluate`"
# What decides which lines a run has never seen
HELD_OUT = ("train", "validation", "validation_sequences", "synthetic_paragraphs", "text_column", "filter")


def compare_runs(
    names: Sequence[str],
    *,
    progress: Progress,
    other: EvaluationSet | None = None,
    sequences: int | None = None,
    batch_tokens: int | None = None,
    device: str | None = None,
) -> Comparison:
    """The best checkpoints of these runs on the validation text of the first that lies in a run folder, or on `other` text;
    on so many of its `sequences`, spread evenly, if not on all."""
    checkpoints = _distinct_checkpoints(names)
    folders = [runs.run_of(checkpoint) if isinstance(checkpoint, Path) else None for checkpoint in checkpoints]
    configs = [None if folder is None else runs.read_config(folder) for folder in folders]
    folder, config = next(((f, c) for f, c in zip(folders, configs, strict=True) if f is not None), (None, None))
    loaded = [load_run(checkpoint, device=device, of_decoders=OF_DECODERS) for checkpoint in checkpoints]
    if config is None and other is None:  # after loading: a decoder is not asked for text that it cannot be compared on
        raise UserError(f"{runs.without_text(names[0], checkpoints[0])}: say what to compare on with --data")
    settings = config.evaluation if config is not None else EvaluationConfig()
    batch = batch_tokens or settings.batch_tokens
    longest = min(one.model.config.max_position_embeddings for one in loaded)  # what all of them can read
    data = config.data if config is not None else DataConfig(max_length=longest)
    data = replace(data, max_length=min(data.max_length, longest))
    if other is not None:
        data = replace(data, undo_wikitext_marks=other.undo_wikitext_marks)

    keys = [fingerprint(one.tokenizer) for one in loaded]
    texts: dict[str, tuple[TokenSet, NDArray[np.int64]]] = {}  # by tokenizer
    for key, one in zip(keys, loaded, strict=True):
        if key not in texts:
            own = folder if other is None else None
            texts[key] = _some(sequences, *_held_out(one, data, other, own, progress))
    measured = []
    with out_of_memory_says(lambda: smaller_batches("compare", " ".join(names), batch)):
        for key, one in zip(keys, progress(loaded, "comparing"), strict=True):
            measured.append(
                evaluate_masked(
                    one.model,
                    *texts[key],
                    mask_probability=data.mask_probability,
                    mask_seed=settings.mask_seed,
                    mask_draws=settings.mask_draws,
                    batch_tokens=batch,
                    precision=one.precision,
                )
            )
    labels, totals = runs.short_names(names), [one["by_sequence"] for one in measured]
    notes = [] if other is not None else _notes_on_text(labels, configs)
    if len(texts) > 1:
        notes.append("The tokenizers differ, and so do the masked tokens: neither accuracies nor losses are of the same.")
    tokens, chosen = next(iter(texts.values()))
    first = [(0, later) for later in range(1, len(names))]
    return {
        "source": tokens.manifest["name"],
        "text": tokens.manifest["recipe"]["text"],
        "sequences": len(chosen),
        "max_length": data.max_length,
        "mask_probability": data.mask_probability,
        "mask_seed": settings.mask_seed,
        "same_targets": len(texts) == 1,
        "draws": DRAWS,
        "runs": [_describe(*one) for one in zip(labels, names, loaded, measured, strict=True)],
        "against_first": differences(labels, totals, first),
        "all_pairs": differences(labels, totals, list(itertools.combinations(range(len(names)), 2))),
        "notes": notes,
    }


def _distinct_checkpoints(names: Sequence[str]) -> list[Path | str]:
    if len(names) < 2:
        raise UserError("a comparison needs at least two runs: pnn compare RUN RUN")
    found = [runs.find_checkpoint(name) for name in names]
    same = [str(c.resolve()) if isinstance(c, Path) else c for c in found]
    for i, j in itertools.combinations(range(len(names)), 2):
        if same[i] == same[j]:
            raise UserError(f"{names[i]} and {names[j]} are the same checkpoint: a run does not differ from itself")
    return found


def _held_out(
    one: LoadedRun, data: DataConfig, other: EvaluationSet | None, run: Path | None, progress: Progress
) -> tuple[TokenSet, NDArray[np.int64]]:
    """`other` text, or what `run` holds out: in its own tokens, or in those of a model with another tokenizer or a shorter
    input. The lines are the same for every tokenizer."""
    if other is not None:
        tokens = prepare_source(open_source(other.source, data, "validation"), one.tokenizer, data, progress)
        return tokens, np.arange(len(tokens))
    assert run is not None
    own = run_tokens.recorded(run).get("validation", {}).get("recipe", {})
    if own.get("tokenizer") == fingerprint(one.tokenizer) and own["max_length"] == data.max_length:
        return run_tokens.held_out(run, data, one.tokenizer, progress)
    if data.validation == "tail":
        tokens = prepare(replace(data, tokenizer=str(one.checkpoint)), progress).validation
    else:
        tokens = prepare_source(open_source(data.validation, data, "validation"), one.tokenizer, data, progress)
    run_tokens.check_same_text(run, tokens)
    return tokens, held_out(tokens, data)


def _some(number: int | None, tokens: TokenSet, chosen: NDArray[np.int64]) -> tuple[TokenSet, NDArray[np.int64]]:
    """So many of the sequences, evenly from beginning to end: a text's beginning need not be like the rest."""
    if number is not None and number < len(chosen):
        chosen = chosen[np.arange(number) * len(chosen) // number]
    return tokens, chosen


def _describe(name: str, run: str, loaded: LoadedRun, measured: MaskedText) -> ComparedRun:
    model = loaded.model
    return {
        "name": name,
        "run": run,
        "checkpoint": Path(loaded.checkpoint).name,
        "model_type": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": model.config.num_steps if kind_of(model).has_steps else None,  # BERT's layers are no steps
        "precision": "bf16" if loaded.precision == torch.bfloat16 else "fp32",
        "targets": measured["targets"],
        "accuracy": measured["accuracy"],
        "accuracy_interval": measured["accuracy_interval"],
        "loss": measured["loss"],
    }


def _notes_on_text(labels: Sequence[str], configs: Sequence[RunConfig | None]) -> list[str]:
    """Held out by one run is not held out by all."""
    reference, held_out = next((label, c.data) for label, c in zip(labels, configs, strict=True) if c is not None)
    notes = []
    for label, config in zip(labels, configs, strict=True):
        if config is None:
            notes.append(f"What {label} was trained on is not known: it may have seen this text.")
            continue
        different = [f"data.{key}" for key in HELD_OUT if getattr(config.data, key) != getattr(held_out, key)]
        if different:
            notes.append(f"{label} holds out other text than {reference} ({', '.join(different)}): it may have seen this one.")
    return notes
