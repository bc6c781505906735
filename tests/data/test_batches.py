"""Packed batches: every sequence once an epoch, exact sizes, a position that can be gone back to."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pnn.config import DataConfig
from pnn.data.batches import PackedBatch, TrainingStream, evaluation_batches, pack, special_tokens
from pnn.data.shards import prepare

few = settings(deadline=None, max_examples=25)
COUNT, LONGEST = 57, 22


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """57 sequences of 7 to 22 tokens; the first word of each names it."""
    folder = tmp_path_factory.mktemp("batches")
    rng = np.random.default_rng(0)
    lines = [" ".join([f"name{i}", *(f"word{w}" for w in rng.integers(0, 30, rng.integers(4, 20)))]) for i in range(COUNT)]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"name{i}" for i in range(COUNT)), *(f"word{i}" for i in range(30))]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    data = DataConfig(
        train=str(folder / "text.txt"),
        tokenizer=str(folder / "vocab.txt"),
        prepared=str(folder / "prepared"),
        validation_sequences=7,
        max_length=64,
    )
    return prepare(data, lambda items, label: items)


@pytest.fixture(scope="module")
def tokens(prepared):
    assert prepared.train.lengths.max() <= LONGEST
    return prepared.train


def names(batch: PackedBatch):
    """Which sequences lie in a batch, in order (filler has no name)."""
    return [int(i) - 5 for i in batch.input_ids if 5 <= i < 5 + COUNT]


def stream_of(tokens, batch_tokens=64, seed=0, start=0, sequences=None):
    sequences = np.arange(COUNT) if sequences is None else sequences
    return TrainingStream(tokens, sequences, batch_tokens, seed, filler=0, start=start)


def same(one: PackedBatch, other: PackedBatch):
    fields = ("input_ids", "position_ids", "keys", "cu_seqlens")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in fields)


# Packing --------------------------------------------------------------------------------------------------------------


@few
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 12))
def test_a_packed_batch_knows_its_borders_positions_and_keys(lengths, missing):
    total = sum(lengths)
    ids, keys = np.arange(100, 100 + total), np.arange(7, 7 + len(lengths))
    batch = pack(ids, np.array(lengths), keys, size=total + missing, filler=3)
    all_lengths = [*lengths, missing] if missing else lengths
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == np.cumsum([0, *all_lengths]).tolist()
    assert batch.input_ids.tolist() == [*ids.tolist(), *[3] * missing]
    assert batch.position_ids.tolist() == [i for n in all_lengths for i in range(n)]
    assert batch.keys.tolist()[:total] == [key for key, n in zip(keys.tolist(), lengths, strict=True) for _ in range(n)]
    assert same(batch, batch.to("cpu"))
    if not missing:
        assert same(batch, pack(ids, np.array(lengths), keys))


def test_special_tokens_are_the_tokenizers(prepared):
    special = special_tokens(prepared.tokenizer)
    assert special.mask == 4
    assert special.vocab_size == 5 + COUNT + 30
    assert set(special.never_masked) == {0, 1, 2, 3, 4}


# Training -------------------------------------------------------------------------------------------------------------


@few
@given(st.integers(LONGEST, 300), st.integers(0, 10_000))
def test_every_epoch_visits_every_sequence_once(tokens, batch_tokens, seed):
    stream = stream_of(tokens, batch_tokens, seed)
    seen = []
    for _ in range(3 * COUNT):  # a batch holds at least one sequence
        if stream.position < 3 * COUNT:
            seen += names(next(stream))
    assert stream.position >= 3 * COUNT
    assert len(seen) == stream.position
    epochs = [seen[e * COUNT : (e + 1) * COUNT] for e in range(3)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]  # each in its own order
    assert epochs[0] != list(range(COUNT))


@few
@given(st.integers(LONGEST, 300), st.integers(0, 10_000))
def test_training_batches_have_exactly_the_asked_for_tokens(tokens, batch_tokens, seed):
    stream = stream_of(tokens, batch_tokens, seed)
    taken = 0
    for _ in range(12):
        before = stream.position
        batch = next(stream)
        assert len(batch.input_ids) == len(batch.position_ids) == len(batch.keys) == batch_tokens
        borders = batch.cu_seqlens.tolist()
        assert (borders[0], borders[-1]) == (0, batch_tokens)
        assert all(a < b for a, b in pairwise(borders))
        chosen = names(batch)
        assert len(chosen) == stream.position - before
        for place, sequence in enumerate(chosen):
            start, stop = borders[place], borders[place + 1]
            assert batch.input_ids[start:stop].tolist() == tokens.take(np.array([sequence])).tolist()
            assert batch.keys[start:stop].tolist() == [before + place] * (stop - start)  # its number in the stream
            assert batch.position_ids[start:stop].tolist() == list(range(stop - start))
        real = borders[len(chosen)]
        taken += real
        assert batch_tokens - real < LONGEST  # the next sequence did not fit
        assert (batch.input_ids[real:] == 0).all()
    assert stream.tokens_taken == taken


@few
@given(st.integers(LONGEST, 200), st.integers(0, 30), st.integers(0, 10_000))
def test_a_stream_started_at_a_saved_position_goes_on_alike(tokens, batch_tokens, done, seed):
    unbroken = stream_of(tokens, batch_tokens, seed)
    for _ in range(done):
        next(unbroken)
    resumed = stream_of(tokens, batch_tokens, seed, start=unbroken.position)
    for _ in range(6):
        assert same(next(unbroken), next(resumed))
    assert resumed.position == unbroken.position


@few
@given(st.integers(LONGEST, 200), st.integers(0, 10_000))
def test_two_half_streams_interleave_to_the_whole(tokens, batch_tokens, seed):
    whole, even, odd = (stream_of(tokens, batch_tokens, seed) for _ in range(3))
    odd.skip()
    for _ in range(5):
        assert same(next(whole), next(even))
        assert same(next(whole), next(odd))
        even.skip()
        odd.skip()
    assert even.position == whole.position
    assert even.tokens_taken == whole.tokens_taken


def test_another_seed_shuffles_otherwise(tokens):
    assert not same(next(stream_of(tokens, seed=0)), next(stream_of(tokens, seed=1)))
    assert same(next(stream_of(tokens, seed=0)), next(stream_of(tokens, seed=0)))


def test_only_the_given_sequences_are_trained_on(tokens):
    sequences = np.array([3, 8, 20, 41])
    stream = stream_of(tokens, 64, sequences=sequences)
    seen = [name for _ in range(10) for name in names(next(stream))]
    assert set(seen) == {3, 8, 20, 41}
    assert sorted(seen[:4]) == [3, 8, 20, 41]


@few
@given(st.integers(0, 10_000), st.sampled_from(["mask", "bert"]))
def test_filler_and_special_tokens_are_never_masked(prepared, seed, style):
    stream = stream_of(prepared.train, 64, seed)
    special = special_tokens(prepared.tokenizer)
    for _ in range(5):
        batch = next(stream)
        masked = batch.mask(special, 0.9, seed, style)
        assert (batch.input_ids[masked.positions] >= 5).all()
        assert torch.equal(masked.input_ids[batch.input_ids < 5], batch.input_ids[batch.input_ids < 5])
        assert len(masked.labels) > 0


def test_a_sequence_gets_another_mask_in_the_next_epoch_and_the_same_after_a_restart(prepared):
    special = special_tokens(prepared.tokenizer)

    def epoch_masks(start):
        stream = stream_of(prepared.train, 100, seed=5, start=start)
        masks = {}
        for _ in range(COUNT):  # more than an epoch; the first mask of each sequence counts
            batch = next(stream)
            ids = batch.mask(special, 0.15, 5).input_ids
            for name, first, last in zip(names(batch), batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=False):
                masks.setdefault(name, (ids[first:last] == 4).tolist())
        return masks

    first, second, again = epoch_masks(0), epoch_masks(COUNT), epoch_masks(0)
    assert first == again
    assert len(first) == len(second) == COUNT
    assert sum(first[name] != second[name] for name in range(COUNT)) > COUNT // 2


def test_a_batch_too_small_for_a_sequence_is_refused(tokens):
    longest = int(tokens.lengths.max())
    with pytest.raises(ValueError, match=f"batch_tokens={longest - 1} is too small"):
        stream_of(tokens, batch_tokens=longest - 1)
    assert len(names(next(stream_of(tokens, batch_tokens=longest)))) >= 1


# Evaluation -----------------------------------------------------------------------------------------------------------


def evaluation_masks(prepared, batch_tokens, sequences, seed=0):
    """Masked ids of each sequence, by its index."""
    special = special_tokens(prepared.tokenizer)
    found = {}
    for batch, indices in evaluation_batches(prepared.train, sequences, batch_tokens):
        ids = batch.mask(special, 0.15, seed).input_ids
        borders = batch.cu_seqlens.tolist()
        assert len(borders) == len(indices) + 1
        assert borders[-1] == len(ids)
        assert len(ids) <= batch_tokens or len(indices) == 1
        for index, start, stop in zip(indices.tolist(), borders, borders[1:], strict=False):
            assert index not in found
            found[index] = ids[start:stop].tolist()
    return found


@few
@given(st.integers(1, 400), st.integers(0, 10_000))
def test_evaluation_masks_are_the_same_for_any_batch_size(prepared, batch_tokens, seed):
    everything = np.arange(COUNT)
    found = evaluation_masks(prepared, batch_tokens, everything, seed)
    assert sorted(found) == list(range(COUNT))
    assert found == evaluation_masks(prepared, 1 << 20, everything, seed)


def test_evaluation_masks_follow_the_text_and_the_seed(prepared):
    everything = np.arange(COUNT)
    found = evaluation_masks(prepared, 100, everything)
    backwards = evaluation_masks(prepared, 100, everything[::-1])
    assert all(found[i] == backwards[COUNT - 1 - i] for i in range(COUNT))
    assert found != evaluation_masks(prepared, 100, everything, seed=1)
    assert evaluation_masks(prepared, 100, np.array([9]))[0] == found[9]


def test_evaluation_goes_through_the_sequences_in_order(prepared):
    sequences = np.array([50, 3, 17, 17, 8])
    seen = [name for batch, _ in evaluation_batches(prepared.train, sequences, 40) for name in names(batch)]
    assert seen == [50, 3, 17, 17, 8]
