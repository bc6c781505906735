"""Progress: a bar on a terminal, plain lines elsewhere (a log file stays readable), nothing when quiet."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
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
    """Go through items of unknown number, showing that something happens."""
    with Bar(label, total=None) as bar:
        for item in items:
            yield item
            bar.advance()


class Bar:
    """`with Bar("training", 1000) as bar: bar.advance(note="loss 1.2")`."""

    def __init__(self, label: str, total: int | None, start: int = 0, quiet: bool = False):
        self.label, self.total, self.count, self.quiet = label, total, start, quiet
        self._rich: Progress | None = None
        self._note = ""
        self._last_line = time.monotonic()

    def __enter__(self) -> Bar:
        if console.is_terminal and not self.quiet:
            counted = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()] if self.total else [SpinnerColumn()]
            self._rich = Progress(
                TextColumn("{task.description}"),
                *counted,
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
            )
            self._rich.start()
            self._task = self._rich.add_task(self.label, total=self.total, completed=self.count, note="")
        return self

    def advance(self, note: str | None = None) -> None:
        self.count += 1
        self._note = self._note if note is None else note
        if self._rich is not None:
            self._rich.update(self._task, advance=1, note=self._note)
        elif not self.quiet and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            of = f"/{self.total}" if self.total else ""
            say(f"{self.label} {self.count}{of} {self._note}".rstrip())

    def __exit__(self, *exc: object) -> None:
        if self._rich is not None:
            self._rich.stop()
