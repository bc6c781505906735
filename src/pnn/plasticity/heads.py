"""A model's heads: which it has, what each owns, and how to silence one.

A head is a pair (layer, index). Its index is the place it had in the original model and stays its own when others go:
after (0, 1) is removed from three heads, layer 0 has heads 0 and 2. Indices from the original number on are heads that were
grown beyond it. Inside the matrices heads lie in the order of their indices.

Attention of a layer is  W_o · concat_i context_i + b_o,  so a head is gone when its context is multiplied by zero: that is
*masking*, a hook in front of the output projection, and it costs as much as before. *Removing* cuts the head's rows and columns
out of the matrices; it gives the same outputs, and `tests/plasticity` holds the two against each other.

Where several query heads share keys and values, a "head" here is one key/value head with all of its queries. PNN's layers are
its refiners: a head of one works at every step that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.matrices import Projection, Stretch

Head = tuple[int, int]


def head_map(model: PreTrainedModel) -> list[list[int]]:
    """The heads of each layer, in ascending order."""
    architecture = architecture_of(model)
    counts = [architecture.output(attention).count for attention in architecture.attentions(model)]
    recorded = getattr(model.config, "head_map", None)
    layers = [list(range(count)) for count in original_counts(model)] if recorded is None else [list(row) for row in recorded]
    if [len(layer) for layer in layers] != counts:
        raise UserError("the model's matrices do not have the heads that its config tells of: it was changed by other means")
    return layers


def original_counts(model: PreTrainedModel) -> list[int]:
    """How many heads each layer had before any was removed or grown."""
    architecture = architecture_of(model)
    return [architecture.original_count(model.config)] * len(architecture.attentions(model))


def heads(model: PreTrainedModel) -> list[Head]:
    """All heads that a model has, as (layer, index)."""
    return [(layer, index) for layer, row in enumerate(head_map(model)) for index in row]


def check_present(model: PreTrainedModel, asked: Iterable[Head]) -> list[Head]:
    """These heads, sorted; an error names the first that the model does not have."""
    return sorted(_pairs(asked, set(heads(model)), "the model has no head {} in layer {}"))


def check_absent(model: PreTrainedModel, asked: Iterable[Head], most: int) -> list[Head]:
    """These places for new heads, sorted. `most`: times the original number of heads that a layer may have."""
    present = set(heads(model))
    room = {(layer, index) for layer, count in enumerate(original_counts(model)) for index in range(most * count)}
    places = _pairs(
        asked, room | present, f"no head {{}} can grow in layer {{}}: layers have up to {most} times their original heads"
    )
    taken = sorted(places & present)
    if taken:
        raise UserError(f"no head {taken[0][1]} can grow in layer {taken[0][0]}: it is there already")
    return sorted(places)


def _pairs(asked: Iterable[Head], allowed: set[Head], problem: str) -> set[Head]:
    found = set()
    for head in asked:
        try:
            layer, index = (int(number) for number in head)
        except (TypeError, ValueError):
            raise UserError(f"a head is a pair (layer, index), not {head!r}") from None
        if (layer, index) not in allowed:
            raise UserError(problem.format(index, layer))
        found.add((layer, index))
    return found


def stretches(model: PreTrainedModel, head: Head) -> list[Stretch]:
    """What a head owns: its part of every weight and bias."""
    architecture, (layer, index) = architecture_of(model), head
    position = head_map(model)[layer].index(index)
    return [one for part in architecture.projections(architecture.attentions(model)[layer]) for one in part.stretches(position)]


def rearrange(model: PreTrainedModel, new_map: Sequence[Sequence[int]]) -> None:
    """Change the matrices in place so that layers have these heads; those that are new are zero. `config.head_map` says so."""
    architecture, old_map = architecture_of(model), head_map(model)
    for attention, old, new in zip(architecture.attentions(model), old_map, new_map, strict=True):
        if list(new) != old:
            positions = [old.index(index) if index in old else None for index in new]
            for part in architecture.projections(attention):
                part.rearrange(positions)
            architecture.set_count(attention, len(new))
    model.config.head_map = [list(row) for row in new_map]


@contextmanager
def gated(model: PreTrainedModel, gates: Mapping[int, Tensor]) -> Iterator[None]:
    """Multiply what heads hand to the output projection: `gates[layer]` has one number for each head of that layer, or for
    each row and head."""
    architecture = architecture_of(model)
    attentions = architecture.attentions(model)
    with ExitStack() as stack:
        for layer, gate in gates.items():
            stack.callback(gate_layer(architecture.output(attentions[layer]), gate).remove)
        yield


def gate_layer(output: Projection, gate: Tensor) -> Any:
    """The hook behind `gated`; `gate` may be changed in place while it stands."""

    def multiply(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        factors = gate.repeat_interleave(output.width, dim=-1).to(args[0].dtype)
        if gate.dim() == 2:
            by_row = args[0].reshape(len(gate), -1, args[0].shape[-1]) * factors[:, None]
            return (by_row.view_as(args[0]), *args[1:])
        return (args[0] * factors, *args[1:])

    return output.module.register_forward_pre_hook(multiply)


def masked(model: PreTrainedModel, asked: Iterable[Head]) -> Any:
    """A context in which these heads hand on zeros."""
    layers = head_map(model)
    gates: dict[int, Tensor] = {}
    for layer, index in check_present(model, asked):
        gates.setdefault(layer, torch.ones(len(layers[layer]), device=model.device))[layers[layer].index(index)] = 0
    return gated(model, gates)
