"""Plasticity while a model trains: it begins with a share of its heads and neurons, and now and then some go and others come.

    size    after change i of n:  start + (end − start) · i / n  of the places that the `model` section has, of each kind
    prune   `turnover` of those that are there, the least useful first; more where the model is to become smaller
    grow    up to the size, in places that are free

No text is read for it: the optimiser's running means m of the gradient and v of its square say what is needed. With W a unit's
part of the matrix that leads back to the state, a unit is worth

    fisher      Σ W² v       what leaving it out costs, to second order, with the diagonal of the Fisher matrix (times 2)
    gradient    |Σ W m|      the slope of its gate (`units`), averaged over recent updates: what it costs to first order
    magnitude   Σ W²
    random      by seed and step

New units get places by lot: all free ones alike (`random`), or each in proportion to √(mean of Σ v over its layer's units),
which is how much the layer is asked to put out something else (`gradient`).

A new unit's inputs are as spread out as its layer's; its biases and W are zero. So the model computes what it did, and W learns
first. The optimiser keeps what it knows of all that stays. Of new units m is zero and v the mean of their layer's: with zeros
Adam's steps, m / √v, would be up to 6.6 times as long as the rate says, because v fills more slowly than m. A running average
of the weights begins anew for them.

Units go and come in portions, a head or some neighbouring neurons (`budget.group_of`), and each layer keeps one of each kind.
All of it follows from weights, moments, seed and step, so that a resumed run changes as one that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pnn.config import RunConfig
from pnn.errors import UserError
from pnn.models.plastic import PlasticConfig
from pnn.plasticity.architectures import HEAD, NEURON, architecture_of
from pnn.plasticity.budget import group_of
from pnn.plasticity.growth import start_inputs
from pnn.plasticity.matrices import Projection
from pnn.plasticity.measure import training_flops_per_token
from pnn.plasticity.models import as_plastic
from pnn.plasticity.units import UnitMap, rearrange, unit_map
from pnn.training.optim import moments, replace_parameters

Portion = tuple[int, int]  # (layer, place)


class InTraining:
    """What the training loop calls between updates."""

    def __init__(self, config: RunConfig, model: PreTrainedModel, lengths: NDArray[np.int64], updates: int):
        """Makes the model as small as it begins. `lengths`: of the sequences that it learns from."""
        assert config.plasticity is not None
        asked, architecture = config.plasticity, architecture_of(model)
        self.asked, self.model, self.seed = asked, model, config.training.seed
        last = math.floor(asked.until * updates)
        if last < asked.changes:
            raise UserError(
                f"plasticity.changes: {asked.changes}, but plasticity.until leaves {last:,} of the run's {updates:,} updates "
                "for them"
            )
        self.steps = [math.floor(last * i / asked.changes) for i in range(1, asked.changes + 1)]
        self.layers = len(architecture.blocks(model))
        self.units = {kind: architecture.original(kind, model.config) for kind in asked.kinds}  # of each layer
        self.group = {kind: group_of(count) if kind == NEURON else 1 for kind, count in self.units.items()}
        starts = {kind: self._first(kind) for kind in asked.kinds}
        rearrange(model, starts)
        as_plastic(model)
        counted = lengths.astype(np.float64)
        self.length = float((counted**2).sum() / counted.sum())  # of the sequence that a token lies in, on average
        self.target_share = config.data.masked_in_training
        self.flops_per_token = self._flops()

    def _flops(self) -> float:
        return training_flops_per_token(self.model, self.length, self.target_share)

    def _places(self, kind: str) -> int:
        """Of each layer."""
        return math.ceil(self.units[kind] / self.group[kind])

    def _size(self, kind: str, share: float) -> int:
        """So many portions of a kind, in all layers together."""
        return max(self.layers, round(share * self.layers * self._places(kind)))

    def _first(self, kind: str) -> UnitMap:
        """What the model begins with: as many in each layer, which at random weights are all alike."""
        each, more = divmod(self._size(kind, self.asked.start), self.layers)
        return self._map(kind, {(layer, place) for layer in range(self.layers) for place in range(each + (layer < more))})

    def _map(self, kind: str, portions: set[Portion]) -> UnitMap:
        size, most = self.group[kind], self.units[kind]
        rows: UnitMap = [[] for _ in range(self.layers)]
        for layer, place in sorted(portions):
            rows[layer] += range(place * size, min((place + 1) * size, most))
        return rows

    def _portions(self, kind: str) -> set[Portion]:
        return {(layer, index // self.group[kind]) for layer, row in enumerate(unit_map(self.model, kind)) for index in row}

    def _count(self, kind: str) -> int:
        return sum(map(len, unit_map(self.model, kind)))

    # Changes ----------------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        return step in self.steps

    def change(self, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
        """The change after this update, in place. Returns what metrics.jsonl says of it."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        done = (self.steps.index(step) + 1) / self.asked.changes
        share = self.asked.start + (self.asked.end - self.asked.start) * done
        row: dict[str, Any] = {"step": step}
        for kind in self.asked.kinds:
            present, size = self._portions(kind), self._size(kind, share)
            out = self._least_useful(kind, optimizer, max(round(self.asked.turnover * len(present)), len(present) - size), draw)
            kept = present - out
            new = self._where(kind, optimizer, kept, max(0, size - len(kept)), draw)
            counts = [self._count(kind)]
            for portions in (kept, kept | new):  # apart: a place that is emptied and filled again gets a new unit
                reorganise(self.model, optimizer, kind, self._map(kind, portions), draw)
                counts.append(self._count(kind))
            before, between, after = counts
            row |= {f"{kind}s": after, f"{kind}s_pruned": before - between, f"{kind}s_grown": after - between}
        self.flops_per_token = self._flops()
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return row | {"parameters": parameters, "training_flops_per_token": self.flops_per_token}

    def resume(self, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
        """Give the model the shape that it has in a checkpoint. Weights and moments are read afterwards."""
        config: Any = PlasticConfig.from_pretrained(checkpoint).original_config()
        maps = {HEAD: config.head_map, NEURON: config.neuron_map}
        for kind in self.asked.kinds:
            everything = [list(range(self.units[kind]))] * self.layers
            reorganise(self.model, optimizer, kind, maps[kind] or everything, torch.Generator())
        self.flops_per_token = self._flops()

    def _least_useful(self, kind: str, optimizer: torch.optim.Optimizer, count: int, draw: torch.Generator) -> set[Portion]:
        worth = self._worth(kind, optimizer, draw)
        left = [len({place for layer, place in worth if layer == at}) for at in range(self.layers)]
        out: set[Portion] = set()
        for layer, place in sorted(worth, key=lambda portion: (worth[portion], portion)):
            if len(out) < count and left[layer] > 1:
                left[layer] -= 1
                out.add((layer, place))
        return out

    def _worth(self, kind: str, optimizer: torch.optim.Optimizer, draw: torch.Generator) -> dict[Portion, float]:
        worth = dict.fromkeys(sorted(self._portions(kind)), 0.0)
        if self.asked.prune_by == "random":
            return dict(zip(worth, torch.rand(len(worth), generator=draw).tolist(), strict=True))
        for layer, (row, output) in enumerate(zip(unit_map(self.model, kind), self._outputs(kind), strict=True)):
            weight, (mean, square) = output.weight.detach(), moments(optimizer, output.weight)
            entries = {"fisher": weight.square() * square, "gradient": weight * mean, "magnitude": weight.square()}
            of_units = _by_unit(output, entries[self.asked.prune_by]).abs().tolist()
            for index, value in zip(row, of_units, strict=True):
                worth[layer, index // self.group[kind]] += value
        if not all(map(math.isfinite, worth.values())):
            raise UserError(f"the {self.asked.prune_by} of a {kind} is not a number: try a lower training.learning_rate")
        return worth

    def _where(
        self, kind: str, optimizer: torch.optim.Optimizer, taken: set[Portion], count: int, draw: torch.Generator
    ) -> set[Portion]:
        """So many free places, drawn without putting back in proportion to their layers' wishes: the highest of
        ln(wish) − ln(−ln(u)), u uniform."""
        free = [(layer, place) for layer in range(self.layers) for place in range(self._places(kind))]
        free = [portion for portion in free if portion not in taken]
        wishes = torch.ones(self.layers)
        if self.asked.grow_by == "gradient":
            squares = [_by_unit(output, moments(optimizer, output.weight)[1]).mean() for output in self._outputs(kind)]
            wishes = torch.stack(squares).float().cpu().sqrt().clamp(min=1e-30)
        lots = torch.rand(len(free), generator=draw).clamp(min=1e-9)
        order = (wishes[[layer for layer, _ in free]].log() - (-lots.log()).log()).argsort(descending=True, stable=True)
        return {free[at] for at in order[:count].tolist()}

    def _outputs(self, kind: str) -> list[Projection]:
        architecture = architecture_of(self.model)
        return [architecture.parts(kind, block)[-1] for block in architecture.blocks(self.model)]


def _by_unit(output: Projection, entries: Tensor) -> Tensor:
    """Sums of what each unit owns of something of an output matrix's shape."""
    return entries.float().unflatten(output.dim, (output.count, output.width)).movedim(output.dim, 0).flatten(1).sum(1)


# Surgery that the optimiser survives ----------------------------------------------------------------------------------


@torch.no_grad()
def reorganise(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, kind: str, new_map: UnitMap, generator: torch.Generator
) -> None:
    """Give the layers of a model in training these units, in place. The optimiser's state goes along with what stays."""
    architecture = architecture_of(model)
    layers = zip(architecture.blocks(model), unit_map(model, kind), new_map, strict=True)
    changed = [(block, _positions(old, new)) for block, old, new in layers if old != new]
    parts = [(part, positions) for block, positions in changed for part in architecture.parts(kind, block)]
    spreads = [part.spreads() for part, _ in parts]
    before = [(part, positions, name, getattr(part, name)) for part, positions in parts for name in ("weight", "bias")]
    before = [one for one in before if one[-1] is not None]
    states = [_carried(optimizer, part, positions, old) for part, positions, _, old in before]
    rearrange(model, {kind: new_map})
    for (part, positions), spread in zip(parts, spreads, strict=True):
        for at in _new(positions):
            start_inputs(part.stretches(at), spread, generator)
    successors = {}
    for (part, positions, name, old), state in zip(before, states, strict=True):
        successors[old] = (getattr(part, name), state)
        if "average" in state:
            for one in (s for at in _new(positions) for s in part.stretches(at) if s.parameter is getattr(part, name)):
                one.of(state["average"]).copy_(one.view())
    replace_parameters(optimizer, successors)


def _positions(old: list[int], new: list[int]) -> list[int | None]:
    """Where each of the new units lay before; None where it was not there."""
    place = {index: position for position, index in enumerate(old)}
    return [place.get(index) for index in new]


def _new(positions: Sequence[int | None]) -> list[int]:
    return [at for at, old in enumerate(positions) if old is None]


def _carried(
    optimizer: torch.optim.Optimizer, part: Projection, positions: Sequence[int | None], parameter: Tensor
) -> dict[str, Tensor]:
    """What the optimiser knows of a parameter, for the units that it will have. Adam's count of updates is one number."""
    return {
        key: part.rearranged(value, positions, mean=key == "exp_avg_sq") if value.shape == parameter.shape else value
        for key, value in optimizer.state.get(parameter, {}).items()
    }
