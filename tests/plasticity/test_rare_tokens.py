"""Rare tokens may go too: where the text has them their pieces stand, the loss stays one per token of the whole vocabulary, and
the teacher is not asked for them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from small_cycles import LENGTH, language, records_of, same_weights, stopped_at_update
from small_vocabularies import FORMS, model_for, tokenizer_of

from pnn.plasticity import vocabulary
from pnn.plasticity.measure import held_out_loss, held_out_nats
from pnn.plasticity.phases import learn_round
from pnn.plasticity.scores import prepared
from pnn.plasticity.settings import CycleSettings
from pnn.plasticity.shrink import ShrinkSettings, shrink
from pnn.plasticity.teaching import LESSONS, Teacher, plain_divergence
from pnn.plasticity.text import Text, read_text
from pnn.plasticity.vocabulary import Trimmed, expected, needed, pieces_of, stays, trim, with_tokens

shrinking = importlib.import_module("pnn.plasticity.shrink")
RARE = 0.1  # the text is short
BYTES = tokenizer_of("bytes")
MODEL = model_for(BYTES)
PLAN = {"learn_steps": 4, "batch_rows": 4, "score_rows": 8, "evaluate_every": 4, "learning_rate": 1e-3}


@pytest.fixture(autouse=True)
def _as_many_as_asked(monkeypatch):
    monkeypatch.setattr(vocabulary, "MULTIPLE", 1)


@pytest.fixture(scope="module", params=FORMS)
def reader(request) -> hf.PreTrainedTokenizerFast:
    return tokenizer_of(request.param)


def text_of(tokenizer, folder: Path) -> Text:
    file = folder / "text.txt"
    file.write_text(language())
    more = {"length": LENGTH, "count": True, "progress": lambda rows, _: rows}
    return read_text(model_for(tokenizer), tokenizer, str(file), **more)


@pytest.fixture
def read(reader, tmp_path) -> Text:
    return text_of(reader, tmp_path)


# Which go -------------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.003, 0.02, 0.3]), st.sampled_from([0.5, 0.9, 1.0]))
def test_the_rarest_go_after_those_that_are_never_seen_and_within_the_limit(seed, rare, share_unseen):
    draw, size = torch.Generator().manual_seed(seed), len(BYTES)
    seen = torch.randint(1, 50, (size,), generator=draw) * (torch.rand(size, generator=draw) > share_unseen)
    rows = torch.zeros(2, LENGTH, dtype=torch.long)
    worth = torch.rand(size, generator=draw).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "MULTIPLE", 1)
        patch.setattr(vocabulary, "expected", lambda model, text: worth.clone())
        text = Text(rows, rows, seen=seen)
        kept = {most: stays(MODEL, BYTES, text, most * 16, rare) for most in (7, 60, size)}
    special = needed(BYTES, [1, BYTES.eos_token_id])
    never = {*range(size)} - needed(BYTES, [1, BYTES.eos_token_id, *seen.nonzero().flatten().tolist()])
    limit = rare * int(seen.sum())
    for most, left in kept.items():
        gone = {*range(size)} - {*left}
        assert needed(BYTES, left) == {*left}  # whatever is left has all its parts
        assert not gone & special
        assert int(seen[[*gone]].sum()) <= limit
        assert gone <= never or never <= gone  # never seen ones first
        assert len(gone) <= most
        if len(gone) < most:  # no other could go: each is a part of one that stays, or too frequent
            free = [one for one in left if needed(BYTES, {*left} - {one} - special) == {*left} - {one}]
            assert all(int(seen[[*gone, one]].sum()) > limit for one in free if one not in special)


def test_where_tokens_that_are_never_seen_suffice_rare_ones_change_nothing(reader, read):
    model = model_for(reader)
    never = len(reader) - len(stays(model, reader, read, len(reader) * 16))
    for most in (1, never // 2, never):
        assert stays(model, reader, read, most * 16, RARE) == stays(model, reader, read, most * 16)
    more = stays(model, reader, read, (never + 5) * 16, RARE)
    assert len(more) == len(reader) - never - 5
    assert {*more} < {*stays(model, reader, read, never * 16)}


# The text -------------------------------------------------------------------------------------------------------------


def said(tokenizer, row) -> list[str]:
    return tokenizer.convert_ids_to_tokens(row.tolist())


def test_rows_say_the_same_in_pieces_up_to_their_end(reader, read):
    found = trim(model_for(reader), reader, read, rare=RARE)
    assert found.rare > 3
    kept = {token: place for place, token in enumerate(found.kept)}
    text = found.text
    assert found.recut == sum(any(token not in kept for token in row) for row in read.held_out.tolist()) > 1
    assert text.pieces.any()
    for before, after, ends in zip(read.held_out, text.held_out, text.ends, strict=True):
        old, new = said(reader, before), said(found.tokenizer, after)
        assert "".join(old).startswith("".join(new))
        here = [len("".join(new[: place + 1])) for place in ends.nonzero().flatten().tolist()]
        assert here == [len("".join(old[: count + 1])) for count in range(int(ends.sum()))]
    for before, after, pieces in zip(read.train, text.train, text.pieces, strict=True):
        written = [[kept[one]] if one in kept else pieces_of(said(reader, before)[at], found.tokenizer)
                   for at, one in enumerate(before.tolist())]  # fmt: skip
        assert after.tolist() == [one for its in written for one in its][:LENGTH]
        gone = [one not in kept for one, its in zip(before.tolist(), written, strict=True) for _ in its]
        assert pieces.tolist() == gone[:LENGTH]


def test_a_text_without_pieces_has_the_fingerprint_that_it_had():
    rows, marks = torch.arange(12).view(3, 4), torch.ones(3, 4, dtype=torch.bool)
    assert Text(rows, rows[:2]).fingerprint() == "d81a15b66eccb061"
    assert Text(rows, rows[:2], seen=torch.arange(5)).fingerprint() == "db0884f53e024942"
    others = [Text(rows, rows[:2]), Text(rows, rows[:2], pieces=marks), Text(rows, rows[:2], ends=marks[:2])]
    assert len({one.fingerprint() for one in others}) == 3


def test_how_often_tokens_are_seen_counts_pieces(reader, read):
    found = trim(model_for(reader), reader, read, rare=RARE)
    expected_ = torch.zeros(len(found.kept), dtype=torch.long)
    place = {token: at for at, token in enumerate(found.kept)}
    for token, count in enumerate(read.seen.tolist()):
        name = reader.convert_ids_to_tokens(token)
        for piece in [place[token]] if token in place else pieces_of(name, found.tokenizer):
            expected_[piece] += count
    assert torch.equal(found.text.seen, expected_)


# By hand: one token of two pieces goes ----------------------------------------------------------------------------------


def without_one(rows: list[list[str]]) -> Trimmed:
    """Rows of `th`, `e` and `a`, without `th`."""
    number = {name: BYTES.convert_tokens_to_ids(name) for name in ("th", "e", "a")}
    ids = torch.tensor([[number[name] for name in row] for row in rows])
    seen = torch.bincount(ids.flatten(), minlength=len(BYTES))
    kept = sorted({*range(len(BYTES))} - {number["th"]})
    return with_tokens(MODEL, BYTES, Text(ids, ids, seen=seen), kept)


ROWS = [
    ["e", "th", "a", "e", "a", "e"],  # e t h a e a | e
    ["th", "a", "e", "a", "e", "a"],  # t h a e a e | a
    ["a", "e", "a", "e", "a", "th"],  # a e a e a t | h
    ["a", "e", "a", "e", "a", "e"],
]
MEASURED = [[1, 2, 3, 4, 5], [2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3, 4, 5]]
TARGETS = [4, 4, 4, 5]  # tokens of the whole vocabulary: th is one, the first is not predicted, the last not where it is cut


def test_the_loss_is_that_of_all_pieces_per_token_of_the_whole_vocabulary():
    found = without_one(ROWS)
    assert found.recut == 3
    assert [said(found.tokenizer, row) for row in found.text.held_out][:3] == [[*"ethaea"], [*"thaeae"], [*"aeaeat"]]
    with torch.no_grad():
        q = found.model(found.text.held_out).logits.log_softmax(-1)
    by_hand = [
        -sum(float(q[row, at - 1, found.text.held_out[row, at]]) for at in places) for row, places in enumerate(MEASURED)
    ]
    nats, targets = held_out_nats(found.model, found.text)
    assert nats.tolist() == pytest.approx(by_hand, rel=1e-5)
    assert targets.tolist() == TARGETS
    measured = held_out_loss(found.model, found.text)
    assert measured["loss"] == pytest.approx(sum(by_hand) / sum(TARGETS), rel=1e-5)
    assert measured["targets"] == sum(TARGETS)


def test_a_row_whose_first_token_fills_it_has_no_targets():
    found = without_one([["th", "th"], ["e", "a"]])  # t h | t h
    nats, targets = held_out_nats(found.model, found.text)
    assert targets.tolist() == [0, 1]
    assert nats[0] == 0


def test_where_all_is_told_a_teacher_of_states_says_nothing():
    found = without_one([["a", "th"], ["e", "th"]])
    batch = found.text.for_update(0, 2, seed=0)
    batch["told"] = batch["labels"]
    with torch.no_grad():
        losses = [Teacher(whole_without(found), one).loss(found.model, prepared(found.model, batch)) for one in LESSONS]
    assert float(losses[0]) == pytest.approx(float(losses[1]))


def whole_without(found: Trimmed) -> hf.PreTrainedModel:
    return vocabulary.keep_tokens(model_for(BYTES), found.kept)


@pytest.mark.parametrize("lesson", ["logits", "states"])
def test_the_teacher_is_not_asked_for_pieces(lesson):
    found = without_one(ROWS)
    batch = found.text.for_update(0, 4, seed=0)
    torch.manual_seed(0)
    teacher = model_for(BYTES)
    teacher = vocabulary.keep_tokens(teacher, found.kept)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
        ours, theirs = (one(batch["input_ids"], output_hidden_states=True) for one in (found.model, teacher))
        loss = Teacher(teacher, lesson).loss(found.model, prepared(found.model, batch))
    pieces = {*found.tokenizer.convert_tokens_to_ids(["t", "h"])}
    targets = batch["input_ids"][:, 1:].flatten()
    told = torch.tensor([one if one in pieces else -1 for one in targets.tolist()])
    assert torch.equal(batch["told"][:, 1:].flatten(), told)
    by_hand = plain_divergence(ours.logits[:, :-1].flatten(0, 1), theirs.logits[:, :-1].flatten(0, 1), told)
    if lesson == "states":
        h, wanted = (one.hidden_states[-1][:, :-1].flatten(0, 1)[told < 0] for one in (ours, theirs))
        by_hand = by_hand + (h - wanted).square().sum() / wanted.square().sum()
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-5)


def test_whoever_learns_the_text_is_told_nothing_more():
    found = without_one(ROWS)
    plan = CycleSettings(prune=0, grow=0, learn_steps=1, evaluate_every=1, batch_rows=4, learning_rate=1e-3)
    with torch.no_grad():
        loss = found.model(**prepared(found.model, {"input_ids": found.text.train})).loss
    (step,) = learn_round(found.model, [], found.text, plan, 1, MODEL)
    assert step[1] == pytest.approx(float(loss), rel=1e-5)
    assert "told" not in without_one([["a", "e"], ["e", "a"]]).text.for_update(0, 2, seed=0)


# Shrinking ------------------------------------------------------------------------------------------------------------


def test_whoever_goes_on_after_a_kill_learns_from_the_same_pieces(reader, read, tmp_path, monkeypatch):
    monkeypatch.setattr(shrinking, "RARE", RARE)
    plan = ShrinkSettings(fewer=0.35, kinds=("token", "neuron"), **PLAN)
    straight = shrink(model_for(reader), read, tmp_path / "straight", plan, tokenizer=reader)
    assert straight.summary["rare_tokens"] > 3
    assert straight.summary["learnt_from"] == "logits"
    assert straight.summary["learnt_in"] == "fp32"  # states are narrow
    assert straight.text.pieces is not None
    with stopped_at_update(2):
        shrink(model_for(reader), read, tmp_path / "work", plan, tokenizer=reader)
    monkeypatch.setattr(vocabulary, "expected", lambda model, text: -expected(model, text))
    resumed = shrink(model_for(reader), read, tmp_path / "work", plan, tokenizer=reader, resume=True)
    assert same_weights(resumed.model, straight.model)
    assert resumed.text.fingerprint() == straight.text.fingerprint()
    assert records_of(tmp_path / "work") == records_of(tmp_path / "straight")


def test_where_a_speed_is_asked_for_rare_tokens_stay(reader, read, tmp_path, monkeypatch):
    monkeypatch.setattr(shrinking, "faster", lambda *_, **__: [])
    plan = ShrinkSettings(faster=1.01, kinds=("token", "neuron"), **PLAN)
    found = shrink(model_for(reader), read, tmp_path / "work", plan, tokenizer=reader)
    assert found.summary["rare_tokens"] == 0
    assert found.model.config.vocab_size == len(stays(model_for(reader), reader, read, len(reader) * 16))


def test_one_command_to_a_folder_without_rare_tokens(pnn_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shrinking, "RARE", RARE)
    model_for(BYTES).save_pretrained("model")
    BYTES.save_pretrained("model")
    Path("text.txt").write_text(language())
    words = ("shrink", "model", "--data", "text.txt", "--learn-steps", 2, "--batch-size", 4, "--validation-rows", 8)
    whole = sum(parameter.numel() for parameter in MODEL.parameters())
    seen = text_of(BYTES, tmp_path)
    share = 16 * (len(BYTES) - len(stays(MODEL, BYTES, seen, whole, RARE / 2))) / whole
    code, out, err = pnn_command(*words, "--kinds", "tokens", "--parameters", f"-{100 * share:.1f}%", "--output", "small")
    assert code == 0, err
    assert "held-out rows have such tokens" in out + err
    summary = json.loads(Path("small/summary.json").read_text())
    assert summary["rare_tokens"] > 0
    card = Path("small/README.md").read_text()
    assert "which `text.txt` rarely or never has" in card
    assert "this and other text takes more tokens than before" in card
    smaller, cuts = hf.AutoModelForCausalLM.from_pretrained("small"), hf.AutoTokenizer.from_pretrained("small")
    assert summary["after"]["units"]["token"] == len(cuts) == smaller.config.vocab_size < len(BYTES)
    ids = cuts(language(), add_special_tokens=False).input_ids
    assert cuts.decode(ids) == language()
    assert len(BYTES(language(), add_special_tokens=False).input_ids) < len(ids)
