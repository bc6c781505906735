"""Removing units: rows and columns are cut out of the matrices, so the model becomes smaller and faster.

    head     W_q, W_k, W_v (and their biases) lose the head's rows, W_o its columns; b_o stays
    neuron   W_up, W_gate (and their biases) lose a row, W_down a column; its bias stays
    layer    everything in it goes, and it hands on what it gets
    width    every matrix that reads or writes the state loses a row or a column, every norm a weight (`stream`)

The outputs are those of the same model with the units masked, to rounding. Layers may keep different numbers of each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.plasticity.architectures import HEAD, LAYER, NEURON, WIDTH
from pnn.plasticity.models import as_plastic
from pnn.plasticity.units import UnitMap, check_units, rearrange, unit_map

M = TypeVar("M", bound=PreTrainedModel)


def reorganised(model: M, maps: Mapping[str, UnitMap]) -> M:
    """A copy of the model with these units in its layers; new ones are zero, kinds that are not named stay."""
    other = copy.deepcopy(model)
    rearrange(other, maps)
    as_plastic(other)
    return other


def prune(model: M, units: Iterable[Any], *, whole_layers: bool = False) -> M:
    """A smaller copy of the model, without these units (kind, layer, index); a pair (layer, index) is a head. A layer keeps at
    least one head unless `whole_layers` allows it to lose all (its attention then adds the bias of W_o and nothing else), and
    one neuron. A layer that is itself among the units goes with all it has."""
    return reorganised(model, maps_without(model, units, whole_layers=whole_layers))


def maps_without(model: PreTrainedModel, units: Iterable[Any], *, whole_layers: bool = False) -> dict[str, UnitMap]:
    """What `prune` leaves of each kind."""
    gone = check_units(model, units)
    out = {unit.layer for unit in gone if unit.kind == LAYER}
    kept = {}
    for kind in (LAYER, HEAD, NEURON):
        lost = {(unit.layer, unit.index) for unit in gone if unit.kind == kind}
        rows = unit_map(model, kind)
        kept[kind] = [
            [] if layer in out else [index for index in row if (layer, index) not in lost] for layer, row in enumerate(rows)
        ]
        if not any(kept[kind]):
            raise UserError(f"pruning these {kind}s would leave none in the whole model")
        empty = [layer for layer, row in enumerate(rows) if row and not kept[kind][layer] and layer not in out]
        if empty and not (kind == HEAD and whole_layers):
            instead = "whole_layers=True allows it" if kind == HEAD else "prune the whole layer instead"
            raise UserError(f"pruning these {kind}s would leave none in layer {empty[0]} ({instead})")
    thinner = {unit.index for unit in gone if unit.kind == WIDTH}
    if thinner:
        kept[WIDTH] = [[index for index in unit_map(model, WIDTH)[0] if index not in thinner]]
        if not kept[WIDTH][0]:
            raise UserError("pruning these dimensions would leave the model no width at all")
    return kept
