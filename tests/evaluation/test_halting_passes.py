"""Passes whose tokens halt, with room for so many: what a recorded one computes, on the CPU, where it is called again."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import SMALL, build

from pnn.data.batches import PackedBatch, pack
from pnn.evaluation import halting_passes, passes
from pnn.evaluation.halting_passes import of_context, replay_halting, room_for, too_little
from pnn.evaluation.passes import PackedShape, states_at
from pnn.nn import live
from pnn.schedule import period

LONGEST = SMALL["max_position_embeddings"]
CRITERIA = ("change", "learned", "confidence", "context")


class Called:
    """A recording that calls what it recorded again, on the same memory."""

    def __init__(self):
        self.device, self.room, self.recorded = torch.device("cpu"), {}, {}

    def replay(self, key, flat, run):
        buffer, _ = self.recorded.setdefault(key, (torch.empty_like(flat), run))
        buffer.copy_(flat)
        return self.recorded[key][1](buffer)


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
    monkeypatch.setattr(passes, "_recordings_of", lambda model: called)
    return called


def plain(model, *given, monkeypatch, **options):
    with monkeypatch.context() as patch:
        patch.setattr(live, "exact_sizes", lambda device: True)
        patch.setattr(passes, "_recordings_of", lambda model: None)
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
    assert len(recordings.room) == 1  # one shape


def test_a_pass_without_room_is_computed_as_it_is_and_the_next_gets_more(recordings, monkeypatch):
    model = model_that("change")
    batch, at = batch_of(0, LENGTHS)
    expected = plain(model, batch, at, monkeypatch=monkeypatch)[0]
    states_at(model, batch, at)
    (key,) = recordings.room
    enough = recordings.room[key]
    assert all(size >= 64 for pair in enough for size in pair)
    recordings.room[key] = tuple((8, 8) for _ in enough)
    void = []
    monkeypatch.setattr(passes, "replay_halting", lambda *given: void.append(replay_halting(*given)) or void[-1])
    assert torch.allclose(states_at(model, batch, at)[0], expected, atol=1e-5)
    assert void == [None]
    assert all(size > 8 for pair in recordings.room[key] for size in pair)
    assert torch.allclose(states_at(model, batch, at)[0], expected, atol=1e-5)
    assert void[-1] is not None


def test_where_the_context_halts_nobody_counts(recordings, monkeypatch):
    model = model_that("context")
    batch, at = batch_of(0, LENGTHS)
    seen = []
    whole = live.Plan.of

    def of(plan, here, beside):
        seen.append((plan.sizes, int(here.sum()), int(beside.sum())))
        return whole(plan, here, beside)

    monkeypatch.setattr(live.Plan, "of", of)
    states_at(model, batch, at)
    shape = PackedShape.bucket(batch, at, LONGEST)
    numbers = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    read = int(np.isin(numbers, numbers[at]).sum())  # of sequences that somebody asks about
    assert seen == [(of_context(shape.tokens, shape.positions), len(at), read - len(at))]


@given(st.integers(1, 300_000), st.floats(0, 1))
def test_the_context_always_has_room(tokens, share):
    count = max(1, round(share * tokens))
    ids = torch.zeros(tokens, dtype=torch.long)
    borders = torch.tensor([*range(0, tokens, 128), tokens], dtype=torch.int32)
    shape = PackedShape.bucket(PackedBatch(ids, ids, ids, borders), torch.arange(count), 128)
    ((here, beside),) = of_context(shape.tokens, shape.positions)
    assert here >= count
    assert beside >= tokens - count
    assert beside <= shape.tokens


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=5))
def test_there_is_room_for_what_was_seen_and_little_more(counts):
    room = room_for([list(pair) for pair in counts])
    assert not too_little(room, [list(pair) for pair in counts])
    for sizes, seen in zip(room, counts, strict=True):
        for size, count in zip(sizes, seen, strict=True):
            assert size <= max(64, 1.1 * halting_passes.MORE * count + 2)
    assert too_little(room, [[size + 1 for size in pair] for pair in room])
