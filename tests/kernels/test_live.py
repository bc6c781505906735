"""Kernels for batches whose tokens halt: each equals plain torch, and a model that halts with them is the plain one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or with the dev extra")

import pnn.nn.fast
from pnn.kernels import live
from pnn.nn import live as tokens_that_are_left
from pnn.nn.live import Plan, planned
from pnn.schedule import period

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
SIZE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
    "dropout": 0.0,
}
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def borders_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)


@every_type
def test_rows_are_put_where_they_lie(dtype):
    whole = drawn(0, 20, 3, 2, 24, dtype=dtype)
    rows, new = whole[:, 1:], drawn(1, 6, 3, 2, 24, dtype=dtype)[:, 1:]  # parts of wider rows, both
    places = torch.tensor([0, 3, 4, 19, 20, 20], device=DEVICE)  # the last two were computed in vain
    expected = whole.clone()
    expected[places[:4], 1:] = new[:4]
    live.put(rows, places, new)
    assert torch.equal(whole, expected)
    live.put(rows[:, :, :0], places, new[:, :, :0])  # of a refiner without heads
    assert torch.equal(whole, expected)


@every_type
@pytest.mark.parametrize("width", [16, 64])
def test_few_queries_attend_to_all_keys(width, dtype):
    lengths, left = [3, 50, 0, 100, 7], [3, 0, 0, 37, 1]
    borders, q_borders = borders_of(lengths), borders_of(left)
    spare = 5  # rows behind the last border
    kv = drawn(0, sum(lengths), 3, 2, width, dtype=dtype)[:, 1:]
    q = drawn(1, sum(left) + spare, 3, 2, width, dtype=dtype)[:, 0]
    found = live.attend(q, kv, q_borders, borders, 100)
    assert found.shape == q.shape
    for i in range(len(lengths)):
        mine = q[q_borders[i] : q_borders[i + 1]].double().transpose(0, 1)
        k, v = (x.double().transpose(0, 1) for x in kv[borders[i] : borders[i + 1]].unbind(1))
        wanted = ((mine @ k.transpose(1, 2)) / width**0.5).softmax(-1) @ v
        close = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(found[q_borders[i] : q_borders[i + 1]].double(), wanted.transpose(0, 1), atol=close)


@every_type
def test_a_unit_looks_at_some_tokens(dtype):
    h, weight, bias = drawn(0, 40, 48, dtype=dtype), drawn(1, 48), drawn(2, 1)
    chance = torch.sigmoid((h.float() * weight).sum(-1) + bias)
    assert torch.equal(live.settled(h, None, weight, bias, 0.6), chance >= 0.6)
    places = torch.tensor([1, 2, 30, 39, 40, 40], device=DEVICE)
    expected = torch.zeros(40, dtype=torch.bool, device=DEVICE)
    expected[places[:4]] = chance[places[:4]] >= 0.6
    assert expected.any()
    assert torch.equal(live.settled(h, places, weight, bias, 0.6), expected)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), lengths=st.lists(st.integers(0, 200), min_size=1, max_size=5), short=st.booleans())
def test_who_goes_on_is_counted_and_numbered(seed, lengths, short):
    draw, count = torch.Generator().manual_seed(seed), sum(lengths)
    going, stopped, asked = (torch.rand(3, count, generator=draw) < torch.tensor([[0.4], [0.5], [0.02]])).to(DEVICE)
    stopped = stopped & ~going
    borders = borders_of(lengths)
    found = live.count(going, stopped, asked, borders)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(DEVICE)
    wanted = torch.zeros(len(lengths), dtype=torch.bool, device=DEVICE)
    wanted[sequence[going & asked]] = True
    assert torch.equal(found.live, going & wanted[sequence])
    assert torch.equal(found.beside, stopped & wanted[sequence])
    places = [mask.nonzero().squeeze(1) for mask in (found.live, found.beside)]
    assert found.ends[:, -1].tolist() == [len(one) for one in places]
    room = tuple(max(1, len(one) - 3 if short else len(one) + 3) for one in places)
    *numbers, starts = live.numbers(found, borders, room)
    for listed, expected, size in zip(numbers, places, room, strict=True):
        assert len(listed) == size
        assert torch.equal(listed[: len(expected)], expected[:size])
        assert bool((listed[len(expected) :] == count).all())
    assert torch.equal(starts.long(), torch.searchsorted(places[0], borders).clamp(max=room[0]))  # never behind the rows


@pytest.mark.skipif(ON_GPU, reason="tests/gpu compares whole models on a GPU")
@pytest.mark.parametrize("criterion", ["learned", "context", "change", "change, everybody"])
@pytest.mark.parametrize(
    "form", [{"num_steps": 4}, {"update": "rewrite", "schedule": [0, 1, 0, 1, 0, 1], "num_steps": None, "positions": "rotary"}]
)
def test_a_model_halts_with_kernels_as_without(form, criterion, monkeypatch):
    torch.manual_seed(0)
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**SIZE, **form, zero_init=False, initializer_range=0.2)).eval()
    borders = borders_of([9, 12, 5, 12])
    ids = torch.randint(5, SIZE["vocab_size"], (1, 38), generator=torch.Generator().manual_seed(0))
    at = torch.tensor([1, 4, 12, 20, 21, 30])  # nobody asks for the third sequence
    encoder, (criterion, _, everybody) = model.encoder, criterion.partition(", ")
    more = {"min_steps": 2} if criterion == "context" else {"threshold": 0.5}
    encoder.set_halt({"criterion": criterion, **more})
    with torch.no_grad():
        if criterion == "change":  # half of the tokens halt after the first round
            step = period(model.config.schedule)
            states = encoder(ids, cu_seqlens=borders.int(), output_states=True, halt=False).states
            middle = encoder.criterion.measure(states[step - 1][0], states[step][0], None).median()
            encoder.set_halt({"criterion": "change", "threshold": 100.0 if everybody else float(middle)})
        if criterion == "learned":
            encoder.criterion.weight.copy_(drawn(3, SIZE["hidden_size"]))
        expected = encoder(ids, cu_seqlens=borders.int(), last_at=at)
        monkeypatch.setattr(tokens_that_are_left, "exact_sizes", lambda device: False)
        monkeypatch.setattr(pnn.nn.fast, "for_kernels", lambda x: True)
        called = []
        attend = live.attend
        monkeypatch.setattr(live, "attend", lambda *given: called.append(1) or attend(*given))
        with planned(Plan()) as plan:
            found = encoder(ids, cu_seqlens=borders.int(), last_at=at)
        room = [(live + 3, stopped + 2) for live, stopped in plan.counts]
        with planned(Plan(room, last_alone=True)):  # as a recorded pass: states are overwritten
            last = encoder(ids, cu_seqlens=borders.int(), last_at=at).last_hidden_state
    assert torch.allclose(last, expected.last_hidden_state, atol=1e-5)
    assert everybody or called
    assert everybody or len(expected.halted_at.unique()) > 1, "the pattern is not worth a test"
    assert torch.equal(found.halted_at, expected.halted_at)
    assert torch.allclose(found.last_hidden_state, expected.last_hidden_state, atol=1e-5)
