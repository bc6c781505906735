"""Which tokens of a batch are still computed, and the keys and values of those that are not.

A token that has halted keeps its state, so its keys and values under a refiner stay what they are: they are computed once more,
from the state that it keeps, and lie in a `Memory` from then on. A step then takes the live tokens' rows alone. They write
their new keys and values into the memory and attend to all of it; everything else in a refiner is per token as it is.

Where nobody reads a sequence any more (all tokens that were asked for have halted) its other tokens stop too. Where sequences
halt as wholes nothing has to be kept: the batch of the others (`only_sequences`) is computed as any other is.

How many tokens are live only the device knows. It is asked once for a step, and on a GPU sizes are of few kinds (`Plan`). A
plan that was told the sizes asks nothing, so that a pass can be recorded (`evaluation/halting_passes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pnn.nn import fast
from pnn.nn.packing import Layout, Rows, bucket, padded_attention


@dataclass(frozen=True)
class Places:
    """Where each of N tokens lies, counted through all sequences: the same for padded and packed batches."""

    real: Tensor  # (N,) bool, False at padding
    sequence: Tensor  # (N,) the number of its sequence
    row: Tensor  # (N,) its place among sequences of `length` tokens each
    borders: Tensor  # (sequences + 1,)
    keep: Tensor | None  # (sequences, length) bool, True at real tokens; None: all are
    length: int
    rotation: tuple[Tensor, Tensor] | None  # a row for each token
    packed: bool
    kernels: bool  # take over: on a GPU in 16 bit, without gradients

    @staticmethod
    def of(h: Tensor, layout: Layout) -> Places:
        batch, length = h.shape[:2]
        tokens, device = batch * length, h.device
        everything = torch.arange(tokens, device=device)
        rotation, kernels = layout.rotation, fast.for_kernels(h) and not exact_sizes(device)
        if rotation is not None:  # rows may share their positions
            rotation = tuple(x.expand(batch, *x.shape[1:]).flatten(0, 1) for x in rotation)  # type: ignore[assignment]
        if layout.cu_seqlens is None:
            borders = torch.arange(batch + 1, device=device) * length
            real = torch.ones_like(everything, dtype=torch.bool) if layout.keep is None else layout.keep.flatten()
            sequence = everything.div(length, rounding_mode="floor")
            return Places(real, sequence, everything, borders, layout.keep, length, rotation, False, kernels)
        borders, lengths = layout.cu_seqlens.long(), layout.cu_seqlens.diff().long()
        length = layout.max_seqlen if layout.rows is None else layout.rows.keep.shape[1]
        sequence = torch.searchsorted(borders[1:].contiguous(), everything, right=True)
        row = everything - borders[sequence] + sequence * length
        keep = torch.arange(length, device=device) < lengths.clamp(min=1)[:, None]  # an empty sequence sees a zero: no NaN
        real = torch.ones_like(everything, dtype=torch.bool)
        return Places(real, sequence, row, borders, keep, length, rotation, True, kernels)

    def in_use(self, wanted: Tensor) -> Tensor:
        """Whether somebody wants a token of its sequence, for every token."""
        counts = torch.zeros(len(self.borders) - 1, dtype=torch.int32, device=wanted.device)
        return counts.index_add_(0, self.sequence, wanted.int())[self.sequence] > 0

    def read_once(self, at: Tensor | None) -> bool:
        """Whether each sequence is asked for at one token, as a classifier reads them: then it halts as a whole."""
        if at is None or not exact_sizes(at.device):
            return False
        return torch.equal(self.sequence[at], torch.arange(len(self.borders) - 1, device=at.device))

    def whole_rotation(self) -> tuple[Tensor, Tensor] | None:
        return None if self.rotation is None else (self.rotation[0][None], self.rotation[1][None])

    def rotation_at(self, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.rotation is None:
            return None
        cos, sin = (take(x, tokens)[None] for x in self.rotation)
        return cos, sin


@dataclass(frozen=True)
class Live:
    """Whom a step computes. On a GPU `here` and `beside` may end in rows that are computed in vain: they name the number that
    comes after the last token's."""

    here: Tensor  # these tokens, in their order
    beside: Tensor  # they have just stopped: keys and values once more, and nothing else
    sequences: Tensor  # those with a token that is computed
    borders: Tensor  # of `here`: where each of these sequences begins and the last one ends
    longest: int  # the most tokens that one of them has here, or more


class Plan:
    """How many rows each choice of a pass takes. Without `sizes` the device is asked, which waits for it, and `counts` keeps
    what it said. With them nobody waits: `counts` stay on the device, and where one exceeds its size the pass is void."""

    def __init__(self, sizes: Sequence[tuple[int, int]] | None = None, last_alone: bool = False):
        self.sizes = sizes
        self.last_alone = last_alone  # nobody wants the states before the last: they are overwritten
        self.counts: list[Any] = []

    def of(self, counts: Tensor) -> tuple[int, int]:
        """For so many live tokens and so many that have just stopped: (2,)."""
        if self.sizes is None:
            live, stopped = asked = counts.tolist()
            self.counts.append(asked)
            return bucket(live) if live else 0, bucket(stopped) if stopped else 0
        self.counts.append(counts)
        return self.sizes[len(self.counts) - 1]


