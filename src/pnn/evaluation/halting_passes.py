"""Passes whose tokens halt, recorded on a GPU like others (`passes`).

A graph has fixed shapes, and how many tokens go on is known only when a step is done. So a pass is recorded with room for as
many as went on in a batch of this shape before, and a few more. It counts those who wanted to: where there was too little room
it is void, the batch is computed without a recording, and the next one gets more. The device is asked once for each pass, at
its end. Where the context halts (`context`), sizes follow from the batch's shape, and the device is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pnn.nn.halting import CRITERIA, Halt
from pnn.nn.live import Plan, planned
from pnn.nn.packing import SMALLEST, round_up
from pnn.nn.recording import Recordings, reading

MOST = 256  # passes that are recorded of one model: every setting has its own
MORE = 1.03  # of what was seen: batches of one shape differ by little
T = TypeVar("T")
Room = tuple[tuple[int, int], ...]  # for live tokens and for those that have just stopped, at each choice


def replay_halting(
    recordings: Recordings,
    key: Any,
    halt: Halt,
    tokens: int,
    positions: int,
    flat: Tensor,
    compute: Callable[..., list[Tensor]],
    then: Callable[[list[Tensor]], T],
    every_step: bool,
) -> T | None:
    """What `then` makes of the states of a pass over so many tokens that is asked for so many positions; None where it has to
    be computed without a recording. `then` is issued before the host waits for what the pass counted: the device is about it
    while the host makes the next batch ready."""
    counts_tell = CRITERIA[halt.criterion].measures
    room: Room | None = recordings.room.get(key) if counts_tell else ((positions, tokens),)
    if room is not None:
        chosen: Room = room

        def counted(given: Tensor) -> tuple[list[Tensor], Tensor | None]:
            with planned(Plan(chosen, last_alone=not every_step)) as plan:
                states = compute(given)
            return states, torch.stack(plan.counts) if counts_tell else None

        found = recordings.replay((key, room), flat, counted)
        if found is None:
            return None
        states, counts = found
        read_counts = None if counts is None else reading(counts)
        made = then(list(states))
        if read_counts is None or enough(room, read_counts()):
            return made
        if recordings.device.type == "cuda":
            torch.cuda.synchronize(recordings.device)  # `then` still reads what the recording holds
        recordings.forget((key, room))
    with planned(Plan()) as plan:
        states = compute(flat.to(recordings.device))
    torch.clear_autocast_cache()  # weights that it cast are nobody else's
    recordings.room[key] = room = more_room(plan.counts, tokens, room)
    recordings.seen.add((key, room))  # the next pass is recorded
    return then(states)


def enough(room: Room, counts: Sequence[Sequence[int]]) -> bool:
    return all(count <= size for sizes, seen in zip(room, counts, strict=True) for size, count in zip(sizes, seen, strict=True))


def more_room(counts: Sequence[Sequence[int]], tokens: int, before: Room | None = None) -> Room:
    """For what was counted. Where there was enough before, it stays."""
    before = before or tuple((0, 0) for _ in counts)
    return tuple(
        (_for(live, tokens, old_live), _for(stopped, tokens, old_stopped))
        for (live, stopped), (old_live, old_stopped) in zip(counts, before, strict=True)
    )


def _for(count: int, tokens: int, before: int) -> int:
    """Sixteen sizes for each doubling: at most a sixteenth is computed in vain, beside what is to spare."""
    if count <= before:
        return before
    wanted = max(SMALLEST, int(MORE * count) + 1)
    return min(max(tokens, SMALLEST), round_up(wanted, max(1, 1 << ((wanted - 1).bit_length() - 5))))
