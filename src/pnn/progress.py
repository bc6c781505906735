"""Progress: bars on a terminal, plain lines elsewhere (a log file stays readable), nothing when quiet."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True, highlight=False)
T = TypeVar("T")
SECONDS_BETWEEN_LINES = 10.0


def say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def track(items: Iterable[T], label: str) -> Iterator[T]:
    """Go through items, showing how far it has come; their number may not be known."""
    with Bars({label: len(items) if isinstance(items, Sized) else None}) as bars:
        for count, item in enumerate(items, 1):
            yield item
            bars.update(label, count)


def _text(form: str) -> TextColumn:
    return TextColumn(form, markup=False)  # names are people's own, brackets and all


class Bars:
    """One bar a label: `with Bars({"training": 1000}) as bars: bars.update("training", 10, "loss 1.2")`. A total of None is
    not known."""

    def __init__(self, totals: Mapping[str, int | None], quiet: bool = False):
        self.totals, self.quiet = totals, quiet
        self._rich: Progress | None = None
        self._state = dict.fromkeys(totals, (0, ""))
        self._last_line = time.monotonic()

    def __enter__(self) -> Bars:
        if console.is_terminal and not self.quiet:
            counted = None not in self.totals.values()
            middle = [BarColumn(), MofNCompleteColumn()] if counted else [SpinnerColumn()]
            times = [TimeElapsedColumn(), TextColumn("elapsed")]
            times += [TimeRemainingColumn(), TextColumn("left")] if counted else []
            columns = [_text("{task.description}"), *middle, *times, _text("{task.fields[note]}")]
            self._rich = Progress(*columns, console=console)
            self._rich.start()
            self._tasks = {label: self._rich.add_task(label, total=total, note="") for label, total in self.totals.items()}
        return self

    def update(self, label: str, count: int, note: str | None = None) -> None:
        note = self._state[label][1] if note is None else note
        self._state[label] = (count, note)
        if self._rich is not None:
            self._rich.update(self._tasks[label], completed=count, note=note)
        elif not self.quiet and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            say("   ".join(self._lines()))

    def _lines(self) -> list[str]:
        """Of several, those under way, and how many have ended or wait."""
        if len(self.totals) == 1:
            return [self._line(label) for label in self.totals]
        ended = [label for label, total in self.totals.items() if self._state[label][0] == total]
        waiting = [label for label in self.totals if self._state[label][0] == 0 and label not in ended]
        counts = [f"{len(labels)} {word}" for labels, word in ((ended, "done"), (waiting, "waiting")) if labels]
        return [self._line(label) for label in self.totals if label not in (*ended, *waiting)] + counts

    def _line(self, label: str) -> str:
        count, note = self._state[label]
        total = self.totals[label]
        return f"{label} {count}{f'/{total}' if total else ''} {note}".rstrip()

    def __exit__(self, *exc: object) -> None:
        if self._rich is not None:
            self._rich.stop()
