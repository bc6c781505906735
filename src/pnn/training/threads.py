"""How many threads a run on the CPU computes with: chosen once, when it starts, and kept by every resume.

A thread that waits for another keeps its core busy. On an idle machine more threads are faster; where other programs want
the same cores, one thread can be ten times as fast as all of them (docs/log.md). Which it is now shows in a moment. Sums
come out in another order with another number, so a resumed run takes the number that it began with.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from pnn.numbers import several
from pnn.runs import read_environment
from pnn.turns import take_turns

LAYERS, NUMBERS = 2, 1 << 16  # what is timed: feed-forward layers on so many numbers, small enough for threads to meet often
WIDEST = 2048  # of these layers: a model that is too large for the machine is refused later, in better words
SECONDS = 0.6  # for all numbers of threads together


def choose_threads(run: Path, resume: bool, width: int) -> str:
    """Set torch's number of threads for this run of a model of this width; returns it in words."""
    if "OMP_NUM_THREADS" in os.environ:
        return f"with {several(torch.get_num_threads(), 'thread')} (OMP_NUM_THREADS)"
    before = _of_the_run(run) if resume else None
    if before is not None and before <= (os.cpu_count() or 1):
        torch.set_num_threads(before)
        return f"with {several(before, 'thread')}, as it began"
    most = torch.get_num_threads()
    chosen = fastest(most, width)
    torch.set_num_threads(chosen)
    return f"with {several(chosen, 'thread')}" + (f" ({most} are slower just now)" if chosen < most else "")


def fastest(most: int, width: int) -> int:
    """Of `most`, half of it … 1: the number of threads that feed-forward layers take least time with, just now."""
    numbers = [most >> halvings for halvings in range(most.bit_length())]
    if numbers == [1]:
        return 1
    width = min(width, WIDEST)
    x = torch.ones(max(1, NUMBERS // width), width)
    up, down = torch.ones(width, 4 * width), torch.ones(4 * width, width)

    def layers(threads: int) -> None:
        torch.set_num_threads(threads)
        y = x
        for _ in range(LAYERS):
            y = F.layer_norm(y + F.gelu(y @ up) @ down, (width,))

    turns = {str(threads): partial(layers, threads) for threads in numbers}
    times = take_turns(turns, torch.device("cpu"), SECONDS, warm_up=1)
    return min(numbers, key=lambda threads: sum(times[str(threads)]))  # not the median: threads stall now and then, for long


def _of_the_run(run: Path) -> int | None:
    return read_environment(run)["hardware"]["threads"] if (run / "environment.json").exists() else None
