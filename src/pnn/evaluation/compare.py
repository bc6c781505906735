"""Runs side by side on the same text and masks, and which of their differences hold.

    accuracy(run) = Σ correct / Σ targets over sequences,     difference(b, a) = accuracy(b) − accuracy(a)

All runs are asked for the same masked tokens, so differences are *paired*: sequences are drawn again (with replacement) for
all runs at once, and what is hard for every run cancels. Of a list of differences, the 95 % intervals are right all at
once in 95 % of cases (`stats.bootstrap_together`), so a long list does not make a chance hit more likely; a difference
holds when its interval leaves out zero. Intervals speak of the text and the masks, not of the spread between seeds.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from pnn import runs
from pnn.config import DataConfig, EvaluationConfig, EvaluationSet, RunConfig
from pnn.data import run_tokens
from pnn.data.batches import evaluation_batches, special_tokens
from pnn.data.corpora import open_source
from pnn.data.shards import Progress, TokenSet, held_out, prepare, prepare_source
from pnn.data.tokenizers import fingerprint
from pnn.errors import UserError
from pnn.evaluation.reading import smaller_batches, states_at, to_device
from pnn.memory import out_of_memory_says
from pnn.models.loading import LoadedRun, load_run
from pnn.models.registry import kind_of
from pnn.stats import Estimate, bootstrap_together, ratio_interval

DRAWS = 2000
OF_DECODERS = "the perplexity of decoders is measured one at a time, by `pnn evaluate`"
HOLDS, UNDECIDED, EQUAL = "holds", "undecided", "equal"
# What decides which lines a run has never seen
HELD_OUT = ("train", "validation", "validation_sequences", "synthetic_paragraphs", "text_column", "filter")


@dataclass(frozen=True)
class SequenceTotals:
    """What a run got right after its last step, an entry a sequence."""

    correct: NDArray[np.float64]
    loss: NDArray[np.float64]
    targets: NDArray[np.float64]


def compare_runs(
    names: Sequence[str],
    *,
    progress: Progress,
    other: EvaluationSet | None = None,
    sequences: int | None = None,
    batch_tokens: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
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
    totals = []
    with out_of_memory_says(lambda: smaller_batches("compare", " ".join(names), batch)):
        for key, one in zip(keys, progress(loaded, "comparing"), strict=True):
            totals.append(count_right(one, *texts[key], data.mask_probability, settings.mask_seed, batch))
    if any((one.targets > 0).sum() < 2 for one in totals):
        raise UserError("too little text to compare on: fewer than two sequences have a masked token")
    labels = short_names(names)
    described = [
        {"name": label, "run": run, **_describe(one, total)}
        for label, run, one, total in zip(labels, names, loaded, totals, strict=True)
    ]
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
        "runs": described,
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


def short_names(names: Sequence[str]) -> list[str]:
    """The ends of the paths, as much of each as tells all of them apart."""
    parts = [Path(os.path.abspath(name)).parts for name in names]
    for length in range(1, max(map(len, parts))):
        ends = ["/".join(path[-length:]) for path in parts]
        if len(set(ends)) == len(ends):
            return ends
    return list(names)


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


@torch.no_grad()
def count_right(
    run: LoadedRun,
    tokens: TokenSet,
    sequences: NDArray[np.int64],
    mask_probability: float,
    mask_seed: int,
    batch_tokens: int,
) -> SequenceTotals:
    """As `evaluate_masked` does it, with the same masks, but of the last step alone and an entry a sequence."""
    model, special = run.model.eval(), special_tokens(tokens.tokenizer())
    sequence, correct, loss = [], [], []
    for packed, indices in evaluation_batches(tokens, sequences, batch_tokens):
        masked = packed.mask(special, mask_probability, mask_seed)
        labels = to_device(masked.labels, model.device)
        with torch.autocast(model.device.type, run.precision, enabled=run.precision != torch.float32):
            logits = model.head(states_at(model, replace(packed, input_ids=masked.input_ids), masked.positions)[-1])
        correct.append(logits.argmax(-1) == labels)
        loss.append(F.cross_entropy(logits.float(), labels, reduction="none"))
        sequence.append(indices[np.searchsorted(packed.cu_seqlens.numpy(), masked.positions.numpy(), side="right") - 1])
    at = np.concatenate(sequence)

    def summed(values: NDArray[Any] | None) -> NDArray[np.float64]:
        return np.bincount(at, values, len(sequences)).astype(np.float64)

    return SequenceTotals(summed(torch.cat(correct).cpu().numpy()), summed(torch.cat(loss).cpu().numpy()), summed(None))


def _describe(run: LoadedRun, totals: SequenceTotals) -> dict[str, Any]:
    value, low, high = ratio_interval(totals.correct, totals.targets)
    return {
        "checkpoint": Path(run.checkpoint).name,
        "model_type": run.model.config.model_type,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "steps": run.model.config.num_steps if kind_of(run.model).has_steps else None,  # BERT's layers are no steps
        "precision": "bf16" if run.precision == torch.bfloat16 else "fp32",
        "targets": int(totals.targets.sum()),
        "accuracy": value,
        "accuracy_interval": [max(0.0, low), min(1.0, high)],
        "loss": float(totals.loss.sum() / totals.targets.sum()),
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


def differences(names: Sequence[str], totals: Sequence[SequenceTotals], pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """How much each pair's second run is above its first in accuracy and loss, with intervals that hold together."""
    for name, one in zip(names, totals, strict=True):
        if len(one.targets) != len(totals[0].targets):
            raise UserError(
                f"{names[0]} and {name} cannot be compared: the same text gives them {len(totals[0].targets):,} and "
                f"{len(one.targets):,} sequences"
            )
    n, base, against = len(totals), [a for a, _ in pairs], [b for _, b in pairs]

    def estimates(measured: list[NDArray[np.float64]]) -> list[Estimate]:
        def apart(sums: NDArray[np.float64]) -> NDArray[np.float64]:
            means = sums[..., :n] / sums[..., n:]
            return np.asarray(means[..., against] - means[..., base])

        return bootstrap_together(np.stack([*measured, *(one.targets for one in totals)], axis=1), apart, DRAWS)

    found = zip(pairs, estimates([t.correct for t in totals]), estimates([t.loss for t in totals]), strict=True)
    rows: list[dict[str, Any]] = [
        {
            "run": names[b],
            "against": names[a],
            "accuracy": _as_json(accuracy),
            "loss": _as_json(loss),
            "sentence": sentence(names[b], names[a], accuracy),
        }
        for (a, b), accuracy, loss in found
    ]
    return {"comparisons": len(rows), "hold": sum(row["accuracy"]["verdict"] == HOLDS for row in rows), "rows": rows}


