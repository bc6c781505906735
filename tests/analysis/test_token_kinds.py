"""The kind of a token, in the three ways in which vocabularies mark words."""

import pytest
import torch
from rewriting import tokenizer as word_level_with_endings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pnn.analysis.token_kinds import TOKEN_KINDS, kinds_by_id, kinds_of
from pnn.data.tokenizers import from_pieces, of_synthetic_language


def byte_level(pieces):
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<|endoftext|>"])
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def named(tokenizer, size=None):
    by_id = kinds_by_id(tokenizer, size or len(tokenizer))
    return {piece: TOKEN_KINDS[by_id[number]] for piece, number in tokenizer.get_vocab().items()}


GPT2 = {
    "Ġthe": "word start",
    "ing": "continuation",
    "Ġcaf": "word start",
    "Ã©": "continuation",  # é
    "âĢ": "continuation",  # the first two bytes of a dash: half a character
    "âĢĶ": "punctuation",  # —
    "Ġ\u00c2\u00bd": "number",  # ½
    ",": "punctuation",
    'Ġ"': "punctuation",
    "'s": "continuation",
    "19": "number",
    "Ġ3": "number",
    "Ċ": "break",  # a newline
    "Ġ": "break",
}


def test_byte_level_pieces():
    assert named(byte_level(GPT2)) == {**GPT2, "<|endoftext|>": "break"}


def test_a_word_without_a_space_starts_after_what_is_no_word():
    tokenizer = byte_level(GPT2)
    ids = tokenizer.convert_tokens_to_ids
    row = torch.tensor([ids(["Ċ", "ing", "ing", ",", "ing", "19", "ing", "<|endoftext|>", "ing", "Ġthe", "'s"])])
    kinds = kinds_of(row, kinds_by_id(tokenizer, len(tokenizer)))
    told = [TOKEN_KINDS[kind] for kind in kinds[0]]
    starts = [place for place, kind in enumerate(told) if kind == "word start"]
    assert starts == [1, 4, 8, 9]
    assert told[2] == told[6] == told[10] == "continuation"


def test_word_pieces():
    wanted = {
        "the": "word start",
        "##ing": "continuation",
        "!": "punctuation",
        "12": "number",
        "##3": "number",
        "é": "word start",
    }
    pieces = [*("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), *wanted]
    found = named(from_pieces({piece: i for i, piece in enumerate(pieces)}, 16))
    assert {piece: found[piece] for piece in wanted} == wanted
    assert found["[UNK]"] == "word start"
    assert {found[piece] for piece in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")} == {"break"}


def test_whole_words():
    found = named(of_synthetic_language(16))
    assert "continuation" not in found.values()
    assert found["."] == "punctuation"
    assert sum(kind == "word start" for kind in found.values()) > len(found) / 2


@pytest.mark.parametrize("size", [20, 100])
def test_vocabularies_that_are_wider_or_narrower_than_the_model(size):
    """Models round their vocabulary up."""
    kinds = kinds_by_id(word_level_with_endings(), size)
    assert len(kinds) == size
    assert TOKEN_KINDS[kinds[3]] == "number"
    assert {TOKEN_KINDS[kind] for kind in kinds[38:]} <= {"break"}
