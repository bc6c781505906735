"""What can be taken out of a model, one description for all kinds.

    head     an attention head; where several query heads share keys and values, a key-value group with all of its queries
    neuron   one inner neuron of a feed-forward part: its rows of W_up (and W_gate), its column of W_down
    layer    attention, feed-forward part and norms together: one unit in each layer, index 0
    width    one dimension of the state that all layers read and write (`stream`): a unit of the whole model, in layer 0

A unit is (kind, layer, index). Its index is the place it had in the original model and stays its own when others go. Inside the
matrices units lie in the order of their indices. `unit_map` says which there are.

A score is a number for each unit, higher is more useful: `UnitScores.of[kind][layer]` is a tensor of shape (units of that kind
in that layer,), in the order of `unit_map(model, kind)[layer]`.

All kinds are *masked* by a gate g of zero, and *removing* them gives the same outputs:

    head, neuron   W_out · (g ⊙ inner) + b           in front of the output projection
    layer          h + g · (layer(h) − h)            a layer that is gone hands on what it got
    width          h = Σ over writes of g ⊙ write    the state is zero there
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.nn.packing import only_at
from pnn.plasticity.architectures import ALL_KINDS, HEAD, KINDS, LAYER, NEURON, WIDTH, Architecture, architecture_of
from pnn.plasticity.matrices import Projection, Stretch

UnitMap = list[list[int]]  # of one kind: the indices of each layer, in ascending order
Gates = dict[tuple[str, int], Tensor]  # by (kind, layer): a number for each unit


class Unit(NamedTuple):
    kind: str  # of ALL_KINDS
    layer: int
    index: int  # type: ignore[assignment]  # a tuple has a method of this name, which no unit needs


@dataclass(frozen=True)
class UnitScores:
    """How useful each unit is. Numbers of different kinds are compared by `budget`: they estimate the same thing, such as what
    leaving the unit out costs in loss."""

    of: Mapping[str, Sequence[Tensor]]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind in ALL_KINDS if kind in self.of)

    def check(self, model: PreTrainedModel) -> None:
        """Finite numbers, one for each unit that the model has."""
        for kind, layers in self.of.items():
            expected = [len(row) for row in unit_map(model, kind)]
            if [tuple(values.shape) for values in layers] != [(count,) for count in expected]:
                raise UserError(f"expected one score for each {kind} of the model")
            for layer, values in enumerate(layers):
                if not bool(torch.isfinite(values).all()):
                    raise UserError(f"a {kind} of layer {layer} has a score that is not a number: the model's numbers overflow")


# Which there are ------------------------------------------------------------------------------------------------------


def unit_map(model: PreTrainedModel, kind: str) -> UnitMap:
    """The units of a kind in each layer, or in one row for the whole model. Layers count as in the original model."""
    architecture = architecture_of(model)
    blocks = architecture.blocks(model)
    gone = set(getattr(model.config, "gone_layers", None) or ())
    if kind == LAYER:
        return [[] if layer in gone else [0] for layer in range(len(blocks))]
    if kind == WIDTH:
        return [_dimensions(model)]
    recorded = getattr(model.config, f"{kind}_map", None)
    original = range(architecture.original(kind, model.config))
    found = [[] if layer in gone else list(original) for layer in range(len(blocks))]
    if recorded is not None:
        found = [list(row) for row in recorded]
    if [len(row) for row in found] != [architecture.parts(kind, block)[-1].count for block in blocks]:
        raise UserError(f"the model's matrices do not have the {kind}s that its config names: something else changed it")
    return found


def _dimensions(model: PreTrainedModel) -> list[int]:
    architecture = architecture_of(model)
    there = architecture.stream(model).width
    recorded = getattr(model.config, "width_map", None)
    found = list(range(architecture.original(WIDTH, model.config))) if recorded is None else list(recorded)
    if len(found) != there:
        raise UserError(
            f"the model's matrices have {there} dimensions, but its config names {len(found)}: something else changed it"
        )
    return found


def units(model: PreTrainedModel, kinds: Sequence[str] = KINDS) -> list[Unit]:
    return [Unit(kind, layer, index) for kind in kinds for layer, row in enumerate(unit_map(model, kind)) for index in row]


def check_units(model: PreTrainedModel, asked: Iterable[Any]) -> list[Unit]:
    """These units, sorted, each once; an error names the first that the model does not have. A pair is a head."""
    found = {_unit(one) for one in asked}
    present = {kind: set(units(model, [kind])) for kind in {unit.kind for unit in found}}
    for unit in sorted(found):
        if unit not in present[unit.kind]:
            raise UserError(f"the model has no {unit.kind} {unit.index} in layer {unit.layer}")
    return sorted(found)


def check_places(model: PreTrainedModel, asked: Iterable[Any], most: int) -> list[Unit]:
    """These places for new heads and neurons, sorted. `most`: times the original number that a layer may have of each."""
    found = sorted({_unit(one) for one in asked})
    if any(unit.kind not in (HEAD, NEURON) for unit in found):
        raise UserError("only heads and neurons can grow: layers and dimensions of the width that are gone stay gone")
    architecture, layers = architecture_of(model), unit_map(model, LAYER)
    present = {kind: set(units(model, [kind])) for kind in {unit.kind for unit in found}}
    for unit in found:
        refused = f"no {unit.kind} {unit.index} can grow in layer {unit.layer}"
        if unit in present[unit.kind]:
            raise UserError(f"{refused}: it is there already")
        room = range(most * architecture.original(unit.kind, model.config))
        if not (0 <= unit.layer < len(layers) and layers[unit.layer] and unit.index in room):
            raise UserError(f"{refused}: layers have up to {most} times their original {unit.kind}s")
    return found


def _unit(one: Any) -> Unit:
    try:
        kind, layer, index = (HEAD, *one) if len(one) == 2 else one
        unit = Unit(kind, int(layer), int(index))
        if not isinstance(kind, str):
            raise TypeError
    except (TypeError, ValueError):
        raise UserError(f"a head is a pair (layer, index), any unit (kind, layer, index), not {one!r}") from None
    if unit.kind not in ALL_KINDS:
        raise UserError(f"unknown kind of unit {unit.kind!r}: expected one of {', '.join(ALL_KINDS)}")
    return unit


def stretches_of(model: PreTrainedModel, asked: Iterable[Unit]) -> dict[Unit, list[Stretch]]:
    """What each of these heads and neurons owns: its part of every weight and bias."""
    architecture = architecture_of(model)
    blocks, places, found = architecture.blocks(model), {}, {}
    for unit in asked:
        if unit.kind not in places:  # once for all: a layer may have thousands of neurons
            rows = unit_map(model, unit.kind)
            places[unit.kind] = [{index: position for position, index in enumerate(row)} for row in rows]
        position = places[unit.kind][unit.layer][unit.index]
        parts = architecture.parts(unit.kind, blocks[unit.layer])
        found[unit] = [one for part in parts for one in part.stretches(position)]
    return found


def parameters_of(model: PreTrainedModel, kind: str, layer: int) -> int:
    """Parameters of each unit of this kind in this layer: all of them are alike."""
    architecture = architecture_of(model)
    if kind == WIDTH:
        return architecture.stream(model).held_by(model)
    block = architecture.blocks(model)[layer]
    if kind == LAYER:
        return sum(parameter.numel() for parameter in block.parameters())
    count = 0
    for part in architecture.parts(kind, block):
        if part.count:
            count += (part.weight.numel() + (0 if part.bias is None else part.bias.numel())) // part.count
    return count


def parameters_by_dimension(model: PreTrainedModel, kind: str, layer: int) -> int:
    """How many parameters of each such unit go with one dimension of the width, if that goes too."""
    architecture = architecture_of(model)
    stream, block = architecture.stream(model), architecture.blocks(model)[layer]
    if kind == LAYER:
        return stream.held_by(block)
    return sum(part.weight.numel() // part.count // stream.width for part in architecture.parts(kind, block) if part.count)


# Changing which there are ---------------------------------------------------------------------------------------------


def rearrange(model: PreTrainedModel, maps: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Change the model in place so that its layers have these units; heads and neurons that are new are zero. Kinds that are
    not named stay as they are. The config says what was done: `head_map`, and where they differ from the original
    `neuron_map`, `gone_layers` and `width_map`."""
    architecture = architecture_of(model)
    blocks = architecture.blocks(model)
    layers = maps.get(LAYER, unit_map(model, LAYER))
    gone = [layer for layer, row in enumerate(layers) if not row]
    back = sorted(set(getattr(model.config, "gone_layers", None) or ()) - {*gone})
    if back:
        raise UserError(f"layer {back[0]} was removed, and whole layers cannot grow again")
    for kind in (HEAD, NEURON):
        old_map = unit_map(model, kind)
        new_map = [list(row) for row in maps.get(kind, old_map)]
        for layer, (block, old) in enumerate(zip(blocks, old_map, strict=True)):
            if layer in gone:
                new_map[layer] = []
            if new_map[layer] != old:
                _rearrange_block(architecture, kind, block, old, new_map[layer])
        original = list(range(architecture.original(kind, model.config)))
        differs = kind == HEAD or any(row != original for row in new_map)
        if differs or getattr(model.config, f"{kind}_map", None) is not None:
            setattr(model.config, f"{kind}_map", new_map if differs else None)
    for layer in gone:
        architecture.empty(blocks[layer])
    if gone:
        model.config.gone_layers = gone
    if WIDTH in maps:
        _narrow(model, list(maps[WIDTH][0]))


