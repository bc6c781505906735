"""How much can a masked model leave out if it may lose so many points? `pnn calibrate` finds that and stores it in the model's
config (`evaluation/choosing`); of fine-tuned classifiers see `finetuning/calibrate`.

Both halves, the one that chooses and the one that checks, are text that the run held out; texts that its config evaluates on
besides (`evaluation.sets`) are never read here, so they stay a test. `fill`, `evaluate`, `finetune` and `export` follow what is
stored. An ONNX graph has its number of steps built in, and no token of it halts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pnn.data.batches import evaluation_batches, special_tokens
from pnn.data.shards import Progress, TokenSet, quietly
from pnn.evaluation.choosing import MASKED, TIMED_TOKENS, Batch, check_can_be_calibrated, choose, folder_of, store
from pnn.evaluation.reading import reading_of, text_to_measure
from pnn.models.base import MaskedLMBase
from pnn.models.loading import load_run, read_config


def calibrate(
    model: MaskedLMBase,
    tokens: TokenSet,
    sequences: NDArray[np.int64],
    lose: float,
    *,
    mask_probability: float = 0.15,
    mask_seed: int = 0,
    batch_tokens: int = 16384,
    precision: torch.dtype = torch.float32,
    progress: Progress = quietly,
) -> dict[str, Any]:
    """The fastest setting of a PNN that loses at most `lose` of accuracy (0.003: 0.3 points), and what it costs. The model
    stays as it is: `found["changes"]` are the keys of its config to set."""
    check_can_be_calibrated(model.config, lose)
    special = special_tokens(tokens.tokenizer())
    batches = []
    for packed, indices in evaluation_batches(tokens, sequences, batch_tokens):
        masked = packed.mask(special, mask_probability, mask_seed)
        of_token = np.repeat(indices, packed.cu_seqlens.diff().numpy())
        hidden = replace(packed, input_ids=masked.input_ids)
        batches.append(Batch(hidden, masked.positions, masked.labels, of_token[masked.positions.numpy()]))
    return choose(model, batches, lose, MASKED, precision, progress)


def calibrate_run(
    run: str | Path,
    lose: float,
    *,
    progress: Progress,
    data: str | None = None,
    batch_tokens: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Calibrate RUN's best checkpoint on its held-out text, or on `data`, and store the setting in its config.json."""
    folder = folder_of(run)
    check_can_be_calibrated(read_config(folder), lose)
    loaded = load_run(folder, device=device, of_decoders="calibrate takes those and classifiers")
    reading = reading_of(loaded)
    tokens, sequences = text_to_measure(run, loaded, reading, data, "calibrate it on", progress)
    found = calibrate(
        loaded.model,
        tokens,
        sequences,
        lose,
        mask_probability=reading.data.mask_probability,
        mask_seed=reading.evaluation.mask_seed,
        batch_tokens=batch_tokens or min(reading.evaluation.batch_tokens, TIMED_TOKENS),
        precision=loaded.precision,
        progress=progress,
    )
    store(folder, found["changes"])
    users = "fill, evaluate, finetune and export"
    return {"checkpoint": str(folder), "source": tokens.manifest["name"], "users": users, **found}
