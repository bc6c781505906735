"""Text → shards → text, found again when nothing changed, never half there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pnn.config import DataConfig
from pnn.data import corpora, shards, tokenizers
from pnn.data.shards import TokenSet, also_trained_on, prepare, read_manifest, verify
from pnn.data.tokenizers import fingerprint
from pnn.errors import UserError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(30))]


def quiet(items, label):
    return items


def some_lines(count=60, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(f"word{i}" for i in rng.integers(0, 30, rng.integers(5, 20))) for _ in range(count)]


@pytest.fixture
def data(tmp_path):
    """A corpus of 60 lines and a tokenizer of one token a word."""
    (tmp_path / "text.txt").write_text("\n".join(some_lines()) + "\n", encoding="utf-8")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return DataConfig(
        train=str(tmp_path / "text.txt"),
        tokenizer=str(tmp_path / "vocab.txt"),
        prepared=str(tmp_path / "prepared"),
        validation_sequences=10,
        max_length=32,
    )


def texts(tokens: TokenSet):
    tokenizer = tokens.tokenizer()
    return [tokenizer.decode(tokens.take(np.array([i])), skip_special_tokens=True) for i in range(len(tokens))]


def folders(data):
    return sorted(p.name for p in os.scandir(data.prepared))


def stamps(folder):
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*")}


# What is in them ------------------------------------------------------------------------------------------------------


def test_text_comes_back_from_its_tokens(data):
    prepared = prepare(data, quiet)
    assert texts(prepared.train) == some_lines()
    ids = prepared.tokenizer.get_vocab()
    for index, line in enumerate(some_lines()):
        expected = [2, *(ids[word] for word in line.split()), 3]
        assert prepared.train.take(np.array([index])).tolist() == expected
        assert prepared.train.lengths[index] == len(expected)
    manifest = prepared.train.manifest
    assert manifest["sequences"] == 60
    assert manifest["tokens"] == sum(len(line.split()) + 2 for line in some_lines())
    assert manifest["mean_length"] == manifest["tokens"] / 60
    assert (manifest["vocab_size"], manifest["max_length"], manifest["dtype"]) == (35, 32, "uint16")


def test_taking_several_sequences_gives_them_end_to_end_in_the_order_asked(data):
    tokens = prepare(data, quiet).train
    chosen = [5, 59, 0, 5]
    expected = np.concatenate([tokens.take(np.array([i])) for i in chosen])
    assert np.array_equal(tokens.take(np.array(chosen)), expected)
    assert len(tokens.take(np.array([], dtype=np.int64))) == 0


def test_long_lines_are_cut_and_still_end_in_sep(data):
    data.max_length = 9
    tokens = prepare(data, quiet).train
    assert tokens.lengths.max() == 9
    ids = tokens.tokenizer().get_vocab()
    for index, line in enumerate(some_lines()):
        assert tokens.take(np.array([index])).tolist() == [2, *(ids[word] for word in line.split()[:7]), 3]


def test_several_shards_hold_what_one_would(data, tmp_path, monkeypatch):
    one = prepare(data, quiet).train
    monkeypatch.setattr(shards, "TOKENS_PER_SHARD", 150)
    monkeypatch.setattr(shards, "LINES_PER_CHUNK", 7)
    data.prepared = str(tmp_path / "elsewhere")
    many = prepare(data, quiet).train
    assert len(one.manifest["shards"]) == 1
    assert len(many.manifest["shards"]) > 3
    assert np.array_equal(one.lengths, many.lengths)
    order = np.random.default_rng(0).permutation(60)
    assert np.array_equal(one.take(order), many.take(order))
    assert one.folder.name == many.folder.name
    verify(many.folder)


def test_a_large_vocabulary_takes_four_bytes_a_token(data, tmp_path):
    words = [*WORDS[:5], *(f"filler{i}" for i in range(1 << 16)), *WORDS[5:]]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokens = prepare(data, quiet).train
    assert tokens.manifest["dtype"] == "uint32"
    assert tokens.take(np.arange(60)).max() > 1 << 16
    assert texts(tokens) == some_lines()


# Found again, or made anew --------------------------------------------------------------------------------------------


def test_prepared_text_is_found_again_untouched(data, monkeypatch):
    first = prepare(data, quiet)
    before = stamps(first.train.folder)

    def never(*args):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(shards, "_write_shards", never)
    again = prepare(data, never)
    assert again.train.folder == first.train.folder
    assert stamps(first.train.folder) == before
    assert np.array_equal(again.train_sequences, first.train_sequences)


def test_whatever_changes_the_tokens_changes_the_folder(data, tmp_path):
    base = prepare(data, quiet).train.folder
    (tmp_path / "other.txt").write_text("\n".join([*WORDS, "more"]), encoding="utf-8")
    changes = {
        "filter": "none",
        "max_length": 31,
        "undo_wikitext_marks": True,
        "tokenizer": str(tmp_path / "other.txt"),
    }
    seen = {base}
    for key, value in changes.items():
        seen.add(prepare(DataConfig(**vars(data) | {key: value}), quiet).train.folder)
    (tmp_path / "text.txt").write_text("\n".join(some_lines(seed=1)), encoding="utf-8")
    seen.add(prepare(data, quiet).train.folder)
    assert len(seen) == len(changes) + 2
    unchanged = {"mask_probability": 0.3, "masking": "bert", "validation_sequences": 5, "max_sequences": 20}
    folder = prepare(data, quiet).train.folder
    for key, value in unchanged.items():
        assert prepare(DataConfig(**vars(data) | {key: value}), quiet).train.folder == folder


@pytest.mark.parametrize(
    ("pattern", "stem"),
    [
        ("*.txt", "wiki"),
        ("t*.txt", "t-"),
        ("*_2.txt", "_2"),
        ("**/*.txt", "wiki"),
        ("*-part.txt", "part"),
        ("text.txt", "text"),
    ],
)
def test_a_prepared_folder_is_named_by_what_is_left_of_the_texts_name(data, tmp_path, pattern, stem):
    (tmp_path / "wiki.en").mkdir()
    for name in ("text.txt", "text_2.txt", "text-part.txt"):
        (tmp_path / "wiki.en" / name).write_text("\n".join(some_lines()))
    data.train = str(tmp_path / "wiki.en" / pattern)
    folder = prepare(data, quiet).train.folder
    assert re.fullmatch(rf"{stem}-[0-9a-f]{{12}}", folder.name)
    old = folder.parent / f"--{folder.name[-12:]}"  # as earlier versions named it
    folder.rename(old)
    assert prepare(data, quiet).train.folder == old


def test_nothing_is_left_of_a_name_of_dots_and_stars():
    assert corpora.Source("../*/**/*.txt", {}, list).stem == "text"


def test_a_tokenizer_trained_on_the_corpus_is_kept_and_found_again(data, monkeypatch):
    data.tokenizer, data.vocab_size = "corpus", 120
    first = prepare(data, quiet)
    assert any(name.startswith("tokenizer-") for name in folders(data))
    assert len(first.tokenizer) <= 120

    def never(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(tokenizers, "trained_on", never)
    again = prepare(data, quiet)
    assert again.train.folder == first.train.folder
    assert tokenizers.fingerprint(again.tokenizer) == tokenizers.fingerprint(first.tokenizer)


# Never half there -----------------------------------------------------------------------------------------------------


def test_an_interrupt_in_the_middle_leaves_nothing(data, monkeypatch):
    monkeypatch.setattr(shards, "LINES_PER_CHUNK", 10)
    monkeypatch.setattr(shards, "TOKENS_PER_SHARD", 100)

    def interrupted(items, label):
        for index, item in enumerate(items):
            if index == 3:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        prepare(data, interrupted)
    assert folders(data) == []
    prepared = prepare(data, quiet)
    assert texts(prepared.train) == some_lines()
    assert folders(data) == [prepared.train.folder.name]


def test_an_error_in_the_text_leaves_nothing(data, tmp_path):
    with open(tmp_path / "text.txt", "ab") as f:
        f.write(b"\xff\xfe\n")
    with pytest.raises(UserError, match="line 61 is not valid UTF-8"):
        prepare(data, quiet)
    assert folders(data) == []


def test_another_run_that_finishes_first_does_no_harm(data, tmp_path):
    finished = prepare(DataConfig(**vars(data) | {"prepared": str(tmp_path / "other")}), quiet).train.folder

    def overtaken(items, label):
        yield from items
        shutil.copytree(finished, Path(data.prepared) / finished.name)

    assert texts(prepare(data, overtaken).train) == some_lines()


KILLED = """
import sys, time
from pathlib import Path
from pnn.config import DataConfig
from pnn.data import shards

