"""How text is read for a checkpoint without a run, and what to change where a batch does not fit."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from pnn.config import DataConfig
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
