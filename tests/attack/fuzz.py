"""What all fuzzers share: one case is a command line in this process, and how it ends is counted."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer.main
from counting import Tally
from processes import Hang, limited

LONGEST = 60.0  # seconds of one case
typer.main.get_command = functools.cache(typer.main.get_command)  # building all commands takes longer than most cases


def call(*words: object) -> tuple[int | None, str, str]:
    """The exit code (None: it hung), what it printed, and how it failed if it was not by an exit code."""
    from pnn.cli import main

    out = io.StringIO()
    before, sys.argv = sys.argv, ["pnn", *map(str, words)]
    try:
        with limited(LONGEST), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main()
    except SystemExit as stop:
        return (stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1), out.getvalue(), ""
    except Hang:
        return None, out.getvalue(), "hangs"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return 1, out.getvalue(), f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"
    finally:
        sys.argv = before
    return 0, out.getvalue(), ""


def judge(tally: Tally, what: str, words: Sequence[object]) -> str:
    """Run one case and count it. Returns its kind: refused, accepted, …"""
    tally.cases += 1
    code, said, failed = call(*words)
    line = f"{what}: pnn {' '.join(map(str, words))}"[:600]
    if code is None:
        kind = "hangs"
    elif code == 2 and not failed and ("pnn: " in said or "Error" in said or "Usage" in said):
        kind = "refused"
    elif code == 0:
        kind = "accepted"
    else:
        kind = "tracebacks"
    tally.count(kind, f"{line}: exit code {code}, {failed or said[-300:]}")
    return kind


def draws(name: str, seed: int, first: int, count: int) -> Iterator[random.Random]:
    """One for each case: a case is the same whoever computes the others."""
    for number in range(first, first + count):
        yield random.Random(f"{seed} {name} {number}")


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if ".partial-" in path.name]


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[Path]:
    """In a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
