"""Which refiner runs at which step, and with how many steps a model is trained.

    schedule = before + part + part + … + after        `repeat: [start, end]` says where the part lies: schedule[start:end]

More or fewer steps repeat the part more or less often: a state always enters through the refiners before it and leaves through
those after it. Without `repeat`, steps go round the whole schedule and end anywhere: [0, 0, 0, 0] is the paper's one refiner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Parts:
    before: list[int]
    part: list[int]
    times: int
    after: list[int]

    def order(self, times: int) -> list[int]:
        return self.before + times * self.part + self.after

    def __str__(self) -> str:
        """As [0, 1, (2) × 4, 3]."""
        inner = ", ".join(map(str, self.part))
        return "[" + ", ".join([*map(str, self.before), f"({inner}) × {self.times}", *map(str, self.after)]) + "]"


def parts_of(schedule: Sequence[int], repeat: Sequence[int]) -> Parts:
    """The part that lies at `repeat`, as often as it follows itself there. What is no part of the schedule is a ValueError."""
    given, whole = f"repeat={list(repeat)}", f"schedule={list(schedule)}"
    fits = f"[start, end] with 0 <= start < end <= {len(schedule)} would fit {whole}"
    if len(repeat) != 2 or not 0 <= repeat[0] <= repeat[1] <= len(schedule):
        raise ValueError(f"{given} is no part of the schedule: {fits}")
    start, end = repeat
    if start == end:
        raise ValueError(f"{given} is an empty part, which cannot be repeated: {fits}")
    part, times = list(schedule[start:end]), 1
    while list(schedule[start + times * len(part) : end + times * len(part)]) == part:
        times += 1
    return Parts(list(schedule[:start]), part, times, list(schedule[start + times * len(part) :]))


def order(schedule: Sequence[int], repeat: Sequence[int] | None, steps: int) -> list[int]:
    """Which refiner runs at each of so many steps. No steps are no refiners. A number that does not fit is a ValueError."""
    if repeat is None or steps == 0:
        return [schedule[step % len(schedule)] for step in range(steps)]
    parts = parts_of(schedule, repeat)
    times, rest = divmod(steps - len(parts.before) - len(parts.after), len(parts.part))
    if times < 1 or rest:
        near = [len(parts.order(times + more)) for more in (0, 1) if times + more >= 1]
        fitting = " or ".join(map(str, near or [len(parts.order(1))]))
        raise ValueError(f"{steps} steps do not fit the schedule {parts}, whose middle repeats: {fitting} would")
    return parts.order(times)


def period(schedule: Sequence[int]) -> int:
    """After how many steps a schedule repeats itself: 1 for one refiner, 4 for [0, 1, 2, 3, 0, 1, 2, 3]."""
    return next(n for n in range(1, len(schedule) + 1) if schedule[n:] == schedule[: len(schedule) - n])


def rounds(schedule: Sequence[int], repeat: Sequence[int] | None, most: int) -> list[int]:
    """The numbers of steps after one round, two, … `most`. A round is the part that repeats: where none is named, the shortest
    beginning of the schedule that gives all of it when repeated."""
    if repeat is None:
        repeat = (0, period(schedule))
    parts = parts_of(schedule, repeat)
    return [len(parts.order(times)) for times in range(1, most + 1)]


MOST_DRAWN = 1_000  # steps: every number up to it is looked at


def drawn_from(schedule: Sequence[int], repeat: Sequence[int] | None, random_steps: Sequence[int]) -> list[int]:
    """The numbers of steps that an update may draw: those in [fewest, most] that fit and use every refiner."""
    if len(random_steps) != 2 or not 1 <= random_steps[0] <= random_steps[1]:
        raise ValueError(f"random_steps={list(random_steps)} is no range: [fewest, most] with 1 <= fewest <= most, as [2, 6]")
    fewest, most = random_steps
    if most > MOST_DRAWN:
        raise ValueError(f"random_steps={list(random_steps)}: at most {MOST_DRAWN:,} steps can be drawn")
    found = []
    for steps in range(fewest, most + 1):
        try:
            used = order(schedule, repeat, steps)
        except ValueError:
            continue
        if set(used) == set(schedule):
            found.append(steps)
    if not found or (repeat is None and found[0] > fewest):
        least = len(parts_of(schedule, repeat).order(1)) if repeat is not None else _to_use_all(schedule)
        raise ValueError(
            f"random_steps={list(random_steps)} has numbers of steps that do not use every refiner of {list(schedule)}: "
            f"[{least}, {max(most, least)}] would"
        )
    return found


def _to_use_all(schedule: Sequence[int]) -> int:
    return max(list(schedule).index(refiner) for refiner in set(schedule)) + 1
