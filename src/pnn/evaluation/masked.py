"""Masked-token accuracy and loss after every step 0 … T, on masks that are the same for every model.

All selected tokens become [MASK], whatever masking a model was trained with. Step 0 reads the embeddings, step t the state
after t refinements (for a BERT baseline: after t layers, read by a head that was trained on the last one only).
Intervals are over sequences. On the embedded corpus the numbers are split by kind of word and stand beside the best
accuracy that any model could reach on these very masks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from pnn.data import synthetic
from pnn.data.batches import evaluation_batches, special_tokens
from pnn.data.shards import Progress, TokenSet, quietly
from pnn.data.tokenizers import fingerprint, of_synthetic_language, unknown_share
from pnn.errors import UserError
from pnn.evaluation.passes import halting_in_force, states_at, to_device
from pnn.models.base import Halting, MaskedLMBase
from pnn.models.precision import predicting
from pnn.results import Accuracy, Commonest, MaskedScores, MaskedText
from pnn.stats import of_a_share, ratio_interval


@dataclass(frozen=True)
class TargetRecord:
    """One entry a masked token: its sequence, token, whether each step was right, and each step's loss."""

    sequence: NDArray[np.int64]
    token: NDArray[np.int64]
    correct: NDArray[np.bool_]  # (steps + 1, targets)
    loss: NDArray[np.float32]  # (steps + 1, targets)
    corpus: str | None  # which embedded corpus, if any
    best: NDArray[np.float64] | None  # its best possible probability


@torch.no_grad()
def evaluate_masked(
    model: MaskedLMBase,
    tokens: TokenSet,
    sequences: NDArray[np.int64],
    *,
    mask_probability: float = 0.15,
    mask_seed: int = 0,
    mask_draws: int = 1,
    batch_tokens: int = 16384,
    precision: torch.dtype = torch.float32,
    num_steps: int | None = None,
    halt: Halting = None,
    progress: Progress = quietly,
) -> MaskedText:
    """Evaluate on `sequences` of a token set; returns what evaluation.json holds for it, and the totals of every sequence.
    Where tokens halt (as `halt` says, or else the model's config), a step's numbers are of all tokens, those that have halted
    in the state that they keep."""
    tokenizer = tokens.tokenizer()
    special = special_tokens(tokenizer)
    corpus = embedded_corpus(tokens.manifest)
    sequence, token, best, correct, loss = [], [], [], [], []
    counts = np.zeros(model.config.vocab_size, dtype=np.int64)
    # Masks are drawn on the host and results stay on the device until the last batch is on its way: the loop never waits.
    # What piles up on the device is 5 bytes a target and step, little beside one batch's logits.
    with predicting(model, precision):
        for draw in range(mask_draws):
            for packed, indices in progress(evaluation_batches(tokens, sequences, batch_tokens), "evaluating, batch"):
                masked = packed.mask(special, mask_probability, mask_seed + draw)
                labels = to_device(masked.labels, model.device)
                states = states_at(
                    model, replace(packed, input_ids=masked.input_ids), masked.positions, num_steps, every_step=True, halt=halt
                )
                steps = [_score(model.read_out(h), labels) for h in states]  # one step's logits at a time
                correct.append(torch.stack([right for right, _ in steps]))
                loss.append(torch.stack([value for _, value in steps]))
                if draw == 0:
                    counts += np.bincount(packed.input_ids.numpy(), minlength=len(counts))
                positions, borders = masked.positions.numpy(), packed.cu_seqlens.numpy()
                sequence.append(indices[np.searchsorted(borders, positions, side="right") - 1])
                token.append(masked.labels.numpy())
                if corpus is not None:
                    best.append(best_possible(packed.input_ids.numpy(), borders, positions, corpus))
    record = TargetRecord(
        sequence=np.concatenate(sequence),
        token=np.concatenate(token),
        correct=torch.cat(correct, dim=1).cpu().numpy(),
        loss=torch.cat(loss, dim=1).cpu().numpy(),
        corpus=corpus,
        best=np.concatenate(best) if corpus is not None else None,
    )
    found: MaskedText = {
        "source": tokens.manifest["name"],
        "text": tokens.manifest["recipe"]["text"],
        "sequences": len(sequences),
        "mask_probability": mask_probability,
        "mask_seed": mask_seed,
        "mask_draws": mask_draws,
        **summarise(record, len(sequences)),
        "commonest": commonest(record.token, tokenizer),
    }
    if (rule := halting_in_force(model, num_steps, halt)) is not None:
        found["halt"] = rule.as_dict()
    if unknown := unknown_share(counts, tokenizer):
        found["unknown_tokens"] = unknown
    return found