def _narrow(model: PreTrainedModel, kept: list[int]) -> None:
    architecture, old = architecture_of(model), _dimensions(model)
    if not {*kept} <= {*old}:
        raise UserError("removed dimensions of the width cannot grow again")
    if kept != old:
        architecture.stream(model).keep([old.index(one) for one in kept], architecture.original(WIDTH, model.config))
        model.config.width_map = kept


def _rearrange_block(architecture: Architecture, kind: str, block: nn.Module, old: list[int], new: list[int]) -> None:
    place = {index: position for position, index in enumerate(old)}
    positions = [place.get(index) for index in new]
    for part in architecture.parts(kind, block):
        part.rearrange(positions)
    if kind == HEAD:
        architecture.set_count(architecture.attention(block), len(new))


# Masking --------------------------------------------------------------------------------------------------------------


def open_gates(model: PreTrainedModel, kinds: Sequence[str]) -> Gates:
    """Ones, for every layer that has units of these kinds."""
    rows = [((kind, layer), row) for kind in kinds for layer, row in enumerate(unit_map(model, kind)) if row]
    return {at: torch.ones(len(row), device=model.device) for at, row in rows}


@contextmanager
def gated(model: PreTrainedModel, gates: Gates) -> Iterator[None]:
    """Multiply what units hand on: `gates[kind, layer]` has one number for each unit of that kind in that layer, or for each
    row of the batch and unit."""
    architecture = architecture_of(model)
    blocks = architecture.blocks(model)
    with ExitStack() as stack:
        for (kind, layer), gate in gates.items():
            if kind == WIDTH:
                for hook in architecture.stream(model).gate(gate):
                    stack.callback(hook.remove)
                continue
            block = blocks[layer]
            hook = gate_block(block, gate) if kind == LAYER else gate_part(architecture.parts(kind, block)[-1], gate)
            stack.callback(hook.remove)
        yield


