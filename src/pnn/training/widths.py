"""Rates that carry over widths: what is found at `training.base_width` holds at the model's own width, m times as large.

    AdamW   matrices that sum over the width    rate / m
    Muon    matrices of blocks                  rate / √m
    both    everything else                     rate

Updates are to change what a layer puts out by as much at every width. AdamW moves every entry of a matrix by about the rate,
and, because a gradient is a sum of few outer products, in a direction that agrees across the width: the output moves by m times
as much. Muon's step is orthogonal, times 0.2 √max(rows, columns): its singular values grow as √m. Embeddings, norms, biases and
single numbers sum over nothing. A tied vocabulary matrix counts as the head's, which sums over the width.

Weight decay takes rate · λ of a matrix at every update; λ grows as the rate shrinks, so that the same share goes.

Three things are the config's. Matrices begin as N(0, σ²): `model.initializer_range` has to fall as 1/√m. Attention heads must
keep their size, so that there are m times as many. And the vocabulary matrix should be tied: one of its own would have to begin
smaller still, as 1/m, or states that move shift predictions by √m times as much.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pnn.config import TrainingConfig
from pnn.errors import UserError
from pnn.models.base import token_size


def times_as_wide(model: PreTrainedModel, training: TrainingConfig) -> float:
    """m. One where no base width is given."""
    if training.base_width is None:
        return 1.0
    width = getattr(model.config, "hidden_size", None)
    if not isinstance(width, int):
        raise UserError(f"training.base_width: {training.base_width}, but a {type(model).__name__} has no single width")
    if token_size(model.config) != width:
        raise UserError("training.base_width is for tables of tokens as wide as the states: leave model.embedding_size out")
    return width / training.base_width


def sums_over_width(model: nn.Module) -> set[Tensor]:
    """The matrices of linear layers, the head's among them."""
    return {module.weight for module in model.modules() if isinstance(module, nn.Linear | Conv1D)}


def carried(rate_scale: float, weight_decay: float) -> dict[str, float]:
    """What a group of parameters gets whose rate is so many times the run's."""
    return {"scale": rate_scale, "weight_decay": weight_decay / rate_scale}


def of_adamw(m: float) -> float:
    return 1 / m


def of_muon(m: float) -> float:
    return 1 / math.sqrt(m)