def verdict(difference: Estimate) -> str:
    if difference == (0, 0, 0):
        return EQUAL
    return HOLDS if difference.low > 0 or difference.high < 0 else UNDECIDED


def _as_json(difference: Estimate) -> dict[str, Any]:
    return {
        "difference": difference.value,
        "interval": [difference.low, difference.high],
        "verdict": verdict(difference),
    }


def sentence(run: str, against: str, difference: Estimate) -> str:
    """In words that follow from the numbers."""
    value, low, high = difference
    said = verdict(difference)
    if said == EQUAL:
        return f"{run} gets as many right as {against} in every sequence: {said}"
    # tenths of a point, unless an end of the interval would be written as zero
    digits = 1 if min(abs(low), abs(high)) >= 0.0005 else 2
    if said == UNDECIDED:
        interval = f"{points(low, digits)} to {points(high, digits)}"
        return f"{run} differs from {against} by {points(value, digits)} points ({interval}): {said}"
    interval = "–".join(points(end, digits) for end in sorted((abs(low), abs(high))))
    return f"{run} is {points(abs(value), digits)} points {'above' if value > 0 else 'below'} {against} ({interval}): {said}"


def points(fraction: float, digits: int = 1) -> str:
    """A difference in per cent, with a real minus sign, and never one before a zero."""
    return f"{round(100 * fraction, digits) + 0.0:.{digits}f}".replace("-", "−")
