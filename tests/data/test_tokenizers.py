"""Tokenizers by vocabulary file, tokenizer.json and folder, and trained on a corpus."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import transformers
from beside import VOCABULARY
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from pnn.config import DataConfig
from pnn.data import synthetic
from pnn.data.shards import prepare
from pnn.data.tokenizers import (
    SPECIAL,
    _kept,
    check_masks,
    end_of_text,
    fingerprint,
    from_vocabulary,
    load_tokenizer,
    of_synthetic_language,
    to_continue,
    trained_on,
    unknown_token,
)
from pnn.errors import UserError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", ",", "cafe", "un", "##seen"]
SENTENCES = [
    "The quick brown fox doesn't jump over 13 lazy dogs!",
    "Café Müller, São Paulo — naïve façade; Ångström's Ελληνικά.",
    "Prices rose 3.5% (to $1,000,000) in 2014–15...",
    "antidisestablishmentarianism, 漢字 and кириллица; 🙂 emoji",
    "a [MASK] inside [SEP] the text",
    "x" * 150,
    "tab\tand\u00a0no-break\u200bspace",
    "",
]


@pytest.fixture
def vocab_file(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return path


def test_a_vocabulary_file_makes_an_uncased_word_piece_tokenizer(vocab_file):
    tokenizer = load_tokenizer(str(vocab_file), 16)
    assert tokenizer.convert_ids_to_tokens(tokenizer("The CATS, unseen: dog Café").input_ids) == [
        *("[CLS]", "the", "cat", "##s", ",", "un", "##seen", "[UNK]", "[UNK]", "cafe", "[SEP]")
    ]
    assert tokenizer("the").input_ids == [2, 5, 3]
    assert tokenizer("the", "cat").input_ids == [2, 5, 3, 6, 3]
    assert tokenizer("the [MASK]").input_ids == [2, 5, 4, 3]
    assert tokenizer.decode(tokenizer("the cats sat").input_ids, skip_special_tokens=True) == "the cats sat"


def test_what_every_tokenizer_has_in_common(vocab_file):
    for tokenizer in (load_tokenizer(str(vocab_file), 16), of_synthetic_language(16), trained_on(["a b c"] * 9, 50, 16)):
        assert tokenizer.model_max_length == 16
        assert set(tokenizer("the cat")) == {"input_ids", "attention_mask"}  # no token_type_ids
        assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4]) == list(SPECIAL.values())
        assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3, 4]
        assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 4)
        assert len(tokenizer) == len(tokenizer.get_vocab())


def test_the_same_tokenizer_by_file_by_json_and_by_folder(vocab_file, tmp_path):
    by_vocabulary = load_tokenizer(str(vocab_file), 16)
    by_vocabulary.save_pretrained(tmp_path / "saved")
    ways = [
        load_tokenizer(str(tmp_path), 16),  # a folder with vocab.txt alone
        load_tokenizer(str(tmp_path / "saved"), 16),
        load_tokenizer(str(tmp_path / "saved" / "tokenizer.json"), 16),
    ]
    for tokenizer in ways:
        assert tokenizer("The cats, unseen").input_ids == by_vocabulary("The cats, unseen").input_ids
        assert fingerprint(tokenizer) == fingerprint(by_vocabulary)
        assert tokenizer.mask_token_id == 4
        assert set(tokenizer("the")) == {"input_ids", "attention_mask"}


def test_a_folder_with_a_bare_tokenizer_json_has_its_end_of_text(tmp_path):
    """As GPT-2's files are often passed on: without the config that would name its special tokens."""
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "<|endoftext|>": 2}, []))
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert end_of_text(load_tokenizer(str(tmp_path), 16)) == 2


