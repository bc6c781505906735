"""What evaluating and filling share: a RUN's model and tokenizer, loaded and checked, and its states at chosen positions.

Batches are packed: sequences end to end, no padding computed. Everything that the host needs to know about a batch (where
its targets are, how many) it works out before the batch goes to the device, so that nothing in a loop over batches waits for
the device: the host prepares the next batch while the device is busy with this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn import runs
from pnn.config import DataConfig
from pnn.data.batches import PackedBatch
from pnn.data.tokenizers import check_masks, load_tokenizer
from pnn.errors import UserError
from pnn.models.base import MaskedLMBase
from pnn.models.sections import load_model

LONGEST = 2048  # where a model does not say how much it can take; lm-eval's own choice
M = TypeVar("M", bound=PreTrainedModel)


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """`precision` is what the device computes in best: bf16 on a GPU that has it."""

    checkpoint: Path | str
    model: M
    tokenizer: PreTrainedTokenizerFast
    precision: torch.dtype


LoadedRun = Loaded[MaskedLMBase]


def load_run(
    run: str | Path, *, num_steps: int | None = None, device: str | None = None, of_decoders: str | None = None
) -> LoadedRun:
    """RUN's masked model. `num_steps` is only checked: whether the model can take so many. `of_decoders`: what to do with a
    decoder instead, for the message."""
    loaded = load_any(run, device=device)
    model = loaded.model
    if not isinstance(model, MaskedLMBase):
        said = of_decoders if of_decoders and model.can_generate() else "it has no refinement steps to read"
        raise UserError(f"{loaded.checkpoint}: a {type(model).__name__} is not one of our masked models: {said}")
    check_masks(loaded.tokenizer, str(loaded.checkpoint))
    check_num_steps(model, num_steps)
    return replace(loaded, model=model)


def check_num_steps(model: MaskedLMBase, num_steps: int | None) -> None:
    most = None if model.config.model_type == "pnn" else model.config.num_hidden_layers
    if num_steps is not None and (num_steps < 0 or (most is not None and num_steps > most)):
        raise UserError(f"--num-steps {num_steps}: this model takes 0 to {most or 'any number'}")


def load_decoder(run: str | Path, *, device: str | None = None) -> Loaded[PreTrainedModel]:
    """RUN's model if it predicts the next token: one of ours, or any that transformers knows."""
    loaded = load_any(run, device=device)
    if isinstance(loaded.model, MaskedLMBase) or not loaded.model.can_generate():
        raise UserError(f"{loaded.checkpoint}: a {type(loaded.model).__name__} fills in masks, it does not continue a text")
    return loaded


def load_any(run: str | Path, *, device: str | None = None) -> Loaded[Any]:
    """RUN's best checkpoint, its files compared with their checksums, on the GPU if there is one."""
    checkpoint = runs.find_checkpoint(run)
    if isinstance(checkpoint, Path):
        runs.verify_checkpoint(checkpoint)
    model = load_model(checkpoint)
    tokenizer = load_tokenizer(str(checkpoint), longest_input(model))
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"{checkpoint}: the tokenizer has {len(tokenizer):,} entries, the model {model.config.vocab_size:,}: "
            "they do not match"
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    use_bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return Loaded(checkpoint, model.to(device), tokenizer, torch.bfloat16 if use_bf16 else torch.float32)


def longest_input(model: PreTrainedModel) -> int:
    return getattr(model.config, "max_position_embeddings", None) or LONGEST


def text_of_a_bare_checkpoint(model: PreTrainedModel) -> DataConfig:
    """How text is read for a checkpoint without a run: as models of its kind are trained."""
    length = min(longest_input(model), 65535)
    if isinstance(model, MaskedLMBase):
        return DataConfig(max_length=length, layout="lines")
    return DataConfig(max_length=length, layout="rows", filter="none")


def smaller_batches(command: str, run: str | Path, tokens: int) -> str:
    """What to change when a batch does not fit into memory."""
    return f"with batches of {tokens:,} tokens: pnn {command} {run} --batch-tokens {max(1, tokens // 2)} needs half"


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """From the host, without waiting for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def states_at(model: MaskedLMBase, batch: PackedBatch, positions: Tensor, num_steps: int | None = None) -> list[Tensor]:
    """The states h⁰ … hᵀ of a packed batch at these flat positions, (positions, d) each. Batch and positions are on the
    host."""
    at = to_device(positions, model.device)
    states = model.base_model(
        input_ids=to_device(batch.input_ids, model.device)[None],
        position_ids=to_device(batch.position_ids, model.device)[None],
        cu_seqlens=to_device(batch.cu_seqlens, model.device),
        num_steps=num_steps,
        output_states=True,
    ).states
    return [h[0].index_select(0, at) for h in states]
