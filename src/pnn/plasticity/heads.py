"""A model's heads: which it has, and what each owns. What heads share with other units is in `units`.

A head is a pair (layer, index). Its index is the place it had in the original model and stays its own when others go:
after (0, 1) is removed from three heads, layer 0 has heads 0 and 2. Indices from the original number on are heads that were
grown beyond it.

Attention of a layer is  W_o · concat_i context_i + b_o,  so a head is gone when its context is multiplied by zero: that is
*masking*, a hook in front of the output projection, and it costs as much as before. *Removing* cuts the head's rows and columns
out of the matrices; it gives the same outputs, and `tests/plasticity` holds the two against each other.

Where several query heads share keys and values, a "head" here is one key/value head with all of its queries. PNN's layers are
its refiners: a head of one works at every step that uses it.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from pnn.plasticity.architectures import HEAD, LAYER, architecture_of
from pnn.plasticity.matrices import Stretch
from pnn.plasticity.units import Unit, stretches_of, unit_map

Head = tuple[int, int]


def head_map(model: PreTrainedModel) -> list[list[int]]:
    """The heads of each layer, in ascending order."""
    return unit_map(model, HEAD)


def original_counts(model: PreTrainedModel) -> list[int]:
    """How many heads each layer had before any was removed or grown."""
    architecture = architecture_of(model)
    return [architecture.original(HEAD, model.config)] * len(architecture.blocks(model))


def room_for_heads(model: PreTrainedModel) -> dict[int, int]:
    """The original number of heads of each layer that is not gone."""
    return {layer: count for layer, count in enumerate(original_counts(model)) if unit_map(model, LAYER)[layer]}


def heads(model: PreTrainedModel) -> list[Head]:
    """All heads that a model has, as (layer, index)."""
    return [(layer, index) for layer, row in enumerate(head_map(model)) for index in row]


def stretches(model: PreTrainedModel, head: Head) -> list[Stretch]:
    """What a head owns: its part of every weight and bias."""
    unit = Unit(HEAD, *head)
    return stretches_of(model, [unit])[unit]