def test_the_fingerprint_follows_the_vocabulary_not_truncation(vocab_file, tmp_path):
    tokenizer = load_tokenizer(str(vocab_file), 16)
    before = fingerprint(tokenizer)
    tokenizer("the cat sat", truncation=True, max_length=3, padding="max_length")
    assert fingerprint(tokenizer) == before
    assert fingerprint(load_tokenizer(str(vocab_file), 99)) == before
    (tmp_path / "other.txt").write_text("\n".join([*WORDS[:-1], "##other"]), encoding="utf-8")
    assert fingerprint(load_tokenizer(str(tmp_path / "other.txt"), 16)) != before


@pytest.mark.parametrize("name", ["BertTokenizer", "BertTokenizerFast"])
def test_the_bert_vocabulary_splits_as_transformers_does(name):
    if not VOCABULARY.exists():
        pytest.skip(f"{VOCABULARY} is not on this machine")
    ours = load_tokenizer(str(VOCABULARY), 512)
    theirs = getattr(transformers, name)(vocab=str(VOCABULARY), do_lower_case=True)
    assert len(ours) == len(theirs) == 30522
    assert ours("unaffable").input_ids == [101, 14477, 20961, 3468, 102]
    for sentence in SENTENCES:
        assert ours(sentence).input_ids == theirs(sentence).input_ids, sentence


def test_the_embedded_languages_tokenizer_is_one_token_a_word_in_its_numbering():
    tokenizer = of_synthetic_language(64)
    lang = synthetic.language()
    assert len(tokenizer) == len(lang.words)
    for text in synthetic.paragraphs(5, seed=0):
        assert tokenizer(text).input_ids == [2, *(lang.ids[word] for word in text.split()), 3]


def test_a_tokenizer_trained_on_a_corpus_covers_it_within_the_size_asked_for():
    lines = ["the little fox sat near the old mill", "a fox and two foxes sat down"] * 5
    tokenizer = trained_on(lines, 60, 32)
    assert len(tokenizer) <= 60
    for line in lines:
        ids = tokenizer(line).input_ids
        assert (ids[0], ids[-1]) == (2, 3)
        assert 1 not in ids  # nothing unknown
        assert tokenizer.decode(ids, skip_special_tokens=True) == line
    assert len(tokenizer("fox").input_ids) == 3
    assert tokenizer("The LITTLE fox").input_ids == tokenizer("the little fox").input_ids


def test_rare_letters_make_room_for_pieces(capsys):
    rare = [chr(0x4E00 + i) for i in range(200)]
    lines = ["the little fox sat near the old mill"] * 30000 + [f"the {c} fox" for c in rare]
    tokenizer = trained_on(lines, 100, 32)
    assert len(tokenizer) <= 100
    assert "191 rarest letters" in capsys.readouterr().err
    assert len(tokenizer("the little mill").input_ids) == 5  # words became pieces
    assert tokenizer(f"the {rare[-1]} fox").input_ids.count(tokenizer.unk_token_id) == 1
    assert rare[-1] in trained_on(lines, 1000, 32).get_vocab()  # where there is room they stay
    assert capsys.readouterr().err == ""


@given(st.dictionaries(st.characters(codec="utf-8"), st.integers(1, 10**6), min_size=1), st.integers(2, 300))
def test_letters_never_take_more_than_the_pieces(counts, pieces):
    kept = _kept(Counter(counts), pieces)
    assert 2 * len(kept) <= pieces
    assert kept == sorted(kept)
    left_out = [count for letter, count in counts.items() if letter not in kept]
    assert max(left_out, default=0) <= min((counts[letter] for letter in kept), default=10**6)
    if 4 * len(counts) <= pieces:
        assert not left_out


def test_pieces_are_numbered_alike_every_time():
    lines = ["the little fox sat near the old mill", "a fox and two foxes sat down"] * 5
    assert len({fingerprint(trained_on(lines, 60, 32)) for _ in range(6)}) == 1


