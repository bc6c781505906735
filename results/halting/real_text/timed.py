"""What was measured of one model: who is right, and how fast it is, by the clock of one machine or counted in FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from kept import TEXT
from numpy.typing import NDArray

from pnn.results import Json
from pnn.runs import read_json
from pnn.studies.analyses.halting import LOSE

FLOPS = "FLOPs"  # stands where a machine's name does
DISTURBED = 1.1  # so much longer than the quickest turn is the median where something else took the machine's time
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Model:
    """One model, as one machine timed it."""

    folder: Path
    speed: Json

    @cached_property
    def ways(self) -> list[Json]:
        """All steps first."""
        found: list[Json] = read_json(self.folder / "ways.json")["ways"]
        return found

    @cached_property
    def by_sequence(self) -> Json:
        found: Json = read_json(self.folder / "by_sequence.json")
        return found

    @cached_property
    def targets(self) -> Array:
        return np.array(self.by_sequence["targets"], float)

    @property
    def accuracy(self) -> float:
        return float(sum(self.by_sequence["right"]) / self.targets.sum())

    @property
    def seeds(self) -> list[int]:
        return sorted({way["seed"] for way in self.ways if way["seed"] is not None})

    def lost(self, way: Json, key: str = "lost") -> Array:
        """In each sequence, against all steps."""
        whole = way["name"] == self.ways[0]["name"]
        return np.zeros(len(self.targets)) if whole else np.array(self.by_sequence[key][way["name"]], float)

    @cached_property
    def disturbed(self) -> bool:
        """Whether half of all timings were. Then the quickest turn is the one to go by: nothing makes a pass too quick."""
        every = [turns for way in self.ways for turns in self.timings(way)]
        return float(np.median([np.median(turns) / np.min(turns) for turns in every])) > DISTURBED

    def timings(self, way: Json, text: str = TEXT) -> list[list[float]]:
        """Microseconds per token in each turn, for each size of batches."""
        return list(self.speed["ways"][way["name"]]["microseconds_per_token"][text].values())

    def typical(self, turns: Sequence[float] | Array) -> float:
        return float(np.min(turns) if self.disturbed else np.median(turns))

    def turns(self, way: Json, text: str = TEXT) -> Array:
        """In batches of the size that is fastest for it."""
        return np.array(min(self.timings(way, text), key=self.typical))

    def time(self, way: Json, text: str = TEXT) -> float:
        return self.typical(self.turns(way, text))

    def speed_of(self, way: Json) -> float:
        return self.time(self.ways[0]) / self.time(way)

    def family(self, name: str) -> list[Json]:
        return [way for way in self.ways if way["family"] == name]

    def chosen(self, family: str, seed: int | None = None) -> Json:
        """On the tail. All steps lose nothing, so there is always one."""
        among = [way for way in self.family(family) if seed is None or way["seed"] == seed]
        good = [way for way in among if way["lost_on_tail"] <= LOSE]
        return min([self.ways[0], *good], key=lambda way: self.time(way, "tail"))


def models_in(folder: Path) -> dict[str, dict[str, Model]]:
    """Machine by machine, GPUs first."""
    found: dict[str, dict[str, Model]] = {}
    for path in sorted(folder.glob("*/speed-*.json"), key=lambda path: ("cpu" in path.stem, path.stem, path.parent.name)):
        found.setdefault(path.stem.removeprefix("speed-"), {})[path.parent.name] = Model(path.parent, read_json(path))
    return found


def counted_in(folder: Path) -> dict[str, Model]:
    """As if time went with FLOPs: the ideal, also of models that no machine has timed."""
    found = {}
    for path in sorted(folder.glob("*/ways.json")):
        shares = {way["name"]: {"all": [way["flops_share"]]} for way in read_json(path)["ways"]}
        ways = {name: {"microseconds_per_token": dict.fromkeys(("tail", TEXT), share)} for name, share in shares.items()}
        found[path.parent.name] = Model(path.parent, {"ways": ways})
    return found
