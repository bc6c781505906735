"""Which kind of token is it? Read from the tokenizer's own strings, for the three ways in which vocabularies mark words:

byte-level (GPT-2)     a word starts with "Ġ", a space; other bytes that cannot be printed have letters of their own too
WordPiece (BERT)       a continuation starts with "##"
word-level             every token is a word
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOKEN_KINDS = ("word start", "continuation", "punctuation", "number", "break")  # break: newline, space, end of text
WORD_START, CONTINUATION, PUNCTUATION, NUMBER, BREAK = range(len(TOKEN_KINDS))


def kinds_by_id(tokenizer: Any, vocab_size: int) -> Tensor:
    """(vocab_size,) of indices into TOKEN_KINDS. Ids that the tokenizer does not have are breaks: no text contains them."""
    words: dict[str, int] = tokenizer.get_vocab()
    byte_level = any(piece.startswith("Ġ") for piece in words)
    word_piece = any(piece.startswith("##") and len(piece) > 2 for piece in words)
    ends = set(tokenizer.all_special_tokens)
    if tokenizer.unk_token != tokenizer.eos_token:  # GPT-2 calls its end of text the unknown word as well
        ends.discard(tokenizer.unk_token)  # some word, if nobody knows which
    kinds = torch.full((vocab_size,), BREAK)
    for piece, number in words.items():
        if number < vocab_size and piece not in ends:
            kinds[number] = _kind(piece, byte_level, word_piece, piece == tokenizer.unk_token)
    return kinds


def kinds_of(rows: Tensor, by_id: Tensor) -> Tensor:
    """The kind of every token, (…, length). Byte-level pieces do not show that a word starts when no space is before it; where
    something that is no word is before it, one starts."""
    kinds = by_id.to(rows.device)[rows]
    before = torch.nn.functional.pad(kinds[..., :-1], (1, 0), value=CONTINUATION)
    starts = (kinds == CONTINUATION) & ((before == PUNCTUATION) | (before == BREAK))
    return torch.where(starts, WORD_START, kinds)


def _kind(piece: str, byte_level: bool, word_piece: bool, unknown: bool) -> int:
    starts = unknown or not (byte_level or word_piece)
    text = piece
    if byte_level:
        text = _from_bytes(piece)
        starts = starts or text.startswith(" ")
    elif word_piece:
        starts = not piece.startswith("##") or len(piece) == 2
        text = piece if starts else piece[2:]
    text = text.strip()
    if not text:
        return BREAK
    if unknown or any(c.isalpha() or c == "\ufffd" for c in text):  # half a character is a piece of a word
        return WORD_START if starts else CONTINUATION
    return NUMBER if any(c.isnumeric() for c in text) else PUNCTUATION


def _from_bytes(piece: str) -> str:
    return bytes(_BYTE.get(c, ord("?")) for c in piece).decode("utf-8", errors="replace")


def _letters_of_bytes() -> dict[str, int]:
    """Byte-level vocabularies write a byte as its own character where that can be printed, and the others, in order, as the
    characters from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE = _letters_of_bytes()