def test_training_twice_on_the_same_lines_finds_the_same_pieces():
    rng = random.Random(0)
    words = ["".join(rng.choice("abcdefghij") for _ in range(rng.randint(2, 7))) for _ in range(3000)]
    lines = [" ".join(words[i : i + 10]) for i in range(0, len(words), 10)]
    assert len({frozenset(trained_on(lines, 500, 32).get_vocab()) for _ in range(8)}) == 1


# Mistakes -------------------------------------------------------------------------------------------------------------


def error_of(name):
    with pytest.raises(UserError) as caught:
        load_tokenizer(str(name), 16)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_vocabulary_without_special_tokens_is_refused(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(w for w in WORDS if w not in ("[MASK]", "[SEP]")), encoding="utf-8")
    assert error_of(path) == f"{path}: no [SEP], [MASK] in the vocabulary"
    assert error_of(tmp_path) == f"{path}: no [SEP], [MASK] in the vocabulary"
    with pytest.raises(UserError):
        from_vocabulary(path, 16)


def test_a_vocabulary_with_a_word_twice_is_refused(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join([*WORDS, "fox", "fox"]), encoding="utf-8")
    assert error_of(path) == f'{path}: "fox" stands there twice'


def test_a_vocabulary_is_read_line_by_line_whatever_its_letters(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes("\r\n".join([*WORDS, "a\u2028b", "\x85", "last"]).encode() + b"\r\n")
    tokenizer = from_vocabulary(path, 16)
    assert tokenizer.convert_tokens_to_ids("last") == len(WORDS) + 2
    assert len(tokenizer) == len(WORDS) + 3


@pytest.mark.parametrize("name", ["nothing.txt", "tokenizer.json"])
def test_a_missing_file_is_named(name, tmp_path):
    assert error_of(tmp_path / name) == f'no tokenizer file or folder "{tmp_path / name}"'


@pytest.mark.parametrize("name", ["broken.json", "tokenizer/tokenizer.json"])
def test_a_broken_tokenizer_file_is_named(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"version": "1.0", "model": {', encoding="utf-8")
    asked = path if name == "broken.json" else path.parent
    assert error_of(asked).startswith(f'cannot load the tokenizer "{asked}": ')


def test_a_name_that_is_not_there_offline_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert error_of("nobody/no-such-tokenizer").startswith('cannot load the tokenizer "nobody/no-such-tokenizer": ')


@pytest.mark.parametrize("kind", ["GPT2", "OPT", "Bert", "GPTNeoX", "Llama"])
def test_a_model_without_a_tokenizer_gets_no_empty_one(kind, tmp_path):
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    assert error_of(tmp_path).startswith(f'there is no tokenizer in "{tmp_path}" (tokenizer.json')


def test_an_end_of_text_is_no_unknown_word():
    """GPT-2 calls one token both."""
    backend = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="<|endoftext|>"))
    names = {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    assert unknown_token(transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)) is None
    ours = of_synthetic_language(16)
    assert unknown_token(ours) == ours.unk_token_id
    assert unknown_token(to_continue(ours)) == ours.unk_token_id


def test_a_folder_whose_tokenizer_has_no_mask_token_is_refused(tmp_path):
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "a": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        check_masks(load_tokenizer(str(tmp_path), 16), str(tmp_path))
    assert str(caught.value) == f'the tokenizer "{tmp_path}" has no mask or pad token, which masked language modelling needs'


def test_a_tokenizer_json_without_a_mask_token_is_refused(tmp_path):
    backend = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    data = DataConfig(tokenizer=str(tmp_path / "tokenizer.json"), prepared=str(tmp_path / "prepared"), max_length=8)
    with pytest.raises(UserError, match="no mask or pad token"):
        prepare(data, lambda items, _: items)


def test_a_tokenizer_json_with_other_names_of_special_tokens_gets_none_added(tmp_path):
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4, "a": 5}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"), 16)
    assert tokenizer.get_vocab() == words
    assert (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id) == (4, 1, 0, 2)
