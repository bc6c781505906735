"""Tokenizers: by name, by file, or made from the corpus. All come back as `PreTrainedTokenizerFast` without
`token_type_ids`, for which our models have no place. Ours put [CLS] … [SEP] around a sequence; those saved with a decoder leave
it open (`to_continue`)."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pnn.data import synthetic
from pnn.errors import UserError, first_line
from pnn.progress import say

LINES_TO_TRAIN_ON = 1_000_000
COVERAGE = 0.9995  # of a text, by the letters of a small vocabulary
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def wrap(backend: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        **SPECIAL,
    )


def _frame(backend: Tokenizer) -> Tokenizer:
    """[CLS] text [SEP], and [CLS] a [SEP] b [SEP] for pairs."""
    ids = {token: backend.token_to_id(token) for token in ("[CLS]", "[SEP]")}
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=list(ids.items())
    )
    return backend


def _word_piece(model: models.WordPiece) -> Tokenizer:
    backend = Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def from_vocabulary(vocab_file: Path, max_length: int) -> PreTrainedTokenizerFast:
    """BERT's uncased tokenizer from its vocab.txt."""
    words = [line.rstrip("\r") for line in vocab_file.read_text(encoding="utf-8").removesuffix("\n").split("\n")]
    vocabulary = {word: i for i, word in enumerate(words)}
    if len(vocabulary) < len(words):
        twice = next(word for i, word in enumerate(words) if vocabulary[word] != i)
        raise UserError(f'{vocab_file}: "{twice}" stands there twice')
    missing = [token for token in SPECIAL.values() if token not in vocabulary]
    if missing:
        raise UserError(f"{vocab_file}: no {', '.join(missing)} in the vocabulary")
    return from_pieces(vocabulary, max_length)


def from_pieces(vocabulary: dict[str, int], max_length: int) -> PreTrainedTokenizerFast:
    backend = _frame(_word_piece(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)))
    backend.add_special_tokens(list(SPECIAL.values()))
    return wrap(backend, max_length)


def trained_on(lines: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """WordPiece on the first million lines; the same lines give the same tokenizer.

    The trainer numbers the pieces "##c" in the order of a hash table and breaks ties between merges by these numbers
    (huggingface/tokenizers#1794). Naming them beforehand, in order, makes it repeatable; then we number all pieces ourselves.

    A letter is two pieces, c and ##c. Where all letters would be most of the vocabulary, rare ones are left out (`_kept`).
    """
    backend = _word_piece(models.WordPiece(unk_token="[UNK]"))
    lines = list(itertools.islice(lines, LINES_TO_TRAIN_ON))
    counts = Counter(c for line in lines for c in backend.normalizer.normalize_str(line) if not c.isspace())
    letters = _kept(counts, vocab_size - len(SPECIAL))
    if rare := counts.keys() - set(letters):
        share = sum(counts[c] for c in rare) / counts.total()
        say(
            f"data.vocab_size={vocab_size} leaves no room for the {len(rare):,} rarest letters ({share:.2%} of the text): "
            "words with one of them become [UNK]"
        )
        without = dict.fromkeys(map(ord, rare))
        lines = [backend.normalizer.normalize_str(line).translate(without) for line in lines]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL.values(), *("##" + c for c in letters)],
        show_progress=False,
        continuing_subword_prefix="##",
    )
    backend.train_from_iterator(lines, trainer)
    pieces = sorted(set(backend.get_vocab()) - set(SPECIAL.values()))
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL.values(), *pieces])}
    return from_pieces(vocabulary, max_length)


