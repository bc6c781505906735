"""Tokens that a text never has can go: predictions stay, text is cut as before, other text stays readable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from small_cycles import LENGTH, language, records_of, same_weights, stopped_at_update
from small_vocabularies import FORMS, OTHER, STRANGE, ids, model_for, names, tokenizer_of
from tokenizers import Tokenizer, models

from pnn.errors import UserError
from pnn.models.plastic import of_ranges
from pnn.plasticity import vocabulary
from pnn.plasticity.shrink import ShrinkSettings, shrink
from pnn.plasticity.text import Text, read_text
from pnn.plasticity.vocabulary import check_tokens, expected, in_turn, keep_tokens, needed, trim, without_tokens


@pytest.fixture(scope="module", params=FORMS)
def reader(request) -> hf.PreTrainedTokenizerFast:
    return tokenizer_of(request.param)


@pytest.fixture
def read(reader, tmp_path) -> Text:
    file = tmp_path / "text.txt"
    file.write_text(language())
    more = {"length": LENGTH, "train_rows": 12, "count": True, "progress": lambda rows, _: rows}
    return read_text(model_for(reader), reader, str(file), **more)


def test_the_text_is_cut_as_before_and_other_text_stays_readable(reader, read):
    smaller = trim(model_for(reader), reader, read).tokenizer
    assert len(smaller) < len(reader) - 20
    assert len(smaller) % 64 == 0
    lines = language().split("\n")
    for line in lines[: int(0.8 * len(lines))]:  # the end is held out
        assert names(smaller, line) == names(reader, line)
    assert len(ids(smaller, "quixotle vorpander")) > len(ids(reader, "quixotle vorpander"))
    for text in (OTHER, "quixotle vorpander"):
        assert smaller.decode(ids(smaller, text)) == reader.decode(ids(reader, text))
    assert smaller("a").input_ids[0] == smaller.bos_token_id
    for name in ("bos_token", "eos_token", "unk_token"):
        assert getattr(smaller, name) == getattr(reader, name)
    assert names(smaller, "<added>") == ["<added>"]


BYTES = tokenizer_of("bytes")
WORDS = sorted({*language().split(), *STRANGE, *OTHER.split()})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=12), st.text(max_size=20))
def test_whatever_a_text_has_it_is_cut_as_before(words, more):
    text = " ".join(words) + more
    smaller = without_tokens(BYTES, sorted(needed(BYTES, ids(BYTES, text))))
    assert names(smaller, text) == names(BYTES, text)
    assert smaller.decode(ids(smaller, OTHER)) == BYTES.decode(ids(BYTES, OTHER))


@pytest.mark.parametrize("tied", [True, False])
def test_predictions_stay(reader, read, tied):
    model = model_for(reader, tied)
    smaller, tokenizer, text, kept, *_ = trim(model, reader, read)
    assert kept == reader.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    with torch.no_grad():
        before, after = model(read.train).logits, smaller(text.train).logits
    assert torch.equal(after, before[..., kept])
    assert smaller.config.vocab_size == smaller.vocab_size == len(tokenizer)
    assert smaller.config.eos_token_id == [tokenizer.eos_token_id]
    assert smaller.generation_config.bos_token_id == tokenizer.bos_token_id
    assert (smaller.get_output_embeddings().weight is smaller.get_input_embeddings().weight) == tied
    assert model.config.vocab_size == len(reader)  # what was given stays


def test_a_bias_of_the_head_goes_along(reader):
    model = model_for(reader)
    model.lm_head.bias = torch.nn.Parameter(torch.arange(float(len(reader))))
    assert torch.equal(keep_tokens(model, [0, 1, 2, 9]).lm_head.bias, torch.tensor([0.0, 1, 2, 9]))


def test_what_a_generation_config_names_is_numbered_anew_or_gone(reader):
    model, last = model_for(reader), len(reader) - 1
    model.generation_config.suppress_tokens, model.generation_config.begin_suppress_tokens = [9, 10], [10]
    model.generation_config.bad_words_ids = [[9, 2], [10]]
    smaller = keep_tokens(model, [0, 1, 2, 9, last]).generation_config
    assert (smaller.suppress_tokens, smaller.begin_suppress_tokens) == ([3], None)
    assert smaller.bad_words_ids == [[3, 2]]


def test_a_token_with_a_letter_that_is_none_by_itself_stays():
    """Nothing else could write it."""
    scored = [("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("b", -3.0), ("ab", -4.0), ("QZ", -5.0)]
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(scored, 0)), unk_token="<unk>")
    assert needed(tokenizer, []) == {0, 1, 2, 3, 5}


def test_an_unknown_token_that_only_the_model_names_stays():
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "[UNK]": 3}, [("a", "b")], unk_token="[UNK]"))
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=made)
    smaller = without_tokens(tokenizer, sorted(needed(tokenizer, [0])))
    assert names(smaller, "aé") == ["a", "[UNK]"]


def test_held_out_rows_may_have_tokens_that_are_gone(reader, read):
    strange = reader("quixotle vorpander zulmunty quixish", add_special_tokens=False).input_ids
    row = torch.tensor([(strange * LENGTH)[:LENGTH]])
    held_out = torch.cat((read.train[:3], row))
    smaller, tokenizer, text, _, recut, _ = trim(model_for(reader), reader, Text(read.train, held_out, seen=read.seen))
    assert recut == 1
    assert text.held_out.shape == held_out.shape
    assert int(text.held_out.max()) < len(tokenizer) == smaller.config.vocab_size
    assert [reader.decode(one) for one in read.train[:3]] == [tokenizer.decode(one) for one in text.held_out[:-1]]
    begins = tokenizer.decode(text.held_out[-1]).replace(" ", "")
    assert reader.decode(row[0]).replace(" ", "").startswith(begins[:-2])
    assert len(begins) < len(reader.decode(row[0]).replace(" ", ""))


def test_no_more_go_than_are_asked_for(reader, read):
    model, total = model_for(reader), len(reader)
    for rows in (1, 64, 65):
        left = trim(model, reader, read, most=rows * 16).model.config.vocab_size
        assert left % 64 == 0
        assert left == max((total - rows) // 64 * 64, trim(model, reader, read).model.config.vocab_size)
    assert trim(model, reader, read, most=0).model.config.vocab_size > total - 64


def test_what_is_expected_least_goes_first_but_nothing_that_others_are_made_of(reader, read):
    spare = {*range(len(reader))} - needed(reader, read.seen.nonzero().flatten().tolist())
    worth = torch.rand(len(reader), generator=torch.Generator().manual_seed(0)).tolist()
    order = in_turn(reader, spare, worth)
    assert sorted(order) == sorted(spare)
    for count in range(0, len(order), 7):
        left = [token for token in range(len(reader)) if token not in {*order[:count]}]
        assert needed(reader, left) == {*left}  # whatever is left has all its parts
    merges = json.loads(reader.backend_tokenizer.to_str())["model"].get("merges")
    assert (order == sorted(spare, key=worth.__getitem__)) == (not merges)


def test_what_a_model_expects_is_the_sum_of_its_probabilities(reader, read):
    model = model_for(reader)
    rows = read.sample(64, 0, 0)
    with torch.no_grad():
        probabilities = model(rows).logits.softmax(-1)
    torch.testing.assert_close(expected(model, read).float(), probabilities.sum((0, 1)), rtol=1e-4, atol=1e-6)


# Shrinking ------------------------------------------------------------------------------------------------------------


PLAN = {"learn_steps": 4, "batch_rows": 4, "score_rows": 8, "evaluate_every": 4, "learning_rate": 1e-3}


def test_tokens_go_first_and_units_give_the_rest(reader, read, tmp_path):
    model = model_for(reader)
    plan = ShrinkSettings(fewer=0.3, kinds=("token", "neuron"), **PLAN)
    found = shrink(model, read, tmp_path / "work", plan, tokenizer=reader)
    summary, fewest = found.summary, trim(model, reader, read).model.config.vocab_size
    assert summary["pruned"]["units"]["token"] == fewest == found.model.config.vocab_size
    assert summary["pruned"]["units"]["neuron"] < summary["before"]["units"]["neuron"]
    assert 0.3 <= summary["fewer_parameters"] < 0.35
    again = shrink(model, read, tmp_path / "again", plan, tokenizer=reader)
    assert same_weights(again.model, found.model)


def test_whoever_goes_on_after_a_kill_keeps_the_tokens_that_were_chosen(reader, read, tmp_path, monkeypatch):
    """What a model expects is a sum that another machine may round otherwise."""
    monkeypatch.setattr(vocabulary, "MULTIPLE", 1)  # so that not all that may go do
    plan = ShrinkSettings(fewer=0.01, kinds=("token", "neuron"), **PLAN)
    straight = shrink(model_for(reader), read, tmp_path / "straight", plan, tokenizer=reader)
    with stopped_at_update(1):
        shrink(model_for(reader), read, tmp_path / "work", plan, tokenizer=reader)
    monkeypatch.setattr(vocabulary, "expected", lambda model, text: -expected(model, text))
    pruning = next(one for one in records_of(tmp_path / "work") if one["phase"] == "pruning")
    most = 0.01 * sum(parameter.numel() for parameter in model_for(reader).parameters())
    assert trim(model_for(reader), reader, read, most).kept != of_ranges(pruning["tokens"])  # it would choose others
    resumed = shrink(model_for(reader), read, tmp_path / "work", plan, tokenizer=reader, resume=True)
    assert same_weights(resumed.model, straight.model)
    assert resumed.tokenizer.get_vocab() == straight.tokenizer.get_vocab()
    other = Text(read.train, read.held_out, seen=read.seen + 1)
    with pytest.raises(UserError, match="the text is another"):
        shrink(model_for(reader), other, tmp_path / "work", plan, tokenizer=reader, resume=True)


def test_where_only_tokens_went_the_text_is_learnt(reader, read, tmp_path):
    """Its teacher would say what it says already."""
    model = model_for(reader)
    found = shrink(model, read, tmp_path / "work", ShrinkSettings(fewer=0.02, kinds=("token",), **PLAN), tokenizer=reader)
    assert type(found.model) is type(model)  # loads without us
    assert found.summary["after"]["loss"] < found.summary["pruned"]["loss"] - 0.01
    assert found.summary["pruned"]["loss"] <= found.summary["before"]["loss"] + 0.1
    assert found.summary["learnt_from"] == "none"


def test_one_command_from_a_model_to_one_with_fewer_tokens(pnn_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_of("bytes")
    model_for(tokenizer).save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("text.txt").write_text(language())
    words = ("shrink", "model", "--data", "text.txt", "--learn-steps", 2, "--batch-size", 4, "--validation-rows", 8)
    code, out, err = pnn_command(*words, "--kinds", "tokens,neurons", "--parameters", "-30%", "--output", "small")
    assert code == 0, err
    assert "tokens" in out
    summary = json.loads(Path("small/summary.json").read_text())
    smaller, cuts = hf.AutoModelForCausalLM.from_pretrained("small"), hf.AutoTokenizer.from_pretrained("small")
    assert summary["after"]["units"]["token"] == len(cuts) == smaller.config.vocab_size < len(tokenizer)
    assert names(cuts, language()) == names(tokenizer, language())
    assert "other text takes more tokens" in Path("small/README.md").read_text()
    assert "| neurons | layers | tokens |" in Path("small/README.md").read_text()
    code, _, err = pnn_command(*words, "--kinds", "tokens", "--parameters", "-2%", "--output", "fewer")
    assert code == 0, err
    assert "tokens), which `text.txt` never has" in Path("fewer/README.md").read_text()
    code, _, err = pnn_command(*words, "--kinds", "tokens", "--parameters", "-80%", "--output", "none")
    assert code == 2
    assert "tokens that the text has rarely or never hold" in err
    code, _, err = pnn_command(*words, "--kinds", "tokens", "--speed", "1.5", "--output", "none")
    assert code == 2
    assert "no faster" in err
    assert not [*Path().glob("none*")]


def test_muon_moves_what_is_left(reader, read, tmp_path, model_of):
    plan = {"fewer": 0.05, "kinds": ("neuron",), **PLAN}
    models = [
        shrink(model_for(reader), read, tmp_path / name, ShrinkSettings(optimizer=name, **plan)).model
        for name in ("adamw", "muon")
    ]
    assert not same_weights(*models)
    with pytest.raises(UserError, match="GPT2LMHeadModel have no linear layers; take adamw"):
        shrink(model_of("gpt2"), read, tmp_path / "none", ShrinkSettings(optimizer="muon", **plan))
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match=r"no 'sgd' to learn by"):
        ShrinkSettings(optimizer="sgd", **plan)


def test_what_cannot_lose_tokens_says_so(model_of, tokenizer, reader, read):
    with pytest.raises(UserError, match="decoders only"):
        check_tokens(model_of("bert"), tokenizer)
    with pytest.raises(UserError, match="WordLevel vocabulary"):
        check_tokens(model_of("gpt2"), tokenizer)
    with pytest.raises(UserError, match="tokenizer"):
        check_tokens(model_of("gpt2"), None)
    marks = models.BPE({"a": 0, "##b": 1, "ab": 2}, [("a", "##b")], continuing_subword_prefix="##")
    with pytest.raises(UserError, match="where words end or go on"):
        check_tokens(model_of("gpt2"), hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(marks)))
    with pytest.raises(UserError, match="the model knows only"):
        check_tokens(keep_tokens(model_for(reader), [0, 1, 2, len(reader) - 1]), reader)
    with pytest.raises(UserError, match="count=True"):
        trim(model_for(reader), reader, Text(read.train, read.held_out))
