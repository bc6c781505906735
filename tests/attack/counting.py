"""What an attack found: counts that must be the same when it runs again, and examples of what went wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

EXAMPLES = 20  # kept of each attack
WRONG = ("tracebacks", "hangs", "differences", "left")  # what has to be zero


@dataclass
class Tally:
    cases: int = 0
    kills: int = 0  # processes that ended by SIGKILL
    refused: int = 0  # one sentence and exit code 2
    accepted: int = 0  # done, with the result that it should have
    tracebacks: int = 0  # anything else that a command ended with
    hangs: int = 0
    differences: int = 0  # damage that nobody noticed, or a result that is not that of the undisturbed command
    left: int = 0  # files that an undisturbed command would not have left
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        del self.wrong[EXAMPLES:]

    def count(self, kind: str, example: str = "") -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        if kind in WRONG and len(self.wrong) < EXAMPLES:
            self.wrong.append(f"{kind}: {example}")

    @property
    def failures(self) -> int:
        return sum(getattr(self, kind) for kind in WRONG)

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "wrong" or value}


def total(tallies: Iterable[Tally]) -> Tally:
    out = Tally()
    for one in tallies:
        out.add(one)
    return out


def line(name: str, tally: Tally) -> str:
    """One attack in one line."""
    named = ((one.name, getattr(tally, one.name)) for one in fields(tally) if one.name != "wrong")
    return f"{name:<18}" + "  ".join(f"{value:,} {key}" for key, value in named)
