"""What a model is trained to do, as the loop sees it: from a batch to the model's inputs, how many targets they have, and how
well the model does on held-out text.

Masked models fill in masked tokens of packed lines; decoders predict the next token of rows of running text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pnn.config import RunConfig
from pnn.data.batches import PackedBatch, special_tokens
from pnn.data.masking import SpecialTokens
from pnn.data.shards import Prepared
from pnn.evaluation.causal import evaluate_causal
from pnn.evaluation.masked import evaluate_masked
from pnn.objectives import count_targets

Inputs = dict[str, Tensor]


class Objective(Protocol):
    def inputs(self, batch: PackedBatch, device: torch.device) -> Inputs:
        """What the model is called with, labels among it."""

    def targets(self, inputs: Inputs) -> Tensor:
        """How many tokens these inputs ask for."""

    def evaluate(self, model: Any, precision: torch.dtype) -> dict[str, Any]:
        """What metrics.jsonl keeps of an evaluation on the validation text: `validation_loss` and more."""


@dataclass(frozen=True)
class MaskedObjective:
    """On a GPU the numbers of targets and of sequences are given upper bounds that they hardly ever reach: nothing waits to
    hear how many there are, and every batch has the same shapes."""

    config: RunConfig
    prepared: Prepared
    special: SpecialTokens
    capacity: int | None = None
    border_capacity: int = 0

    @staticmethod
    def of(config: RunConfig, prepared: Prepared, batch_tokens: int, on_gpu: bool) -> MaskedObjective:
        special = special_tokens(prepared.tokenizer)
        if not on_gpu:
            return MaskedObjective(config, prepared, special)
        mean = float(prepared.train.lengths[prepared.train_sequences].mean())
        expected = config.data.masked_in_training * batch_tokens * (1 - 2 / mean)  # [CLS] and [SEP] are never masked
        capacity = math.ceil((expected + 3 * math.sqrt(expected)) / 64) * 64
        return MaskedObjective(config, prepared, special, capacity, math.ceil(batch_tokens / mean * 1.2) + 16)

    def inputs(self, batch: PackedBatch, device: torch.device) -> Inputs:
        data = self.config.data
        batch = batch.with_borders(self.border_capacity).to(device)
        masked = batch.mask(self.special, data.masked_in_training, self.config.training.seed, data.masking, self.capacity)
        inputs = {
            "input_ids": masked.input_ids[None],
            "position_ids": batch.position_ids[None],
            "cu_seqlens": batch.cu_seqlens,
            "labels": masked.labels,
            "logit_positions": masked.positions,
        }
        guesses = self.config.model.get("guess_after")  # at what is predicted: what else is masked had no place there
        return inputs | {"gaps_at": masked.positions} if guesses else inputs

    def targets(self, inputs: Inputs) -> Tensor:
        return count_targets(inputs["labels"])

    def evaluate(self, model: Any, precision: torch.dtype) -> dict[str, Any]:
        evaluation = evaluate_masked(
            model,
            self.prepared.validation,
            self.prepared.validation_sequences,
            mask_probability=self.config.data.mask_probability,
            mask_seed=self.config.evaluation.mask_seed,
            batch_tokens=self.config.evaluation.batch_tokens,
            precision=precision,
        )
        return {
            "validation_loss": evaluation["loss"],
            "validation_accuracy": evaluation["accuracy"],
            "validation_accuracy_by_step": evaluation["accuracy_by_step"],
        }


@dataclass(frozen=True)
class CausalObjective:
    config: RunConfig
    prepared: Prepared

    def inputs(self, batch: PackedBatch, device: torch.device) -> Inputs:
        rows = batch.to(device).input_ids.view(-1, self.config.data.max_length)
        return {"input_ids": rows, "labels": rows}

    def targets(self, inputs: Inputs) -> Tensor:
        rows, length = inputs["labels"].shape
        # nothing predicts a row's first token. (Filled on the device: a number sent there would wait for the last update.)
        return torch.full((), rows * (length - 1), device=inputs["labels"].device)

    def evaluate(self, model: Any, precision: torch.dtype) -> dict[str, Any]:
        evaluation = evaluate_causal(
            model,
            self.prepared.validation,
            self.prepared.validation_sequences,
            batch_tokens=self.config.evaluation.batch_tokens,
            precision=precision,
        )
        return {"validation_loss": evaluation["loss"], "validation_perplexity": evaluation["perplexity"]}


def objective_of(config: RunConfig, prepared: Prepared, batch_tokens: int, on_gpu: bool) -> Objective:
    if config.kind.causal:
        return CausalObjective(config, prepared)
    return MaskedObjective.of(config, prepared, batch_tokens, on_gpu)