shards.LINES_PER_CHUNK, shards.TOKENS_PER_SHARD = 10, 100

def stuck(items, label):
    for index, item in enumerate(items):
        yield item
        if index == 3:
            Path(sys.argv[4]).write_text("ready")
            time.sleep(60)

data = DataConfig(train=sys.argv[1], tokenizer=sys.argv[2], prepared=sys.argv[3], validation_sequences=10, max_length=32)
shards.prepare(data, stuck)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_no_finished_folder_and_the_next_one_cleans_up(data, tmp_path, start_pnn):
    ready, script = tmp_path / "ready", tmp_path / "killed.py"
    script.write_text(KILLED, encoding="utf-8")
    process = start_pnn(data.train, data.tokenizer, data.prepared, ready, script=script)
    try:
        deadline = time.monotonic() + 120
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ready.exists(), process.output()
    finally:
        process.kill()
    assert process.returncode == -signal.SIGKILL
    (partial,) = folders(data)
    assert partial.startswith(".text-")
    assert partial.endswith(f".partial-{process.pid}")
    prepared = prepare(data, quiet)
    assert folders(data) == [prepared.train.folder.name]
    assert texts(prepared.train) == some_lines()


def test_a_shard_that_is_cut_short_is_named(data):
    folder = prepare(data, quiet).train.folder
    for name in ("tokens-00000.bin", "lengths-00000.bin"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-2])
        with pytest.raises(UserError, match=f"{name} is cut short: delete"):
            prepare(data, quiet)
        (folder / name).write_bytes(whole)
    prepare(data, quiet)


