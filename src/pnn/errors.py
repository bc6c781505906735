"""The one exception a user is meant to read, and one that is no error.

Anything a person can get wrong (a path, a key, a broken file) raises `UserError` with one sentence that says what is
wrong and what to do; the command line prints the sentence and exits with code 2. Everything else is a bug of ours and
keeps its traceback.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class UserError(Exception):
    """Bad input, said in one sentence."""


class Stopped(Exception):  # noqa: N818  (not an error: it did what it was asked)
    """The run was asked to stop (Ctrl-C or SIGTERM), has saved and stopped."""

    def __init__(self, signal_number: int, step: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name} at step {step}; --resume goes on from there")
        self.exit_code = 128 + signal_number


def closest(word: str, known: Iterable[str]) -> str | None:
    """What a misspelt name may have meant, or one of which only the initials are given: lr is learning_rate."""
    known = list(known)
    initials = [name for name in known if "_" in name and word == "".join(part[:1] for part in name.split("_"))]
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6) or initials), None)


def did_you_mean(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """A suggestion for a misspelt name, as the end of a sentence: ` (did you mean "x"?)`, or what there is to choose from, or
    what is said `otherwise`."""
    known = sorted(known)
    close = closest(word, known)
    return f' (did you mean "{close}"?)' if close else f" ({otherwise or 'known: ' + ', '.join(known)})"


def first_line(error: BaseException) -> str:
    """Of what other libraries say at length, as much as fits a sentence; the kind of the error where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip()
