"""What evaluating and filling share: how text is read for a model, and its states at chosen positions.

Batches are packed: sequences end to end, no padding computed. Everything that the host needs to know about a batch (where
its targets are, how many) it works out before the batch goes to the device, so that nothing in a loop over batches waits for
the device: the host prepares the next batch while the device is busy with this one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pnn.config import DataConfig
from pnn.data.batches import PackedBatch
from pnn.models.base import MaskedLMBase
from pnn.models.loading import longest_input
from pnn.models.registry import kind_of


def text_of_a_bare_checkpoint(model: PreTrainedModel) -> DataConfig:
    """How text is read for a checkpoint without a run: as models of its kind are trained."""
    kind = kind_of(model)
    length = min(longest_input(model), 65535)
    return DataConfig(max_length=length, layout=kind.layout, filter="paper" if kind.masked else "none")


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
