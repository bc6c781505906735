"""Masked-token accuracy and loss after every step 0 … T, on masks that are the same for every model.

All selected tokens become [MASK], whatever masking a model was trained with. Step 0 reads the embeddings, step t the state
after t refinements (for a BERT baseline: after t layers, read by a head that was trained on the last one only).
Intervals are over sequences. On the embedded corpus the numbers are split by kind of word and stand beside the best
accuracy that any model could reach on these very masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pnn.data import synthetic
from pnn.data.batches import evaluation_batches, special_tokens
from pnn.data.shards import TokenSet
from pnn.data.tokenizers import fingerprint, of_synthetic_language
from pnn.errors import UserError
from pnn.stats import ratio_interval


@dataclass
class TargetRecord:
    """One entry a masked token: its sequence, token, whether each step was right, and each step's loss."""

    sequence: list[NDArray[np.int64]] = field(default_factory=list)
    token: list[NDArray[np.int64]] = field(default_factory=list)
    correct: list[NDArray[np.bool_]] = field(default_factory=list)  # (steps + 1, targets) each
    loss: list[NDArray[np.float32]] = field(default_factory=list)
    best: list[NDArray[np.float64]] = field(default_factory=list)  # embedded corpus: best possible probability


@torch.no_grad()
def evaluate_masked(
    model: PreTrainedModel,
    tokens: TokenSet,
    sequences: NDArray[np.int64],
    *,
    mask_probability: float = 0.15,
    mask_seed: int = 0,
    batch_tokens: int = 16384,
    precision: torch.dtype = torch.float32,
    num_steps: int | None = None,
) -> dict[str, Any]:
    """Evaluate on `sequences` of a token set; returns what evaluation.json holds for it."""
    device = model.device
    special = special_tokens(tokens.tokenizer())
    on_embedded = is_embedded(tokens.manifest)
    record = TargetRecord()
    was_training = model.training
    model.eval()
    for packed, indices in evaluation_batches(tokens, sequences, batch_tokens):
        batch = packed.to(device)
        masked = batch.mask(special, mask_probability, mask_seed)
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            states = model.base_model(
                input_ids=masked.input_ids[None],
                position_ids=batch.position_ids[None],
                cu_seqlens=batch.cu_seqlens,
                num_steps=num_steps,
                output_states=True,
            ).states
            steps = [_read_out(model.head(h[0, masked.positions]), masked.labels) for h in states]
        record.correct.append(torch.stack([correct for correct, _ in steps]).cpu().numpy())
        record.loss.append(torch.stack([loss for _, loss in steps]).cpu().numpy())
        positions = masked.positions.cpu().numpy()
        borders = packed.cu_seqlens.numpy()
        record.sequence.append(indices[np.searchsorted(borders, positions, side="right") - 1])
        record.token.append(masked.labels.cpu().numpy())
        if on_embedded:
            record.best.append(_best_possible(packed.input_ids.numpy(), borders, positions))
    model.train(was_training)
    result = summarise(record, len(sequences))
    return {
        "source": tokens.manifest["name"],
        "text": tokens.manifest["recipe"]["text"],
        "sequences": len(sequences),
        "mask_probability": mask_probability,
        "mask_seed": mask_seed,
        **result,
    }


def is_embedded(manifest: dict[str, Any]) -> bool:
    """Whether these are whole paragraphs of the embedded corpus, a token a word: what the ceiling is computed for."""
    if "synthetic" not in manifest["recipe"]["source"] or manifest["max_length"] < synthetic.longest_paragraph() + 2:
        return False
    return manifest["recipe"]["tokenizer"] == fingerprint(of_synthetic_language(manifest["max_length"]))


def _read_out(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.argmax(-1) == labels, F.cross_entropy(logits.float(), labels, reduction="none")


def _best_possible(ids: NDArray[np.int64], borders: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    masked = np.zeros(len(ids), dtype=bool)
    masked[positions] = True
    best = np.zeros(len(ids))
    for start, stop in zip(borders[:-1] + 1, borders[1:] - 1, strict=True):  # without [CLS] and [SEP]
        if masked[start:stop].any():
            best[start:stop] = synthetic.best_prediction_probability(ids[start:stop], masked[start:stop])
    return best[positions]


def summarise(record: TargetRecord, num_sequences: int) -> dict[str, Any]:
    sequence = np.concatenate(record.sequence)
    if len(np.unique(sequence)) < 2:
        raise UserError("too little text to evaluate on: fewer than two sequences have a masked token")
    correct = np.concatenate(record.correct, axis=1)
    loss = np.concatenate(record.loss, axis=1)
    token = np.concatenate(record.token)
    last = len(correct) - 1

    def per_sequence(values: NDArray[Any], chosen: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        at = slice(None) if chosen is None else chosen
        return np.bincount(sequence[at], values[at].astype(np.float64), num_sequences).astype(np.float64)

    def accuracy(chosen: NDArray[np.bool_] | None = None) -> dict[str, Any]:
        trials = per_sequence(np.ones(len(sequence)), chosen)
        rows = [ratio_interval(per_sequence(step, chosen), trials) for step in correct.astype(float)]
        return {
            "targets": int(trials.sum()),
            "accuracy": rows[-1][0],
            "accuracy_interval": [max(0.0, rows[-1][1]), min(1.0, rows[-1][2])],
            "accuracy_by_step": [value for value, _, _ in rows],
            "accuracy_by_step_interval": [[max(0.0, low), min(1.0, high)] for _, low, high in rows],
        }

    trials = per_sequence(np.ones(len(sequence)))
    result: dict[str, Any] = {"num_steps": last, **accuracy()}
    result["loss_by_step"] = [float(step.mean(dtype=np.float64)) for step in loss]
    result["loss"] = result["loss_by_step"][-1]
    first = min(1, last)
    value, low, high = ratio_interval(per_sequence(correct[last].astype(float) - correct[first]), trials)
    result["gain_over_first_step"] = {"value": value, "interval": [low, high]}
    if record.best:
        best = np.concatenate(record.best)
        kinds = synthetic.language().kind_of_word[token]
        value, low, high = ratio_interval(per_sequence(best), trials)
        result["ceiling"] = value
        result["by_kind"] = {
            name: {
                "share": float((kinds == k).mean()),
                "ceiling": float(best[kinds == k].mean()),
                **accuracy(kinds == k),
            }
            for k, name in enumerate(synthetic.KINDS)
            if (kinds == k).any()
        }
    return result
