"""What a model consists of: which weights run at which step, from its config.json, and how many they are, as its evaluation
counted them (`evaluation.json`, key `anatomy`). A figure needs no model for it, and a new update rule no line here."""

from __future__ import annotations

from dataclasses import dataclass

from pnn.errors import UserError
from pnn.kinds import OURS, of_result
from pnn.numbers import several
from pnn.results import Json
from pnn.schedule import order, parts_of


@dataclass(frozen=True)
class Anatomy:
    schedule: tuple[int, ...]  # which block runs at each step; a number that comes again is a block used again
    block_name: str
    repeat: tuple[int, ...] | None = None  # where the part lies that more steps repeat, if not all of it
    one_attention: bool = False  # that all blocks share

    @property
    def num_blocks(self) -> int:
        return max(self.schedule) + 1

    def describe(self) -> str:
        return f"{self._blocks()}{', one attention' if self.one_attention else ''}"

    def _blocks(self) -> str:
        steps = len(self.schedule)
        if self.num_blocks == steps:
            return several(steps, f"distinct {self.block_name}")
        if self.num_blocks == 1:
            return f"one {self.block_name} applied {steps} times"
        text = f"{self.num_blocks} {self.block_name}s in {steps} steps"
        if self.repeat is None:
            return text
        parts = parts_of(self.schedule, self.repeat)
        counts = [len(parts.before), f"{len(parts.part)} × {parts.times}", len(parts.after)]
        return f"{text} ({' + '.join(str(count) for count in counts if count)})"


def anatomy(config: Json) -> Anatomy:
    kind = of_result(config)
    if kind.has_steps:
        rule = config.get("update", "gated")  # the paper's goes without saying
        block = kind.block if rule == "gated" else f"{rule} {kind.block}"
        repeat = config.get("repeat")
        given = config.get("schedule") or [0] * config["num_steps"]
        schedule = tuple(order(given, repeat, config.get("num_steps") or len(given)))  # a calibrated model takes fewer
        shares = config.get("shared_attention", False) and len(set(schedule)) > 1
        return Anatomy(schedule, block, None if repeat is None else tuple(repeat), shares)
    if kind.ours:
        return Anatomy(tuple(range(config["num_hidden_layers"])) * config.get("num_rounds", 1), kind.block)
    known = ", ".join(one.model_type for one in OURS)
    raise UserError(f"the architecture figure cannot draw a model of type {kind.model_type!r} (it can: {known})")
