"""Rows of inference speed: masked tokens predicted in evaluation mode, on the held-out text of a config.

Ours reads packed batches by the function that `pnn fill` and `pnn evaluate` call (`evaluation/passes`) and computes logits at
masked positions only, with the number of refinement steps as a dial. The naive PNN and transformers' BERT read the same
sequences with the same masks, padded, and compute logits at every position of the last step. Batches are made and masked before
the clock starts, for all alike: what is timed is the way to the device and the prediction. All predict in bf16 on a GPU that
has it, in fp32 on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pnn.bench.naive import DTYPES, NaivePNN
from pnn.bench.padding import pad
from pnn.bench.timing import Budget, clean_slate, peak_memory, time_updates
from pnn.bench.training import (
    Text,
    device_of,
    host_trainer_of,
    parameters_of,
    precision_name,
    row_name,
    size_of,
    text_of,
    with_transform,
)
from pnn.bench.transformers_bert import build_bert
from pnn.config import RunConfig
from pnn.data.batches import PackedBatch, TrainingStream, special_tokens
from pnn.data.masking import Masked
from pnn.evaluation.passes import made_of
from pnn.models import flops
from pnn.numbers import several
from pnn.training.loop import Trainer

BATCHES = 8  # of `evaluation.batch_tokens` tokens each, used in turn


@dataclass(frozen=True)
class HeldOut:
    """One batch of validation text, packed and masked, and its number of real tokens."""

    batch: PackedBatch
    masked: Masked
    tokens: int

    def packed(self) -> tuple[PackedBatch, Tensor]:
        """The masked batch and where its masks are."""
        return replace(self.batch, input_ids=self.masked.input_ids), self.masked.positions


def held_out(host: Trainer) -> list[HeldOut]:
    """Batches of one size, so that a compiled model meets one shape."""
    prepared, data = host.prepared, host.config.data
    longest = int(prepared.validation.lengths[prepared.validation_sequences].max())
    size = max(longest, host.config.evaluation.batch_tokens)
    filler = prepared.tokenizer.pad_token_id or 0
    stream = TrainingStream(prepared.validation, prepared.validation_sequences, size, seed=0, filler=filler)
    out = []
    for _ in range(BATCHES):
        before = stream.tokens_taken
        batch = next(stream)
        out.append(
            HeldOut(
                batch,
                batch.mask(special_tokens(host.prepared.tokenizer), data.mask_probability, 0),
                stream.tokens_taken - before,
            )
        )
    return out


def padded(host: Trainer, one: HeldOut, device: torch.device) -> Callable[[], dict[str, Tensor]]:
    """The same as rows, ready on the host; a call sends them to the device."""
    rows = pad(one.batch, one.masked, host.config.data.max_length, host.prepared.tokenizer.pad_token_id or 0)
    inputs = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask}
    if device.type == "cuda":
        inputs = {name: x.pin_memory() for name, x in inputs.items()}
    return lambda: {name: x.to(device, non_blocking=True) for name, x in inputs.items()}


@torch.inference_mode()
def predict_row(
    run: RunConfig,
    budget: Budget,
    text: Text,
    model: torch.nn.Module,
    config: Any,
    predictions: Sequence[tuple[Callable[[], Tensor], int]],
    num_steps: int | None = None,
    *,
    name: str,
    implementation: str,
) -> dict[str, Any]:
    """Time predictions (of one batch each, with its number of real tokens) in turn."""
    device = device_of(run)
    supply = itertools.cycle(predictions)

    def one_batch() -> float:
        predict, tokens = next(supply)
        predict()
        return tokens

    precision = inference_precision(run)
    # a model that is in 16 bit itself is left as it is
    mixed = torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32" and dtype_of(model) == torch.float32)
    with mixed:
        measured = time_updates(one_batch, budget, device)
    return {
        "name": name,
        "what": "inference",
        "config": run.name,
        "implementation": implementation,
        "compiled": False,
        "parameters": parameters_of(model),
        "precision": precision,
        "shapes": {
            "batch_tokens": max(tokens for _, tokens in predictions),
            "max_length": run.data.max_length,
            "mean_length": text.mean_length,
            "target_share": text.target_share,
            **size_of(config),
            **({} if num_steps is None else {"steps": num_steps}),
        },
        **measured,
        "flops_per_token": flops.inference_flops(config, text.attended, text.target_share, num_steps),
        "peak_memory_bytes": peak_memory(device),
    }


def inference_precision(run: RunConfig) -> str:
    """As training's, but never fp16 where bf16 is to be had; and a CPU predicts in fp32 unless asked otherwise."""
    if run.training.precision == "auto" and device_of(run).type == "cpu":
        return "fp32"
    name = precision_name(run)
    return "bf16" if name == "fp16" and torch.cuda.is_bf16_supported(including_emulation=False) else name


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def inference_row(run: RunConfig, budget: Budget, num_steps: int | None = None) -> dict[str, Any]:
    """Ours, after `num_steps` steps (all if not given)."""
    device = device_of(run)
    clean_slate(device)
    with host_trainer_of(run) as host:
        text, batches, model = text_of(host), held_out(host), host.model.to(device).eval()

    def predict(batch: PackedBatch, positions: Tensor) -> Tensor:
        return made_of(model, batch, positions, lambda h: model.read_out(h).argmax(-1), num_steps)

    predictions = [(partial(predict, *one.packed()), one.tokens) for one in batches]
    name = row_name(run) + ("" if num_steps is None else f", {several(num_steps, 'step')}")
    return predict_row(run, budget, text, model, model.config, predictions, num_steps, name=name, implementation="pnn")


def naive_inference_row(run: RunConfig, budget: Budget) -> dict[str, Any]:
    device = device_of(run)
    clean_slate(device)
    with host_trainer_of(run) as host:
        text, config = text_of(host), host.model.config
        batches = [(padded(host, one, device), one.tokens) for one in held_out(host)]
        model = NaivePNN.from_pnn(host.model).to(device).eval()

    def predict(batch: Callable[[], dict[str, Tensor]]) -> Tensor:
        return model.head(model.states(**batch())[-1]).argmax(-1)

    predictions = [(partial(predict, batch), tokens) for batch, tokens in batches]
    return predict_row(run, budget, text, model, config, predictions, name="naive pnn", implementation="naive")


def transformers_inference_row(run: RunConfig, budget: Budget) -> dict[str, Any]:
    device = device_of(run)
    clean_slate(device)
    with host_trainer_of(run) as host:
        text, config = text_of(host), host.model.config
        batches = [(padded(host, one, device), one.tokens) for one in held_out(host)]
    # loaded in 16 bit, as its users do: faster than autocast, which would convert its weights for every batch
    model = build_bert(config).to(device, DTYPES[inference_precision(run)]).eval()

    def predict(batch: Callable[[], dict[str, Tensor]]) -> Tensor:
        return model(**batch()).logits.argmax(-1)

    predictions = [(partial(predict, batch), tokens) for batch, tokens in batches]
    counted = with_transform(config)
    return predict_row(run, budget, text, model, counted, predictions, name="transformers bert", implementation="transformers")