_PLAN: ContextVar[Plan | None] = ContextVar("plan", default=None)


@contextmanager
def planned(plan: Plan) -> Iterator[Plan]:
    """Passes inside go by this plan. Every look at the tokens is then followed by a choice, also where nobody has halted: a
    plan is the same for all batches of a shape."""
    token = _PLAN.set(plan)
    try:
        yield plan
    finally:
        _PLAN.reset(token)


def plan_in_force() -> Plan | None:
    return _PLAN.get()


def choose(here: Tensor, beside: Tensor, places: Places) -> Live:
    """From two masks over all tokens to their numbers."""
    if exact_sizes(here.device):
        computed, kept = (mask.nonzero().squeeze(1) for mask in (here, beside))
        borders = torch.searchsorted(computed, places.borders)
        sequences = borders.diff().nonzero().squeeze(1)
        borders = torch.cat((borders[sequences], borders[-1:]))
        return Live(computed, kept, sequences, borders, int(borders.diff().max()) if len(sequences) else 0)
    sizes = (_PLAN.get() or Plan()).of(torch.stack((here.sum(), beside.sum())))
    computed, kept = (
        torch.nonzero_static(mask, size=size, fill_value=len(mask)).squeeze(1)
        for mask, size in zip((here, beside), sizes, strict=True)
    )
    borders = torch.searchsorted(computed, places.borders)
    return Live(computed, kept, torch.arange(len(borders) - 1, device=borders.device), borders, places.length)


def go_on(going: Tensor, stopped: Tensor, asked: Tensor, places: Places) -> tuple[Tensor, Tensor, Live]:
    """From masks over all tokens, of who would go on, who stops now and who is asked for: who is live, who has stopped, and
    their numbers. Where nobody that goes on is asked for, the whole sequence is done."""
    if places.packed and places.kernels:
        live, beside, numbers = fast.live_tokens(going, stopped, asked, places.borders, (_PLAN.get() or Plan()).of)
        sequences = torch.arange(len(places.borders) - 1, device=going.device)
        return live, beside, Live(*numbers[:2], sequences, numbers[2], places.length)
    useful = places.in_use(going & asked)
    live, beside = going & useful, stopped & useful
    return live, beside, choose(live, beside, places)


def take(rows: Tensor, tokens: Tensor) -> Tensor:
    """The rows of these tokens; for those that are computed in vain, any."""
    return rows.index_select(0, tokens if exact_sizes(rows.device) else tokens.clamp(max=len(rows) - 1))


def put(rows: Tensor, tokens: Tensor, new: Tensor, in_place: bool = False) -> Tensor:
    """All rows, those of these tokens anew; what was computed in vain is left out. `in_place`: the old ones may go."""
    if exact_sizes(rows.device):
        return rows.index_copy(0, tokens, new)
    if rows.dim() > 1 and fast.for_kernels(rows):  # states; masks are small
        return fast.put_rows(rows if in_place else rows.clone(), tokens, new)
    return with_spare(rows).index_copy_(0, tokens, new)[:-1]


def with_spare(rows: Tensor) -> Tensor:
    """A copy with a row more, for what is computed in vain."""
    return torch.cat((rows, rows.new_zeros(1, *rows.shape[1:])))


def only_sequences(chosen: Tensor, places: Places, heads: int) -> tuple[Tensor, Layout]:
    """A batch of these sequences alone, packed: which of the tokens are left, and how they lie."""
    tokens = (places.real & chosen[places.sequence]).nonzero().squeeze(1)
    lengths = torch.bincount(places.sequence[tokens], minlength=len(chosen))[chosen]
    borders = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    rows = Rows.of(borders, len(tokens), heads) if len(tokens) else None
    return tokens, Layout(cu_seqlens=borders, max_seqlen=places.length, rows=rows, rotation=places.rotation_at(tokens))


def exact_sizes(device: torch.device) -> bool:
    """On a GPU sizes are rounded up to few kinds, so that what is prepared for a shape serves again. Not where gradients flow:
    what is computed in vain would reach those of the weights."""
    return device.type == "cpu" or torch.is_grad_enabled()