def embedded_corpus(manifest: dict[str, Any]) -> str | None:
    """Which embedded corpus these are whole paragraphs of, one token per word: what the ceiling is computed for."""
    corpus, longest = manifest["name"], manifest["max_length"]
    if corpus not in synthetic.RULES or longest < synthetic.longest_paragraph(corpus) + 2:
        return None
    return corpus if manifest["recipe"]["tokenizer"] == fingerprint(of_synthetic_language(longest, corpus)) else None


def commonest(targets: NDArray[np.int64], tokenizer: Any) -> Commonest:
    counts = np.bincount(targets)
    best = int(counts.argmax())
    return {"token": str(tokenizer.convert_ids_to_tokens(best)), "accuracy": float(counts[best] / len(targets))}


def _score(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.argmax(-1) == labels, F.cross_entropy(logits.float(), labels, reduction="none")


def best_possible(
    ids: NDArray[np.int64], borders: NDArray[np.int32], positions: NDArray[np.int64], corpus: str
) -> NDArray[np.float64]:
    masked = np.zeros(len(ids), dtype=bool)
    masked[positions] = True
    best = np.zeros(len(ids))
    for start, stop in zip(borders[:-1] + 1, borders[1:] - 1, strict=True):  # without [CLS] and [SEP]
        if masked[start:stop].any():
            best[start:stop] = synthetic.best_prediction_probability(ids[start:stop], masked[start:stop], corpus)
    return best[positions]


def summarise(record: TargetRecord, num_sequences: int) -> MaskedScores:
    sequence, token, correct, loss = record.sequence, record.token, record.correct, record.loss
    if len(np.unique(sequence)) < 2:
        raise UserError("too little text to evaluate on: fewer than two sequences have a masked token")
    last = len(correct) - 1

    def per_sequence(values: NDArray[Any], chosen: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        at = slice(None) if chosen is None else chosen
        return np.bincount(sequence[at], values[at].astype(np.float64), num_sequences).astype(np.float64)

    def accuracy(chosen: NDArray[np.bool_] | None = None) -> Accuracy:
        trials = per_sequence(np.ones(len(sequence)), chosen)
        alone = [ratio_interval(per_sequence(step, chosen), trials) for step in correct.astype(float)]
        rows = [of_a_share(step, int((trials > 0).sum())) for step in alone]
        intervals = [[low, high] for _, low, high in rows]
        return {
            "targets": int(trials.sum()),
            "accuracy": rows[-1].value,
            "accuracy_interval": intervals[-1],
            "accuracy_by_step": [step.value for step in rows],
            "accuracy_by_step_interval": intervals,
        }

    trials = per_sequence(np.ones(len(sequence)))
    losses = [float(step.mean(dtype=np.float64)) for step in loss]
    gain = ratio_interval(per_sequence(correct[last].astype(float) - correct[min(1, last)]), trials)
    result: MaskedScores = {
        "num_steps": last,
        **accuracy(),
        "loss_by_step": losses,
        "loss": losses[-1],
        "gain_over_first_step": gain.as_json(),
        "by_sequence": {
            "targets": trials.astype(int).tolist(),
            "correct": per_sequence(correct[last]).astype(int).tolist(),
            "loss": per_sequence(loss[last]).round(6).tolist(),
        },
    }
    if record.corpus is not None and record.best is not None:
        best = record.best
        kinds = synthetic.language(record.corpus).kind_of_word[token]
        result["ceiling"] = ratio_interval(per_sequence(best), trials).value
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
