"""Timing several things side by side: they take turns, so that a busy or hot machine slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

LEAST = 3  # turns of each that are timed, however long they take


def take_turns(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    seconds: float,
    *,
    warm_up: int = 3,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every turn of each, after `warm_up` turns that do not count. Turns go on for `seconds`, at least. `clock`: one
    thread's own time (`time.thread_time`) is the same on a machine that others use too."""
    clock = clock or time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(warm_up):
        for run in runs.values():
            run()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(next(iter(times.values()))) < LEAST:
        for name, run in runs.items():
            synchronize(device)
            start = clock()
            run()
            synchronize(device)
            times[name].append(clock() - start)
    return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