@pytest.mark.parametrize("name", ["tokens-00000.bin", "lengths-00000.bin"])
@pytest.mark.parametrize("at", [0, 37, -1])
def test_verify_finds_one_flipped_bit(data, name, at):
    folder = prepare(data, quiet).train.folder
    verify(folder)
    damaged = bytearray((folder / name).read_bytes())
    damaged[at] ^= 1
    (folder / name).write_bytes(damaged)
    with pytest.raises(UserError, match=f"{name} does not match its checksum"):
        verify(folder)


def test_a_damaged_or_missing_manifest_is_named(data):
    folder = prepare(data, quiet).train.folder
    manifest = folder / "manifest.json"
    whole = manifest.read_text(encoding="utf-8")
    for text in (whole[:-20], json.dumps({"name": "x"})):
        manifest.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="holds no prepared text"):
            read_manifest(folder)
    manifest.write_text(whole, encoding="utf-8")
    (folder / "tokens-00000.bin").unlink()
    with pytest.raises(UserError, match="holds no prepared text"):
        read_manifest(folder)
    with pytest.raises(UserError, match="holds no prepared text"):
        verify(folder.parent)


# Training and validation ----------------------------------------------------------------------------------------------


def test_the_tail_is_held_out(data):
    prepared = prepare(data, quiet)
    assert prepared.train_sequences.tolist() == list(range(50))
    assert prepared.validation_sequences.tolist() == list(range(50, 60))
    assert prepared.validation is prepared.train


@pytest.mark.parametrize("held_out", [60, 61])
def test_a_tail_that_takes_everything_is_refused(data, held_out):
    data.validation_sequences = held_out
    said = f"60 sequences, not enough to hold out data.validation_sequences={held_out}: .* --set data.validation_sequences=6$"
    with pytest.raises(UserError, match=said):
        prepare(data, quiet)


@pytest.mark.parametrize(("lines", "held_out"), [(1, 1), (1, 2000), (2, 1), (2, 2)])
def test_a_text_too_short_for_any_tail_is_refused_with_what_it_takes(data, tmp_path, lines, held_out):
    (tmp_path / "text.txt").write_text("\n".join(some_lines(lines)))
    data.validation_sequences = held_out
    with pytest.raises(UserError) as caught:
        prepare(data, quiet)
    said = (
        f"text.txt: {'1 sequence' if lines == 1 else '2 sequences'}, but it takes at least 3 lines of more than 20 characters"
    )
    assert said in str(caught.value)
    assert "--set" not in str(caught.value)


