"""Runs side by side on the same text: each is evaluated there, and the differences are paired (`differences`). Masked models
have the same masks and are judged by accuracy, decoders by loss."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from pnn import runs
from pnn.config import DataConfig, EvaluationConfig, EvaluationSet, RunConfig
from pnn.data import run_tokens
from pnn.data.corpora import open_source
from pnn.data.shards import Progress, TokenSet, held_out, prepare, prepare_source
from pnn.data.tokenizers import made, text_fingerprint
from pnn.differences import DRAWS, differences
from pnn.errors import UserError
from pnn.evaluation.causal import evaluate_causal
from pnn.evaluation.masked import evaluate_masked
from pnn.evaluation.reading import smaller_batches, text_of_a_bare_checkpoint, whole_text
from pnn.memory import out_of_memory_says
from pnn.models.loading import Loaded, check_masked, load_any, longest_input
from pnn.models.registry import kind_of
from pnn.numbers import unknown_tokens
from pnn.results import ComparedRun, Comparison

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
    folders = [runs.run_of(checkpoint) for checkpoint in checkpoints]
    configs = [None if folder is None else runs.read_config(folder) for folder in folders]
    folder, config = next(((f, c) for f, c in zip(folders, configs, strict=True) if f is not None), (None, None))
    loaded = [load_any(checkpoint, device=device) for checkpoint in checkpoints]
    causal = _are_decoders(names, loaded)
    if config is None and other is None:  # after loading: a model is not asked for text that it cannot be compared on
        raise UserError(f"{runs.without_text(names[0], checkpoints[0])}: say what to compare on with --data")
    settings = config.evaluation if config is not None else EvaluationConfig()
    batch = batch_tokens or settings.batch_tokens
    stride = settings.stride if sequences is None else None  # windows overlap in a text without gaps
    longest = min(longest_input(one.model) for one in loaded)  # what all of them can read
    data = config.data if config is not None else text_of_a_bare_checkpoint(loaded[0].model)
    data = replace(data, max_length=min(data.max_length, longest))
    if other is not None:
        data = replace(data, undo_wikitext_marks=other.undo_wikitext_marks)

    keys = [text_fingerprint(one.tokenizer) for one in loaded]
    if len(set(keys)) > 1:
        other_tokenizer = names[next(i for i, key in enumerate(keys) if key != keys[0])]
        what, own = ("losses", "bits per byte") if causal else ("accuracies", "own accuracy")
        raise UserError(
            f"{names[0]} and {other_tokenizer} have different tokenizers, so their {what} per token do not compare: "
            f"`pnn evaluate` gives each one's {own}"
        )
    tokens, chosen = _some(sequences, *_held_out(loaded[0], data, other, folder if other is None else None, progress))
    masks = {"mask_probability": data.mask_probability, "mask_seed": settings.mask_seed}
    how: dict[str, Any] = {"stride": stride} if causal else {**masks, "mask_draws": settings.mask_draws}
    measured: list[Any] = []
    with out_of_memory_says(lambda: smaller_batches("compare", *names, tokens=batch)):
        for one in progress(loaded, "comparing"):
            evaluate: Any = evaluate_causal if causal else evaluate_masked
            measured.append(evaluate(one.model, tokens, chosen, **how, batch_tokens=batch, precision=one.precision))
    labels, totals = runs.short_names(names), [one["by_sequence"] for one in measured]
    notes = [] if other is not None else _notes_on_text(labels, configs)
    unknown = measured[0].get("unknown_tokens", 0.0)
    if said := unknown_tokens(unknown, tokens.manifest["name"] if other is None else other.source, "their"):
        notes.append(f"{said}.")
    first = [(0, later) for later in range(1, len(names))]
    pairs = list(itertools.combinations(range(len(names)), 2))
    judged: Any = "loss" if causal else "accuracy"
    result = {
        "source": tokens.manifest["name"],
        "text": tokens.manifest["recipe"]["text"],
        "sequences": len(chosen),
        "max_length": data.max_length,
        **({"stride": stride or data.max_length} if causal else masks),
        "same_targets": True,  # earlier versions also compared runs of different tokenizers
        **({"unknown_tokens": unknown} if unknown else {}),
        "draws": DRAWS,
        "runs": [_describe(*one) for one in zip(labels, names, loaded, measured, strict=True)],
        "against_first": differences(labels, totals, first, judged),
        "all_pairs": differences(labels, totals, pairs, judged),
        "notes": notes,
    }
    return cast(Comparison, result)


def _are_decoders(names: Sequence[str], loaded: Sequence[Loaded[Any]]) -> bool:
    causal = [kind_of(one.model).causal for one in loaded]
    if any(causal) and not all(causal):
        decoder, masked = names[causal.index(True)], names[causal.index(False)]
        raise UserError(f"{decoder} predicts next tokens and {masked} masked ones: compare models of one kind")
    if not causal[0]:
        for one in loaded:
            check_masked(one)
    return causal[0]


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
    one: Loaded[Any], data: DataConfig, other: EvaluationSet | None, run: Path | None, progress: Progress
) -> tuple[TokenSet, NDArray[np.int64]]:
    """`other` text, or what `run` holds out: in its own tokens, or cut anew for a model with a shorter input."""
    if other is not None:
        return whole_text(other.source, data, one.tokenizer, progress)
    assert run is not None
    own = run_tokens.recorded(run).get("validation", {}).get("recipe", {})
    if own and made(own["tokenizer"], one.tokenizer) and own["max_length"] == data.max_length:
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


def _describe(name: str, run: str, loaded: Loaded[Any], measured: Any) -> ComparedRun:
    model = loaded.model
    described = {
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
        **{key: measured[key] for key in ("perplexity", "bits_per_byte") if key in measured},
    }
    return cast(ComparedRun, described)


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
