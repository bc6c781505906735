"""Removing heads: rows and columns are cut out of the matrices, so the model becomes smaller and faster.

    W_q, W_k, W_v (and their biases) lose the head's rows, W_o its columns; b_o stays

The outputs are those of the same model with the head masked, to rounding. Layers may keep different numbers of heads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeVar

from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.plasticity.heads import Head, check_present, head_map, rearrange
from pnn.plasticity.models import as_plastic

M = TypeVar("M", bound=PreTrainedModel)


def reorganised(model: M, new_map: list[list[int]]) -> M:
    """A copy of the model with these heads in its layers; new ones are zero."""
    other = copy.deepcopy(model)
    rearrange(other, new_map)
    as_plastic(other)
    return other


def prune(model: M, heads: Iterable[Head], *, whole_layers: bool = False) -> M:
    """A smaller copy of the model, without these heads. A layer keeps at least one unless `whole_layers` allows it to lose all:
    its attention then adds the bias of W_o and nothing else."""
    gone = set(check_present(model, heads))
    kept = [[index for index in row if (layer, index) not in gone] for layer, row in enumerate(head_map(model))]
    if not any(kept):
        raise UserError("pruning these heads would leave none in the whole model")
    empty = [layer for layer, row in enumerate(kept) if not row and any(at == layer for at, _ in gone)]
    if empty and not whole_layers:
        raise UserError(f"pruning these heads would leave none in layer {empty[0]} (whole_layers=True allows it)")
    return reorganised(model, kept)
