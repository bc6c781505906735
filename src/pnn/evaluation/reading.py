"""Which text a RUN is measured on and how it is read, and what to change where a batch does not fit."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn import runs
from pnn.config import DataConfig, EvaluationConfig
from pnn.data import run_tokens
from pnn.data.corpora import open_source
from pnn.data.shards import Progress, TokenSet, prepare_source
from pnn.errors import UserError
from pnn.models.loading import Loaded, longest_input
from pnn.models.registry import kind_of

Sequences = tuple[TokenSet, NDArray[np.int64]]  # tokens, and which of their sequences


class Reading(NamedTuple):
    """The run folder that a checkpoint lies in, if any, and how text is read and measured: as its config says."""

    folder: Path | None
    data: DataConfig
    evaluation: EvaluationConfig


def reading_of(loaded: Loaded[Any]) -> Reading:
    folder = runs.run_of(loaded.checkpoint)
    if folder is None:
        return Reading(None, text_of_a_bare_checkpoint(loaded.model), EvaluationConfig())
    config = runs.read_config(folder)
    return Reading(folder, config.data, config.evaluation)


def text_of_a_bare_checkpoint(model: PreTrainedModel) -> DataConfig:
    """How text is read for a checkpoint without a run: as models of its kind are trained."""
    kind = kind_of(model)
    length = min(longest_input(model), 65535)
    return DataConfig(max_length=length, layout=kind.layout, filter="paper" if kind.masked else "none")


def whole_text(source: str, data: DataConfig, tokenizer: PreTrainedTokenizerFast, progress: Progress) -> Sequences:
    """All of a text that no run holds out."""
    tokens = prepare_source(open_source(source, data, "validation"), tokenizer, data, progress)
    return tokens, np.arange(len(tokens))


def text_to_measure(
    run: str | Path, loaded: Loaded[Any], reading: Reading, other: str | None, do: str, progress: Progress
) -> Sequences:
    """`other` text, or what the run holds out. `do`: what it is for, where there is neither."""
    if other is not None:
        return whole_text(other, reading.data, loaded.tokenizer, progress)
    if reading.folder is None:
        raise UserError(f"{runs.without_text(run, loaded.checkpoint)}: say what to {do} with --data")
    return run_tokens.held_out(reading.folder, reading.data, loaded.tokenizer, progress)


def smaller_batches(command: str, *models: str | Path, tokens: int) -> str:
    """What to change when a batch does not fit into memory."""
    named = shlex.join(map(str, models))
    return f"with batches of {tokens:,} tokens: pnn {command} {named} --batch-tokens {max(1, tokens // 2)} needs half"
