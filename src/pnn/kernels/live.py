"""Steps of a batch whose tokens halt, between its products: a few rows among many, in one pass each.

    put       rows[at_i] = new_i
    attend    softmax(q kᵀ / √d) v of the live tokens' queries over all keys of their sequence
    settled   whether σ(w·h + b) reaches a threshold, at some tokens
    count     who goes on and who has just stopped, of sequences that somebody still reads
    numbers   the places of both, and where each sequence's part of them begins

The number of live tokens is not known to the host, so rows are as many as there is room for. Those behind the last live token
name the number that comes after the last token's: nothing is read or written for them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pnn.kernels.attention import LOG2_E, takes

__all__ = ["attend", "count", "numbers", "put", "settled", "takes"]


@triton.jit
def _put(rows, at, new, count, stride, new_stride, width: tl.constexpr, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    place = tl.load(at + i)
    x = tl.load(new + i * new_stride + columns, mask=columns < width, other=0.0)
    tl.store(rows + place * stride + columns, x.to(rows.dtype.element_ty), mask=(columns < width) & (place < count))


def put(rows: Tensor, at: Tensor, new: Tensor) -> None:
    """`rows` (N, …) get `new` (n, …) at these places, where they lie; what belongs to one place lies side by side."""
    if new.numel() == 0:  # nobody, or a refiner without heads
        return
    width = new[0].numel()
    shape = {"width": width, "block": triton.next_power_of_2(width), "num_warps": 4}
    _put[(len(at),)](rows, at, new, len(rows), rows.stride(0), new.stride(0), **shape)


@triton.jit
def _attend(
    q, kv, out, q_borders, borders, stride, kv_stride, scale,
    heads: tl.constexpr, width: tl.constexpr, block_q: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: its keys are read once, for all queries that are there."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads  # a token's heads lie side by side
    first_q = tl.load(q_borders + sequence).to(tl.int64)
    queries = tl.load(q_borders + sequence + 1).to(tl.int64) - first_q
    if queries > 0:
        start = tl.load(borders + sequence).to(tl.int64)
        length = tl.load(borders + sequence + 1).to(tl.int64) - start
        columns, dims = tl.arange(0, block_k), tl.arange(0, width)
        at = kv + (start + columns[:, None]) * kv_stride + head * width + dims[None, :]
        k = tl.load(at, mask=columns[:, None] < length, other=0.0)
        v = tl.load(at + heads * width, mask=columns[:, None] < length, other=0.0)
        first = first_q * 0
        while first < queries:
            rows = first + tl.arange(0, block_q)
            real = rows[:, None] < queries
            x = tl.load(q + (first_q + rows[:, None]) * stride + head * width + dims[None, :], mask=real, other=0.0)
            scores = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(columns[None, :] < length, scores, float("-inf"))
            p = tl.exp2(scores - tl.max(scores, 1)[:, None])
            context = tl.dot(p.to(v.dtype), v, input_precision="ieee") / tl.sum(p, 1)[:, None]
            place = (first_q + rows[:, None]) * (heads * width) + head * width + dims[None, :]
            tl.store(out + place, context.to(out.dtype.element_ty), mask=real)
            first += block_q


def attend(q: Tensor, kv: Tensor, q_borders: Tensor, borders: Tensor, longest: int) -> Tensor:
    """q: (n, heads, d), of sequences that begin at `q_borders`. kv: (N, 2, heads, d), of the same sequences, which begin at
    `borders` and have at most `longest` tokens. → (n, heads, d); behind the last border anything may stand."""
    _, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = {"heads": heads, "width": width, "block_q": 16, "block_k": max(16, triton.next_power_of_2(longest))}
    scale = LOG2_E / math.sqrt(width)
    launch = {"num_warps": 4, "maxnreg": 128}  # so that a multiprocessor holds four programs: most sequences are empty
    given = (q, kv, out, q_borders, borders, q.stride(0), kv.stride(0), scale)
    _attend[((len(borders) - 1) * heads,)](*given, **shape, **launch)
    return out


@triton.jit
def _settled(h, at, out, weight, bias, threshold, count, width: tl.constexpr, block: tl.constexpr, some: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = row
    if some:
        place = tl.load(at + row)
    if place < count:
        columns = tl.arange(0, block)
        x = tl.load(h + place * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        w = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
        logit = tl.sum(x * w, 0) + tl.load(bias).to(tl.float32)
        chance = tl.div_rn(1.0, 1.0 + tl.exp(-logit))  # thresholds lie next to one, and `tl.sigmoid` divides to two ulp
        tl.store(out + place, chance >= threshold)


def settled(h: Tensor, at: Tensor | None, weight: Tensor, bias: Tensor, threshold: float) -> Tensor:
    """(N,) bool: whether σ(w·h + b) ≥ threshold; False where nobody looks. `at`: looks at these rows of h (N, d) alone."""
    h = h.contiguous()
    out = torch.zeros(len(h), dtype=torch.bool, device=h.device)
    shape = {"width": h.shape[1], "block": triton.next_power_of_2(h.shape[1]), "num_warps": 4}
    looks = len(h) if at is None else len(at)
    if looks == 0:
        return out
    _settled[(looks,)](h, at, out, weight, bias, threshold, len(h), **shape, some=at is not None)
    return out


class Counted(NamedTuple):
    live: Tensor  # (N,) bool
    beside: Tensor
    ends: Tensor  # (2, sequences) how many of both there are up to the end of each sequence


@triton.jit
def _count(
    going, stopped, asked, live, beside, counts, borders, sequences, block: tl.constexpr
):  # fmt: skip
    """One sequence: somebody wants it if a token that goes on is asked for. Then both masks hold, else nobody is left."""
    sequence = tl.program_id(0)
    start, end = tl.load(borders + sequence).to(tl.int64), tl.load(borders + sequence + 1).to(tl.int64)
    columns = tl.arange(0, block)
    wanted = tl.zeros([block], tl.int32)
    first = start
    while first < end:
        at = first + columns
        goes = tl.load(going + at, mask=at < end, other=0)
        wanted += (goes & tl.load(asked + at, mask=at < end, other=0)).to(tl.int32)
        first += block
    useful = tl.sum(wanted, 0) > 0
    lives, stops = tl.zeros([block], tl.int32), tl.zeros([block], tl.int32)
    first = start
    while first < end:
        at = first + columns
        goes = (tl.load(going + at, mask=at < end, other=0) != 0) & useful
        stop = (tl.load(stopped + at, mask=at < end, other=0) != 0) & useful
        tl.store(live + at, goes, mask=at < end)
        tl.store(beside + at, stop, mask=at < end)
        lives += goes.to(tl.int32)
        stops += stop.to(tl.int32)
        first += block
    tl.store(counts + sequence, tl.sum(lives, 0))
    tl.store(counts + sequences + sequence, tl.sum(stops, 0))


@triton.jit
def _list(mask, ends, borders, out, room, sequence, block: tl.constexpr):
    start, end = tl.load(borders + sequence).to(tl.int64), tl.load(borders + sequence + 1).to(tl.int64)
    place = tl.load(ends + sequence - 1, mask=sequence > 0, other=0)
    columns = tl.arange(0, block)
    first = start
    while first < end:
        at = first + columns
        chosen = (tl.load(mask + at, mask=at < end, other=0) != 0).to(tl.int32)
        slot = place + tl.cumsum(chosen, 0) - 1
        tl.store(out + slot, at, mask=(chosen > 0) & (slot < room))
        place += tl.sum(chosen, 0)
        first += block


@triton.jit
def _list_both(
    live, beside, ends, borders, here, aside, room_here, room_aside, sequences, block: tl.constexpr
):  # fmt: skip
    sequence = tl.program_id(0)
    _list(live, ends, borders, here, room_here, sequence, block)
    _list(beside, ends + sequences, borders, aside, room_aside, sequence, block)


def count(going: Tensor, stopped: Tensor, asked: Tensor, borders: Tensor) -> Counted:
    """From masks over N tokens: who would go on, who stops now, who is asked for. `borders`: (sequences + 1,), the last is N.
    In sequences of which no token that goes on is asked for, nobody does anything any more."""
    sequences = len(borders) - 1
    live, beside = torch.empty_like(going), torch.empty_like(going)
    counts = torch.empty(2, sequences, dtype=torch.int32, device=going.device)
    _count[(sequences,)](going, stopped, asked, live, beside, counts, borders, sequences, block=128, num_warps=4)
    return Counted(live, beside, counts.cumsum(1, dtype=torch.int32))


def numbers(found: Counted, borders: Tensor, room: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of live tokens and of those that have just stopped, each with so much room, and the borders of the former."""
    count, sequences = len(found.live), len(borders) - 1
    listed = torch.full((sum(room),), count, dtype=torch.long, device=borders.device)
    here, beside = listed.split(room)
    shape = {"block": 128, "num_warps": 4}
    _list_both[(sequences,)](found.live, found.beside, found.ends, borders, here, beside, *room, sequences, **shape)
    starts = torch.zeros(sequences + 1, dtype=torch.int32, device=borders.device)
    starts[1:] = found.ends[0].clamp(max=room[0])  # where there is too little room the pass is void, but reads no further
    return here, beside, starts