class Memory:
    """The keys and values of one refiner, of every token that was computed since somebody halted. Where attention goes by the
    borders of packed sequences they lie as the tokens do, elsewhere in rows of one length, a sequence each."""

    def __init__(self, refiner: Any, h: Tensor, places: Places):
        self.refiner, self.places = refiner, places
        width = refiner.attention.head_width
        self.by_borders = places.packed and fast.for_kernels(h) and fast.flash_takes(width)
        self.by_kernels = places.packed and places.kernels and fast.live_attention_takes(width, places.length)
        self.sequences = torch.arange(len(places.borders) - 1, device=h.device)  # whose rows it holds
        self.rows: Tensor | None = None  # (tokens or sequences · length, 2, heads, d_head); on a GPU one more, to spare

    def keep_all(self, kv: Tensor) -> None:
        """The keys and values of every token."""
        self.rows = kv if exact_sizes(kv.device) else with_spare(kv)

    def step(self, h: Tensor, live: Live, here: Tensor | None = None) -> Tensor:
        """The next states of the live tokens, from the states (N, d) of all; `here`: the live ones', if they were taken out."""
        attention = self.refiner.attention
        self._leave_out(live.sequences)
        here = (take(h, live.here) if here is None else here)[None]
        layout = Layout(rotation=self.places.rotation_at(live.here))
        if self.rows is None and self.by_kernels:
            # everybody's in one product, where they lie: taking rows out and putting them back costs more than a few in vain
            self.rows = attention.keys_and_values(h[None], Layout(rotation=self.places.whole_rotation()))[0]
            q = attention.queries(here, layout)[0]
        else:
            if len(live.beside):
                rest = Layout(rotation=self.places.rotation_at(live.beside))
                self._keep(live.beside, attention.keys_and_values(take(h, live.beside)[None], rest)[0])
            qkv = attention.projected(here, layout)[0]
            self._keep(live.here, qkv[:, 1:])
            q = qkv[:, 0]
        new: Tensor = self.refiner(here, Layout(context=self.attend(q, live).flatten(-2)[None]))[0]
        return new

    def attend(self, q: Tensor, live: Live) -> Tensor:
        """softmax(q kᵀ / √d_head) v of the live tokens, whose queries these are: (n, heads, d_head)."""
        if q.shape[1] == 0:
            return q  # no heads: W_o of nothing is its bias
        assert self.rows is not None
        if self.by_kernels:
            return fast.live_attention(q, self.rows, live.borders, self.places.borders, self.places.length)
        k, v = self.rows[: self._count].unbind(1)
        if self.by_borders:  # what is computed in vain lies behind the last border: nothing is written there, it may be NaN
            borders = live.borders  # of all sequences, also those without a live token
            if exact_sizes(q.device):
                borders = torch.searchsorted(live.here, self.places.borders)
            return fast.flash(q, k, v, borders.int(), self.places.borders.int(), live.longest, self.places.length)
        counts, each = live.borders.diff(), torch.arange(len(q), device=q.device)
        within = torch.arange(live.longest, device=q.device).minimum((counts - 1).clamp(min=0)[:, None])
        spread = (live.borders[:-1, None] + within).clamp(max=len(q) - 1)
        number = torch.searchsorted(live.borders[1:], each, right=True).clamp(max=len(counts) - 1)
        place = (each - live.borders[number]).clamp(max=live.longest - 1)
        collect = number * live.longest + place
        heads, width = q.shape[1:]
        queries = q.index_select(0, spread.flatten()).view(-1, live.longest, heads, width)
        keep = None if self.places.keep is None else self.places.keep.index_select(0, self.sequences)
        k, v = (x.view(-1, self.places.length, heads, width) for x in (k, v))
        return padded_attention(queries, k, v, keep).reshape(-1, heads, width).index_select(0, collect)

    @property
    def _count(self) -> int:
        return len(self.places.row) if self.by_borders else len(self.sequences) * self.places.length

    def _keep(self, tokens: Tensor, kv: Tensor) -> None:
        places, rows = self.places, tokens
        if self.by_kernels and self.rows is not None:
            self.rows = fast.put_rows(self.rows, tokens, kv)
            return
        if not self.by_borders:  # the rows of sequences that nobody reads any more are gone
            sequence = take(places.sequence, tokens)
            gone = sequence - torch.searchsorted(self.sequences, sequence)
            rows = take(places.row, tokens) - gone * places.length
            if not exact_sizes(kv.device):
                rows = torch.where(tokens < len(places.row), rows, self._count)
        if self.rows is None:
            self.rows = kv.new_zeros(self._count + (not exact_sizes(kv.device)), *kv.shape[1:])
        self.rows = self.rows.index_copy(0, rows, kv) if torch.is_grad_enabled() else self.rows.index_copy_(0, rows, kv)

    def _leave_out(self, sequences: Tensor) -> None:
        """Keep the rows of these alone."""
        if self.by_borders or len(sequences) == len(self.sequences):
            return
        if self.rows is not None:
            rows = self.rows.view(len(self.sequences), self.places.length, *self.rows.shape[1:])
            self.rows = rows.index_select(0, torch.searchsorted(self.sequences, sequences)).flatten(0, 1)
        self.sequences = sequences
