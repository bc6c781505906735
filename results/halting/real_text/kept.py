"""A way of stopping early, a model that can take it, and what `measure.py ways` keeps for the other parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from pnn import runs
from pnn.data.batches import pack
from pnn.errors import UserError
from pnn.evaluation.choosing import Batch, Setting, in_force
from pnn.models.loading import LoadedRun, load_run
from pnn.results import Json

TEXT = "wikitext_tokens"
FAMILIES = {None: "dial", "context": "two_dials"}  # of a setting's criterion; others are named after it
FIXED = ("dial", "two_dials")  # who takes how many steps is known before the pass


@dataclass(frozen=True)
class Way:
    name: str
    family: str
    changes: dict[str, Any]  # of the model's config
    unit: str | None = None
    seed: int | None = None
    cost: float | None = None

    @staticmethod
    def of(setting: Setting, unit: str | None = None, **more: Any) -> Way:
        criterion = (setting.changes["halt"] or {}).get("criterion")
        name = setting.said if unit is None else f"{unit}, {setting.said}"
        return Way(name, FAMILIES.get(criterion, criterion), setting.changes, unit, **more)

    @staticmethod
    def of_json(row: Json) -> Way:
        return Way(**{field.name: row[field.name] for field in fields(Way)})


class Halting:
    """A model whose units can be exchanged."""

    def __init__(self, loaded: LoadedRun, units: dict[str, dict[str, Tensor]] | None = None):
        self.model, self.precision, self.tokenizer = loaded.model.eval(), loaded.precision, loaded.tokenizer
        device = self.model.device  # nothing is sent there in a pass that is timed
        self.units = {unit: {key: x.to(device) for key, x in one.items()} for unit, one in (units or {}).items()}
        if units:  # before a pass is recorded: the unit is one of the model's weights
            encoder: Any = self.model.base_model
            encoder.set_halt({"criterion": "learned", "threshold": 0.5})

    def computing(self) -> torch.autocast:
        """Weights are cast in every pass, as recorded ones do: nobody is faster because another pass has cast them before."""
        enabled = self.precision != torch.float32
        return torch.autocast(self.model.device.type, self.precision, enabled=enabled, cache_enabled=False)

    def take(self, way: Way) -> Any:
        """A context in which the model computes this way."""
        if way.unit is not None:
            encoder: Any = self.model.base_model
            encoder.criterion.load_state_dict(self.units[way.unit])
        return in_force(self.model, Setting(way.changes, way.name))


def left_by_ways(model: Path, home: Path) -> tuple[Halting, list[Json], dict[str, Tensor]]:
    """For the other parts: the model with its units, all ways as they are described, and sequences of both texts."""
    units: dict[str, dict[str, Tensor]] = {}
    for key, x in load_file(home / "units.safetensors").items():
        unit, _, name = key.rpartition("/")
        units.setdefault(unit, {})[name] = x
    described: list[Json] = runs.read_json(home / "ways.json")["ways"]
    return Halting(load_run(model), units), described, load_file(home / "sample.safetensors")


def packed(sample: dict[str, Tensor], text: str, tokens: int, size: int) -> Iterator[Batch]:
    """The first sequences, so many tokens in batches of `size`; none that is only filled in part, which would be slower."""
    ids, lengths, positions, labels = (sample[f"{text}/{key}"] for key in ("ids", "lengths", "positions", "labels"))
    ends = lengths.cumsum(0)
    start = 0
    for _ in range(max(1, tokens // size)):
        if start == len(ends):
            raise UserError(f"{text} has too few tokens for {tokens // size} batches of {size:,}: fewer --tokens")
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int((ends <= before + size).sum()))
        end = int(ends[stop - 1])
        here = (positions >= before) & (positions < end)
        batch = pack(ids[before:end].numpy(), lengths[start:stop].numpy(), np.arange(start, stop))
        at = positions[here] - before
        of_token = np.repeat(np.arange(start, stop), lengths[start:stop].numpy())
        yield Batch(batch, at, labels[here], of_token[at.numpy()])
        start = stop
