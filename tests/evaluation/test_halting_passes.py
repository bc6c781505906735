"""Passes whose tokens halt, with room for so many: what a recorded one computes, on the CPU, where it is called again."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import SMALL, build

from pnn.data.batches import pack
from pnn.evaluation import passes
from pnn.evaluation.halting_passes import MORE, enough, more_room
from pnn.evaluation.passes import PackedShape, states_at
from pnn.nn import live
from pnn.schedule import period

LONGEST = SMALL["max_position_embeddings"]
CRITERIA = ("change", "learned", "confidence", "context")


class Called:
    """A recording that calls what it recorded again, on the same memory."""

    def __init__(self):
        self.device, self.room, self.recorded, self.seen = torch.device("cpu"), {}, {}, set()

    def replay(self, key, flat, run):
        buffer, _ = self.recorded.setdefault(key, (torch.empty_like(flat), run))
        buffer.copy_(flat)
        return self.recorded[key][1](buffer)

    def forget(self, key):
        del self.recorded[key]


def model_that(criterion, form="gated"):
    forms = {"gated": {}, "rounds": {"update": "rewrite", "schedule": [0, 1, 0, 1, 0, 1], "positions": "rotary"}}
    model = build("pnn_equations", **{"num_steps": None if form == "rounds" else 5, **forms[form]}).eval()
    encoder, step = model.encoder, period(model.config.schedule)
    if criterion == "context":
        encoder.set_halt({"criterion": "context", "min_steps": step})
        return model
    encoder.set_halt({"criterion": criterion, "threshold": 0.5})
    batch, _ = batch_of(0, LENGTHS)
    with torch.no_grad():
        if criterion == "learned":
            encoder.criterion.weight.copy_(torch.randn(SMALL["hidden_size"], generator=torch.Generator().manual_seed(5)))
        states = encoder(batch.input_ids[None], cu_seqlens=batch.cu_seqlens, output_states=True, halt=False).states
        measured = encoder.criterion.measure(states[step - 1][0], states[step][0], model.read_out)
    threshold = float(measured.quantile(0.35 if encoder.criterion.when_below else 0.65))
    encoder.set_halt({"criterion": criterion, "threshold": threshold})
    return model


def batch_of(seed, lengths):
    draw = np.random.default_rng(seed)
    batch = pack(draw.integers(5, SMALL["vocab_size"], sum(lengths)), np.array(lengths), np.zeros(len(lengths), np.int64))
    return batch, torch.from_numpy(np.sort(draw.choice(sum(lengths), sum(lengths) // 6, replace=False)))


LENGTHS = [9, LONGEST - 2, 3, 12, 7, LONGEST, 5, 11]


@pytest.fixture
def recordings(monkeypatch):
    called = Called()
    monkeypatch.setattr(live, "exact_sizes", lambda device: False)
    monkeypatch.setattr(passes, "_recordings_of", lambda model, halting: called)
    return called


def plain(model, *given, monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr(live, "exact_sizes", lambda device: True)
        patch.setattr(passes, "_recordings_of", lambda model, halting: None)
        return states_at(model, *given, **options)


@pytest.mark.parametrize("form", ["gated", "rounds"])
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("every_step", [False, True])
def test_what_is_recorded_is_what_is_computed(criterion, form, every_step, recordings, monkeypatch):
    model = model_that(criterion, form)
    halted = set()
    for seed in range(6):
        batch, at = batch_of(seed, [LENGTHS[(seed + i) % 8] for i in range(8)])
        found = states_at(model, batch, at, every_step=every_step)
        expected = plain(model, batch, at, every_step=every_step, monkeypatch=monkeypatch)
        assert len(found) == len(expected) == (model.config.num_steps + 1 if every_step else 1)
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            assert torch.allclose(one, other, atol=1e-5)
        out = model.encoder(batch.input_ids[None], cu_seqlens=batch.cu_seqlens, last_at=at, read_out=model.read_out)
        halted |= set(out.halted_at.flatten().tolist())
    assert len(halted) >= 2, "the pattern is not worth a test"
    assert recordings.recorded
    assert len(recordings.room) == (criterion != "context")  # one shape


def test_a_pass_without_room_is_computed_again_and_the_next_gets_more(recordings, monkeypatch):
    model = model_that("change")
    batch, at = batch_of(0, LENGTHS)
    expected = plain(model, batch, at, monkeypatch=monkeypatch)[0]
    states_at(model, batch, at)
    ((key, room),) = recordings.room.items()
    states_at(model, batch, at)
    assert list(recordings.recorded) == [(key, room)]
    short = recordings.room[key] = ((8, room[0][1]), *room[1:])
    assert torch.allclose(states_at(model, batch, at)[0], expected, atol=1e-5)
    assert (key, short) not in recordings.recorded
    assert recordings.room[key] == room  # more where it was short, elsewhere what it was
    assert torch.allclose(states_at(model, batch, at)[0], expected, atol=1e-5)
    assert list(recordings.recorded) == [(key, room)]


def test_where_the_context_halts_nobody_counts(recordings, monkeypatch):
    model = model_that("context")
    batch, at = batch_of(0, LENGTHS)
    seen = []
    whole = live.Plan.of

    def of(plan, counts):
        seen.append((plan.sizes, *counts.tolist()))
        return whole(plan, counts)

    monkeypatch.setattr(live.Plan, "of", of)
    states_at(model, batch, at)
    shape = PackedShape.bucket(batch, at, LONGEST)
    numbers = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    read = int(np.isin(numbers, numbers[at]).sum())  # of sequences that somebody asks about
    assert seen == [(((shape.positions, shape.tokens),), len(at), read - len(at))]


COUNTS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=3, max_size=3)


@given(COUNTS, COUNTS)
def test_there_is_room_for_what_was_seen_and_little_more(first, second):
    tokens = 10**6
    room = more_room(first, tokens)
    assert enough(room, first)
    for sizes, seen in zip(room, first, strict=True):
        assert all(size <= max(64, min(tokens, 1.1 * MORE * count + 2)) for size, count in zip(sizes, seen, strict=True))
    assert not enough(room, [[size + 1 for size in sizes] for sizes in room])
    more = more_room(second, tokens, room)
    assert enough(more, first)
    assert enough(more, second)
    assert more_room(second, tokens, more) == more