def _kept(counts: Counter[str], pieces: int) -> list[str]:
    """All letters if they take at most half of the pieces. Else the most frequent ones that do, or, if these are fewer, that
    make up COVERAGE of the text; but never more than there are pieces for."""
    frequent = sorted(counts, key=lambda c: (-counts[c], c))
    half = pieces // 4
    covered = list(itertools.accumulate(counts[c] for c in frequent))
    enough = sum(so_far < COVERAGE * counts.total() for so_far in covered) + 1
    return sorted(frequent[: min(max(half, enough), pieces // 2)])


def of_synthetic_language(max_length: int, corpus: str = "synthetic") -> PreTrainedTokenizerFast:
    """One token a word, in the language's own numbering."""
    backend = Tokenizer(models.WordLevel(synthetic.language(corpus).ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend = _frame(backend)
    backend.add_special_tokens(list(SPECIAL.values()))
    return wrap(backend, max_length)


def _special_tokens_in(backend: Tokenizer) -> dict[str, str]:
    """BERT's, RoBERTa's or GPT-2's names of the special tokens, whichever the vocabulary has. None is added to it."""
    gpt2 = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    roberta = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
    return {
        role: token
        for names in (gpt2, roberta, SPECIAL)
        for role, token in names.items()
        if backend.token_to_id(token) is not None
    }


def load_tokenizer(name: str, max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer by file (vocab.txt, tokenizer.json), folder, or hub name."""
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "tokenizer_config.json").exists():  # a folder of bare files says no more than they do
        path = next((path / file for file in ("tokenizer.json", "vocab.txt") if (path / file).exists()), path)
    if not path.exists() and (path.suffix in (".txt", ".json") or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f'no tokenizer file or folder "{name}"')
    nothing = UserError(f'there is no tokenizer in "{name}" (tokenizer.json, vocab.txt …): put one there')
    if path.is_dir() and not any(found for kind in ("*token*", "*vocab*", "*.model") for found in path.glob(kind)):
        raise nothing
    try:
        if path.suffix == ".txt":
            return from_vocabulary(path, max_length)
        if path.is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), **_special_tokens_in(Tokenizer.from_file(str(path))))
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # the loaders raise many kinds: no such name, no network, a broken file
        raise UserError(f'cannot load the tokenizer "{name}": {first_line(error)}') from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what transformers makes where there are no files
        raise nothing
    if not tokenizer.is_fast:
        raise UserError(f'the tokenizer "{name}" has no fast (Rust) version, which preparing text needs')
    tokenizer.model_max_length = max_length
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def check_masks(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    if tokenizer.mask_token_id is None or tokenizer.pad_token_id is None:
        raise UserError(f'the tokenizer "{name}" has no mask or pad token, which masked language modelling needs')


def unknown_token(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """What stands for text that the vocabulary cannot express. None where nothing does: GPT-2 gives its end of text this name
    as well, and writes any text in bytes."""
    unknown = tokenizer.unk_token_id
    others = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id)
    return None if unknown is None or unknown in others else int(unknown)


def unknown_share(counts: NDArray[np.int64], tokenizer: PreTrainedTokenizerFast) -> float:
    """Of how often each token occurs: the share of unknown ones among those that are text."""
    unknown = unknown_token(tokenizer)
    if unknown is None or unknown >= len(counts):
        return 0.0
    frame = [token for token in {*tokenizer.all_special_ids} - {unknown} if token < len(counts)]
    return float(counts[unknown] / max(1, counts.sum() - counts[frame].sum()))


def end_of_text(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token that ends a document: GPT-2's end of text, or [SEP]."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    raise UserError("the tokenizer has neither an end-of-text token nor a [SEP], and documents need one between them")


def to_continue(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same for a decoder's folder, so that `generate` and pipelines continue a prompt: nothing is put around a text, [SEP]
    ends it, padding lies on the left, and new words begin with the space that parts them from what is there. A tokenizer that
    knows an end of text, as GPT-2's does, is left as it is."""
    if tokenizer.eos_token is not None or tokenizer.sep_token is None:
        return tokenizer
    end, opened = tokenizer.sep_token, copy.deepcopy(tokenizer)
    backend = opened.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="$A", pair=f"$A {end} $B", special_tokens=[(end, tokenizer.sep_token_id)]
    )
    if isinstance(backend.model, models.WordPiece | models.WordLevel):
        backend.decoder = decoders.Sequence(
            [decoders.Replace(Regex("^"), " "), decoders.Replace(Regex("^ ##"), "")]  # each piece's own beginning
        )
    opened.bos_token = opened.eos_token = end
    opened.padding_side = "left"
    opened.init_kwargs |= {"padding_side": "left", "text_fingerprint": fingerprint(tokenizer)}  # what is saved
    return opened


def text_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """Of the tokenizer that a decoder's text was made with."""
    return tokenizer.init_kwargs.get("text_fingerprint") or fingerprint(tokenizer)


def made(recorded: str, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether a text whose recipe names this fingerprint is this tokenizer's: made by it as it is, or by what it was before it
    was opened for a decoder. Who trains on with a decoder's tokenizer has text of the first kind."""
    return recorded in (fingerprint(tokenizer), text_fingerprint(tokenizer))


def as_it_is(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """For lines, of which a decoder's tokenizer makes other tokens than it did before it was opened."""
    tokenizer.init_kwargs.pop("text_fingerprint", None)
    return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """The same for two tokenizers that number the same vocabulary alike and split text alike."""
    return hashlib.sha256(canonical(tokenizer).encode()).hexdigest()[:16]


def canonical(tokenizer: PreTrainedTokenizerFast) -> str:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend.to_str()
