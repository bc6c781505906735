"""Masks are a function of (seed, key, position): about the right share, never special tokens, whatever the packing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pnn.data.masking import SpecialTokens, apply_mask, content_keys, hash_of, mix, select

few = settings(deadline=None, max_examples=25)
SPECIAL = SpecialTokens(mask=4, vocab_size=1000, never_masked=(0, 1, 2, 3, 4))
seeds = st.integers(0, 2**31 - 1)


def packed(lengths, seed=0, vocab=1000, low=5):
    """Random ids with a key per sequence: flat (ids, keys, positions)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, vocab, (sum(lengths),), generator=generator)
    keys = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return ids, keys, positions


def within(count, total, probability, deviations=5.0):
    return abs(count - total * probability) <= deviations * math.sqrt(total * probability * (1 - probability))


# The hash -------------------------------------------------------------------------------------------------------------


def murmur_finaliser(x):
    """MurmurHash3's 32-bit finaliser in Python's whole numbers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


@few
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_the_mixer_is_murmurs_finaliser(values):
    assert mix(torch.tensor(values)).tolist() == [murmur_finaliser(value) for value in values]


@few
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_a_hash_folds_its_parts_in_order(parts):
    expected = 0x9E3779B9
    for part in parts:
        expected = murmur_finaliser((expected * 31 + murmur_finaliser((part + 0x9E3779B9) % 2**32)) % 2**32)
    assert hash_of(*parts) == expected
    assert hash_of(*(torch.tensor([part, part]) for part in parts)).tolist() == [expected] * 2


def test_the_hash_is_evenly_spread():
    values = hash_of(7, torch.arange(100_000), 3)
    counts = torch.histc(values.double(), bins=20, min=0, max=2.0**32)
    assert all(within(count, 100_000, 1 / 20) for count in counts.tolist())
    for bit in range(32):
        assert within(((values >> bit) & 1).sum().item(), 100_000, 0.5)
    assert len(set(values.tolist())) > 99_990


# Which tokens ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25, derandomize=True)  # a bound on chance: the same draws every time
@given(seeds, st.sampled_from([0.05, 0.15, 0.5]))
def test_about_the_asked_for_share_is_selected(seed, probability):
    ids, keys, positions = packed([40] * 250)
    chosen = select(ids, keys, positions, SPECIAL, probability, seed)
    assert within(chosen.sum().item(), 10_000, probability)
    by_position = chosen.view(250, 40).sum(0)
    assert all(within(count, 250, probability, 6) for count in by_position.tolist())  # no place is favoured
    by_sequence = chosen.view(250, 40).sum(1).double()
    assert 0.55 < by_sequence.var() / (40 * probability * (1 - probability)) < 1.6  # and no sequence


@few
@given(seeds, st.lists(st.integers(1, 30), min_size=1, max_size=10))
def test_special_tokens_are_never_selected(seed, lengths):
    ids, keys, positions = packed(lengths, seed=seed % 1000, vocab=12, low=0)  # about half of them special
    chosen = select(ids, keys, positions, SPECIAL, 0.9, seed)
    assert (ids[chosen] > 4).all()
    for style in ("mask", "bert"):
        masked = apply_mask(ids, keys, positions, SPECIAL, probability=0.9, seed=seed, style=style)
        special = ids <= 4
        assert torch.equal(masked.input_ids[special], ids[special])
        assert torch.equal(masked.positions, chosen.nonzero().squeeze(1))


@few
@given(seeds, st.lists(st.integers(1, 30), min_size=2, max_size=10), st.randoms())
def test_a_sequences_mask_depends_on_neither_packing_nor_order(seed, lengths, random):
    ids, keys, positions = packed(lengths, seed=1)
    whole = apply_mask(ids, keys, positions, SPECIAL, probability=0.3, seed=seed, style="bert").input_ids
    sequences = list(range(len(lengths)))
    random.shuffle(sequences)
    places = [torch.where(keys == sequence)[0] for sequence in sequences]
    order = torch.cat(places)
    shuffled = apply_mask(ids[order], keys[order], positions[order], SPECIAL, probability=0.3, seed=seed, style="bert")
    assert torch.equal(shuffled.input_ids, whole[order])
    for place in places:
        alone = apply_mask(ids[place], keys[place], positions[place], SPECIAL, probability=0.3, seed=seed, style="bert")
        assert torch.equal(alone.input_ids, whole[place])


@few
@given(seeds, seeds)
def test_another_seed_gives_another_mask(one, other):
    ids, keys, positions = packed([50] * 10)
    masks = [select(ids, keys, positions, SPECIAL, 0.15, seed) for seed in (one, other, one)]
    assert torch.equal(masks[0], masks[2])
    assert torch.equal(masks[0], masks[1]) == (one == other)


def test_masks_of_two_sequences_are_independent():
    ids, keys, positions = packed([1000] * 40)
    chosen = select(ids, keys, positions, SPECIAL, 0.5, 0).view(40, 1000)
    same = (chosen[:-1] == chosen[1:]).sum().item()
    assert within(same, 39 * 1000, 0.5)


# What they become -----------------------------------------------------------------------------------------------------


def test_every_selected_token_becomes_the_mask_token():
    ids, keys, positions = packed([30] * 20)
    chosen = select(ids, keys, positions, SPECIAL, 0.15, 3)
    masked = apply_mask(ids, keys, positions, SPECIAL, probability=0.15, seed=3)
    assert (masked.input_ids[chosen] == 4).all()
    assert torch.equal(masked.input_ids[~chosen], ids[~chosen])
    assert torch.equal(masked.positions, chosen.nonzero().squeeze(1))
    assert torch.equal(masked.labels, ids[chosen])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bert_style_is_eighty_ten_ten(seed):
    ids, keys, positions = packed([100] * 1000)
    masked = apply_mask(ids, keys, positions, SPECIAL, probability=0.5, seed=seed, style="bert")
    plain = apply_mask(ids, keys, positions, SPECIAL, probability=0.5, seed=seed)
    assert torch.equal(masked.positions, plain.positions)  # the same targets, whatever becomes of them
    assert torch.equal(masked.labels, plain.labels)
    now, before, total = masked.input_ids[masked.positions], masked.labels, len(masked.labels)
    became_mask, kept = (now == 4).sum().item(), (now == before).sum().item()
    assert within(became_mask, total, 0.8 + 0.1 / 1000)
    assert within(kept, total, 0.1 + 0.1 / 1000)
    assert within(total - became_mask - kept, total, 0.1 * 998 / 1000)
    random_ones = now[(now != 4) & (now != before)]
    assert random_ones.min() >= 0
    assert random_ones.max() < 1000
    halves = (random_ones < 500).sum().item()
    assert within(halves, len(random_ones), 0.5)
    others = torch.ones_like(ids, dtype=torch.bool)
    others[masked.positions] = False
    assert torch.equal(masked.input_ids[others], ids[others])


@few
@given(seeds, st.integers(1, 120), st.sampled_from(["mask", "bert"]))
def test_a_fixed_number_of_places_holds_the_same_targets_first(seed, capacity, style):
    ids, keys, positions = packed([25, 40, 3, 32])
    plain = apply_mask(ids, keys, positions, SPECIAL, probability=0.4, seed=seed, style=style)
    fixed = apply_mask(ids, keys, positions, SPECIAL, probability=0.4, seed=seed, style=style, capacity=capacity)
    used = min(capacity, len(plain.labels))
    assert fixed.positions.shape == fixed.labels.shape == (capacity,)
    assert torch.equal(fixed.input_ids, plain.input_ids)
    assert torch.equal(fixed.positions[:used], plain.positions[:used])
    assert torch.equal(fixed.labels[:used], plain.labels[:used])
    assert (fixed.labels[used:] == -100).all()
    assert (fixed.positions >= 0).all()
    assert (fixed.positions < len(ids)).all()


# Keys of content ------------------------------------------------------------------------------------------------------


def keys_of(*sequences):
    lengths = np.array([len(s) for s in sequences])
    return content_keys(np.array([token for s in sequences for token in s]), lengths).tolist()


def test_a_content_key_depends_on_tokens_and_their_order_alone():
    one, two, three = [5, 6, 7], [7, 6, 5], [5, 6]
    keys = keys_of(one, two, three, one)
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3
    assert keys_of(one) == keys[:1]
    assert keys_of(three, two, one) == [keys[2], keys[1], keys[0]]
    assert all(0 <= key < 2**32 for key in keys)


@few
@given(st.lists(st.lists(st.integers(0, 30521), min_size=1, max_size=8), min_size=1, max_size=12))
def test_content_keys_tell_sequences_apart(sequences):
    keys = keys_of(*sequences)
    by_content = {}
    for sequence, key in zip(sequences, keys, strict=True):
        assert by_content.setdefault(tuple(sequence), key) == key
    assert len(set(by_content.values())) == len(by_content)