def gate_part(output: Projection, gate: Tensor) -> Any:
    """The hook behind `gated` for heads and neurons; `gate` may be changed in place while it stands."""

    def multiply(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        factors = gate.repeat_interleave(output.width, dim=-1).to(args[0].dtype)
        if gate.dim() == 2:
            by_row = args[0].reshape(len(gate), -1, args[0].shape[-1]) * factors[:, None]
            return (by_row.view_as(args[0]), *args[1:])
        return (args[0] * factors, *args[1:])

    return output.module.register_forward_pre_hook(multiply)


def gate_block(block: nn.Module, gate: Tensor) -> Any:
    """The hook behind `gated` for whole layers."""

    def mix(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        before = args[0] if args else kwargs["hidden_states"]
        if output.shape != before.shape:  # our encoders' last layer, at some of the tokens
            before = only_at(before, args[2])
        factor = gate.to(output.dtype)
        change = output - before
        if gate.dim() == 2:
            return before + (change.reshape(len(gate), -1) * factor).view_as(change)
        return before + change * factor

    return block.register_forward_hook(mix, with_kwargs=True)


def masked(model: PreTrainedModel, asked: Iterable[Any]) -> Any:
    """A context in which these units hand on nothing. A pair (layer, index) is a head."""
    maps: dict[str, UnitMap] = {}
    gates: Gates = {}
    for kind, layer, index in check_units(model, asked):
        row = maps.setdefault(kind, unit_map(model, kind))[layer]
        gates.setdefault((kind, layer), torch.ones(len(row), device=model.device))[row.index(index)] = 0
    return gated(model, gates)