def test_what_is_advised_of_a_short_text_works(data, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(some_lines(3)))
    with pytest.raises(UserError, match=r"or --set data\.validation_sequences=2$"):
        prepare(data, quiet)
    data.validation_sequences = 2
    assert (len(prepare(data, quiet).train_sequences), len(prepare(data, quiet).validation_sequences)) == (1, 2)
    data.validation_sequences = 1
    with pytest.raises(UserError, match=r"^data\.validation_sequences: 1 sequence to validate on, but it needs at least 2$"):
        prepare(data, quiet)


def test_another_validation_source_uses_the_same_tokenizer_and_at_most_so_many_sequences(data, tmp_path):
    (tmp_path / "valid.txt").write_text("\n".join(some_lines(25, seed=3)), encoding="utf-8")
    data.validation = str(tmp_path / "valid.txt")
    for limit, used in ((10, 10), (1000, 25)):
        data.validation_sequences = limit
        prepared = prepare(data, quiet)
        assert prepared.train_sequences.tolist() == list(range(60))
        assert prepared.validation_sequences.tolist() == list(range(used))
        assert texts(prepared.validation) == some_lines(25, seed=3)
        tokenizer_of = [t.manifest["recipe"]["tokenizer"] for t in (prepared.train, prepared.validation)]
        assert tokenizer_of[0] == tokenizer_of[1]


def test_max_sequences_is_a_seeded_sample_of_the_right_size_outside_the_tail(data):
    data.max_sequences = 20
    chosen = prepare(data, quiet).train_sequences
    assert len(set(chosen.tolist())) == 20
    assert chosen.max() < 50
    assert (np.diff(chosen) > 0).all()
    assert chosen.tolist() != list(range(20))  # a sample, not the beginning
    assert np.array_equal(prepare(data, quiet).train_sequences, chosen)
    data.max_sequences = 50
    assert prepare(data, quiet).train_sequences.tolist() == list(range(50))


def test_a_folder_of_tokens_stands_for_its_text(data, tmp_path):
    made = prepare(data, quiet)
    moved = tmp_path / "elsewhere" / "tokens"
    shutil.copytree(made.train.folder, moved)
    there = replace(data, train=str(moved), prepared=str(tmp_path / "empty"))
    again = prepare(there, quiet)
    assert again.train.fingerprint == made.train.fingerprint
    assert np.array_equal(again.train_sequences, made.train_sequences)
    assert fingerprint(again.tokenizer) == fingerprint(made.tokenizer)
    assert not (tmp_path / "empty").exists()
    with pytest.raises(UserError, match=r"tokens of another data\.max_length"):
        prepare(replace(there, max_length=data.max_length - 1), quiet)
    with pytest.raises(UserError, match="but the model reads rows"):
        prepare(replace(there, layout="rows"), quiet)


def test_training_and_validation_may_be_two_folders_of_tokens(data, tmp_path):
    (tmp_path / "other.txt").write_text("\n".join(some_lines()[:7]) + "\n")
    made = prepare(replace(data, validation=str(tmp_path / "other.txt")), quiet)
    folders = {"train": str(made.train.folder), "validation": str(made.validation.folder)}
    again = prepare(replace(data, **folders, prepared=str(tmp_path / "empty")), quiet)
    assert again.validation.fingerprint == made.validation.fingerprint != again.train.fingerprint
    assert len(again.validation_sequences) == 7
    assert len(again.train_sequences) == 60
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize("text", ["{}", "not JSON", '{"name": "x", "recipe": 3}'])
def test_a_manifest_of_something_else_is_named(data, tmp_path, text):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"folder/manifest\.json is not that of token shards"):
        prepare(replace(data, train=str(tmp_path / "folder")), quiet)


def test_what_is_validated_on_and_was_trained_on_too_is_counted(data, pnn_command, tmp_path):
    """7 of the quickstart's 2,000 held-out paragraphs: there are not so many short ones. The golden curve rests on them."""
    command = ("data", "prepare", "quickstart_pnn", "--set", f"data.prepared={tmp_path / 'quickstart'}")
    assert "7 of 2,000 sequences of the validation also occur in the training" in pnn_command(*command)[1]
    prepared = prepare(data, quiet)
    assert also_trained_on(prepared) == 0
    rows = prepared.train_sequences
    assert also_trained_on(replace(prepared, validation_sequences=rows[[3, 5, 3]])) == 3
