"""Continuous batches: what each prompt gets is what `generate` gives it alone, whoever shares the batch."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_decoders import SMALL, build, every_decoder

from pnn.models import continuous
from pnn.models.continuous import Slots, continue_all, most_probable, sampled


def prompts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, SMALL["vocab_size"], (length,), generator=draw).tolist() for length in lengths]


def alone(model, prompt: list[int], new_tokens: int, end: int | None = None) -> list[int]:
    ids = torch.tensor([prompt])
    told = {"attention_mask": torch.ones_like(ids), "eos_token_id": end, "pad_token_id": 0, "do_sample": False}
    made = model.generate(ids, max_new_tokens=new_tokens, **told)
    return made[0, len(prompt) :].tolist()


@every_decoder
def test_every_text_is_as_if_it_were_alone(name):
    model, given_ = build(name), prompts(3, 1, 9, 2, 5, 1, 4)
    made = continue_all(model, given_, 11, (), most_probable, rows=2)
    assert made == [alone(model, prompt, 11) for prompt in given_]


@pytest.mark.parametrize("name", ["channel", "token", "PNN, rewrite"])
def test_a_row_whose_text_has_ended_takes_the_next_prompt(name, monkeypatch):
    model, given_ = build(name), prompts(2, 5, 1, 3, 7, 2, 2, 6)
    ends = {prompt: alone(model, given_[prompt], 12)[prompt + 1] for prompt in (0, 3)}
    steps = 0
    whole = Slots.step

    def counted(self, choose):
        nonlocal steps
        steps += 1
        return whole(self, choose)

    monkeypatch.setattr(Slots, "step", counted)
    for end in ends.values():
        steps = 0
        made = continue_all(model, given_, 12, {end}, most_probable, rows=3)
        expected = [alone(model, prompt, 12, end) for prompt in given_]
        assert made == [one[: one.index(end) + 1] if end in one else one for one in expected]
        assert steps <= sum(-(-len(one) // continuous.EVERY) * continuous.EVERY for one in made)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(1, 5), st.integers(1, 20))
def test_any_lengths_in_any_number_of_rows(lengths, rows, new_tokens):
    model, given_ = MODEL, prompts(*lengths)
    made = continue_all(model, given_, new_tokens, (), most_probable, rows)
    assert made == [alone(model, prompt, new_tokens) for prompt in given_]


MODEL = build("token")


def test_without_memory_to_record_steps_are_plain(monkeypatch):
    def too_large(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(continuous, "may_record", lambda model: True)
    monkeypatch.setattr(continuous, "Recording", too_large)
    for name in ("device", "Stream", "graph_pool_handle"):  # this machine may have no GPU
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    given_ = prompts(3, 1, 7)
    made = continue_all(MODEL, given_, 5, (), most_probable, rows=2)
    assert made == [alone(MODEL, prompt, 5) for prompt in given_]


def test_the_place_goes_round_the_buffers():
    model, given_ = build("PNN"), prompts(*[2] * 12)
    made = continue_all(model, given_, 9, (), most_probable, rows=1)  # 12 texts of 16 steps in 19 places
    assert made == [alone(model, prompt, 9) for prompt in given_]


def test_no_prompts():
    assert continue_all(build("scalar"), [], 5, (), most_probable, rows=4) == []


def test_samples_follow_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -9.0]]).expand(4000, -1)
    torch.manual_seed(0)
    shares = torch.bincount(sampled(0.5, None)(logits), minlength=4) / 4000
    assert torch.allclose(shares, (logits[0] / 0.5).softmax(0), atol=0.03)
    assert set(sampled(1.0, 2)(logits).tolist()) == {0, 1}
