"""Passes whose tokens halt, recorded on a GPU like others (`passes`).

A graph has fixed shapes, and how many tokens go on is known only when a step is done. So a pass is recorded with room for as
many as went on in a batch of this shape before, and a few more. It counts those who wanted to: where there was too little room
it is void, and the batch is computed as it is; the next one gets more. The device is asked once for each pass, at its end.

Where the context halts (`context`), sizes follow from how many tokens are asked for, and nobody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pnn.nn.halting import CRITERIA, Halt
from pnn.nn.live import Plan, planned
from pnn.nn.packing import SMALLEST, round_up
from pnn.nn.recording import Recordings

MORE = 1.03  # of what was seen: batches of one shape differ by little
Sizes = tuple[tuple[int, int], ...]


def replay_halting(
    recordings: Recordings, key: tuple[Any, ...], flat: Tensor, compute: Callable[[Tensor], list[Tensor]]
) -> list[Tensor] | None:
    """The states of a pass, good until the next one; None where it has to be computed as it is. `key` begins with the batch's
    shape and ends with how tokens halt."""
    shape, halt = key[0], key[-1]
    assert isinstance(halt, Halt)
    counts_tell = CRITERIA[halt.criterion].measures
    if not counts_tell:
        recordings.room[key] = of_context(shape.tokens, shape.positions)
    if key not in recordings.room:
        with planned(Plan()) as plan:
            states = compute(flat.to(recordings.device))
        recordings.room[key] = room_for(plan.counts)
        return states
    room: Sizes = recordings.room[key]

    def counted(given: Tensor) -> tuple[list[Tensor], Tensor | None]:
        with planned(Plan(room)) as plan:
            states = compute(given)
        return states, torch.stack(plan.counts) if counts_tell else None

    found = recordings.replay((key, room), flat, counted)
    if found is None:
        return None
    states, counts = found
    if counts is not None and too_little(room, seen := counts.tolist()):  # waits for the device
        most = [[max(pair) for pair in zip(one, other, strict=True)] for one, other in zip(room, seen, strict=True)]
        recordings.room[key] = room_for(most)
        return None
    return list(states)


def too_little(room: Sizes, seen: list[list[int]]) -> bool:
    return any(count > size for one, counts in zip(room, seen, strict=True) for size, count in zip(one, counts, strict=True))


def room_for(counts: list[list[int]]) -> Sizes:
    """Live tokens, and those that have just stopped, of each choice."""
    return tuple((_more_than(live), _more_than(stopped)) for live, stopped in counts)


def _more_than(count: int) -> int:
    """Sixteen sizes for each doubling: at most a sixteenth is computed in vain, beside what is to spare."""
    wanted = max(SMALLEST, int(MORE * count) + 1)
    return round_up(wanted, max(1, 1 << ((wanted - 1).bit_length() - 5)))


def of_context(tokens: int, positions: int) -> Sizes:
    """All that are asked for go on, and the others stop, of which there are at most so many: positions are rounded up to the
    next sixteenth of the tokens (`PackedShape.bucket`)."""
    return ((positions, min(tokens, tokens - positions + tokens // 16)),)
