"""The vocabulary: tokens that a text has rarely or never can go, with their rows of the embedding and of the head.

In a small model the vocabulary is a large part (21 % of SmolLM2-135M, 61 % of stories15M), made for all that anybody may write.
For text that has only some of its tokens the smaller model predicts what the whole one does, to the softmax over fewer tokens.
Other text stays readable: a token that is gone is written with the smaller ones that it was made of.

Tokens that the text never has go first, of these the ones that the model itself expects least: text that is still to come may
have some of them. Where they are not enough, the rarest others follow, which together are at most `RARE` of the text: of
SmolLM2-135M on Wikipedia a hundredth of the text has 7 % of all parameters. Where a row has them, their pieces stand there, and
it ends earlier. What a token's loss is must not hang on that: it is counted per token of the whole vocabulary (`Text.ends`),
and the teacher, who never wrote those tokens in pieces, is not asked for them (`Text.pieces`).

What never goes: what tokens that stay are made of (BPE merges two tokens into one, so both must be there); single characters
and bytes, and tokens with a character that is none of these; special and added tokens. So text that has none of the tokens
that went is cut into the same tokens as before, but for characters that a Unigram vocabulary does not know. Tokens are numbered
anew, in their old order: the model and its tokenizer change together.
"""

from __future__ import annotations

import copy
import heapq
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn.errors import UserError
from pnn.models.precision import undisturbed
from pnn.models.registry import kind_of
from pnn.plasticity.scores import prepared
from pnn.plasticity.text import Text

TOKEN = "token"  # a kind of what may go, beside units
LOOKED_AT = 64  # rows of the text that say what the model expects
TOKENS_AT_ONCE = 512  # whose probabilities are computed
FORBIDDEN = ("suppress_tokens", "begin_suppress_tokens")  # tokens that a generation config names beside special ones
PHRASES = ("bad_words_ids", "force_words_ids")
MULTIPLE = 64  # of tokens that stay: what matrix units like
RARE = 0.01  # of the text: the most that tokens which go may be together
ROWS_AT_ONCE = 2048  # that are cut anew
Spec = dict[str, Any]  # tokenizer.json
M = TypeVar("M", bound=PreTrainedModel)


class Trimmed(NamedTuple):
    """A model, its tokenizer and a text in its tokens."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast | None
    text: Text
    kept: list[int] | None = None  # which tokens these are in the whole vocabulary; None: all
    recut: int = 0  # held-out rows that had others, which stand there in pieces
    rare: int = 0  # tokens that went although the text to learn from has them


def check_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None) -> None:
    """What is sure to fail is said before any text is read."""
    if not kind_of(model).causal:
        raise UserError("tokens can go from decoders only: which tokens of a row an encoder predicts depends on their numbers")
    if tokenizer is None:
        raise UserError("tokens cannot go without the model's tokenizer, which changes with it")
    spec = _spec(tokenizer)
    _parts(spec)
    if spec["model"].get("end_of_word_suffix") or spec["model"].get("continuing_subword_prefix"):
        raise UserError(
            "tokens cannot go from a vocabulary that marks where words end or go on: their pieces would have to be known"
        )
    if (highest := max(tokenizer.get_vocab().values())) >= _rows(model):
        raise UserError(f"the tokenizer has a token {highest:,}, but the model knows only {_rows(model):,}: it is another's")


def trim(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None,
    text: Text,
    most: float = math.inf,
    rare: float = 0.0,
) -> Trimmed:
    """Without tokens that the text to learn from never has, those that the model expects least there first, then without its
    rarest, which may be this share of it together, until so many parameters are gone. Copies: what is given stays as it is."""
    check_tokens(model, tokenizer)
    assert tokenizer is not None
    return with_tokens(model, tokenizer, text, stays(model, tokenizer, text, most, rare))


def with_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: Text, kept: list[int]) -> Trimmed:
    """Copies that have these tokens alone."""
    smaller = without_tokens(tokenizer, kept)
    rewritten, recut = _renumbered(text, kept, tokenizer, smaller)
    assert text.seen is not None
    rare = int((text.seen > 0).sum() - (text.seen[[token for token in kept if token < len(text.seen)]] > 0).sum())
    return Trimmed(keep_tokens(model, kept), smaller, rewritten, kept, recut, rare)


# Which may go ---------------------------------------------------------------------------------------------------------


def stays(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: Text, most: float, rare: float = 0.0) -> list[int]:
    """The tokens that are left, in their old order."""
    if text.seen is None:
        raise UserError("which tokens may go is not known: read the text with count=True")
    size = _rows(model)
    worth, known = expected(model, text), {*tokenizer.get_vocab().values()}
    worth[[row for row in range(size) if row not in known]] = -1.0  # rows without a token, which filled the matrix up
    often = text.seen.new_zeros(size)
    often[: len(text.seen)] = text.seen
    spare = {*range(size)} - needed(tokenizer, (one for _, _, found in _named(model) for one in found if one < size))
    order = in_turn(tokenizer, spare, [*zip(often.tolist(), worth.tolist(), strict=True)])
    may_go = int((often[order].cumsum(0) <= rare * int(often.sum())).sum())
    wanted = min(may_go, most / _per_token(model))
    stay = int(size - wanted) // MULTIPLE * MULTIPLE
    if size - stay > may_go:
        stay = min(size, stay + MULTIPLE)
    gone = {*order[: size - stay]}
    return [token for token in range(size) if token not in gone]


def needed(tokenizer: PreTrainedTokenizerFast, used: Iterable[int]) -> set[int]:
    """These tokens, what they are made of, and all that a tokenizer cannot do without."""
    spec = _spec(tokenizer)
    number, parts = _vocabulary(spec), _parts(spec)
    name = {token: said for said, token in number.items()}
    found = {token["id"] for token in spec["added_tokens"]} | {*tokenizer.all_special_ids}
    found |= {token for said, token in number.items() if _is_simple(said)}
    if not spec["model"].get("byte_fallback"):  # a token with a letter that is none by itself has no pieces
        found |= {token for said, token in number.items() if not {*said} <= number.keys()}
    if isinstance(unknown := spec["model"].get("unk_id", number.get(spec["model"].get("unk_token"))), int):
        found.add(unknown)
    found |= {*used}
    left = [*found]
    while left:
        for part in parts.get(name.get(left.pop(), ""), ()):
            token = number.get(part)
            if token is not None and token not in found:
                found.add(token)
                left.append(token)
    return found


@torch.no_grad()
def expected(model: PreTrainedModel, text: Text) -> Tensor:
    """How often the model expects each token in some rows of the text: the sum of its probabilities."""
    found = torch.zeros(_rows(model), dtype=torch.float64, device=model.device)
    with undisturbed(model):
        for batch in text.batches(text.sample(LOOKED_AT, 0, 0), max(1, TOKENS_AT_ONCE // text.train.shape[1])):
            logits = model(**prepared(model, batch | {"labels": None})).logits
            found += logits.float().softmax(-1).flatten(0, -2).sum(0, dtype=torch.float64)
    return found.cpu()


def in_turn(tokenizer: PreTrainedTokenizerFast, spare: set[int], worth: Sequence[Any]) -> list[int]:
    """All of these tokens, in the order in which they go: the least worth first (numbers, or pairs of them), but none before
    those that it is a part of."""
    spec = _spec(tokenizer)
    number, parts = _vocabulary(spec), _parts(spec)
    made_of = {number[said]: {number[part] for part in its if part in number} for said, its in parts.items() if said in number}
    holders = Counter(part for token in spare for part in made_of.get(token, ()))  # tokens in the way of each
    ready = [(worth[token], token) for token in spare if not holders[token]]
    heapq.heapify(ready)
    order = []
    while ready:
        token = heapq.heappop(ready)[1]
        order.append(token)
        for part in made_of.get(token, ()):
            holders[part] -= 1
            if not holders[part] and part in spare:
                heapq.heappush(ready, (worth[part], part))
    return order


def _spec(tokenizer: PreTrainedTokenizerFast) -> Spec:
    spec: Spec = json.loads(tokenizer.backend_tokenizer.to_str())
    return spec


def _vocabulary(spec: Spec) -> dict[str, int]:
    vocabulary = spec["model"]["vocab"]
    return vocabulary if isinstance(vocabulary, dict) else {entry[0]: token for token, entry in enumerate(vocabulary)}


def _parts(spec: Spec) -> dict[str, set[str]]:
    """What each token is merged from, by whichever rule. Only BPE builds tokens from tokens."""
    kind = spec["model"]["type"]
    if kind not in ("BPE", "Unigram"):
        raise UserError(f"tokens of a {kind} vocabulary cannot go: only of BPE and of Unigram, which have pieces for any text")
    found: dict[str, set[str]] = {}
    for first, second in _merges(spec):
        found.setdefault(first + second, set()).update((first, second))
    return found


def _merges(spec: Spec) -> list[tuple[str, str]]:
    """Older files have each as one string."""
    pairs = (one.split(" ") if isinstance(one, str) else one for one in spec["model"].get("merges") or ())
    return [(first, second) for first, second in pairs]


def _is_simple(said: str) -> bool:
    """A character, or a byte: what other text is written with where nothing longer is left."""
    return len(said) <= 1 or (len(said) == 6 and said.startswith("<0x") and said.endswith(">"))


# Without them ---------------------------------------------------------------------------------------------------------


def without_tokens(tokenizer: PreTrainedTokenizerFast, kept: Sequence[int]) -> PreTrainedTokenizerFast:
    """A copy that has these tokens alone, numbered in this order."""
    spec, place = _spec(tokenizer), {old: new for new, old in enumerate(kept)}
    model = spec["model"]
    number = {said: place[token] for said, token in _vocabulary(spec).items() if token in place}
    if isinstance(model["vocab"], dict):
        model["vocab"] = number
        model["merges"] = [
            (first, second) for first, second in _merges(spec) if {first, second, first + second} <= number.keys()
        ]
    else:
        model["vocab"] = [entry for token, entry in enumerate(model["vocab"]) if token in place]
        if model.get("unk_id") is not None:
            model["unk_id"] = place[model["unk_id"]]
    for token in spec["added_tokens"]:
        token["id"] = place[token["id"]]
    if spec.get("padding"):
        spec["padding"]["pad_id"] = place[spec["padding"]["pad_id"]]
    _renumber_processor(spec.get("post_processor"), place)
    smaller = copy.deepcopy(tokenizer)
    smaller._tokenizer = Tokenizer.from_str(json.dumps(spec))
    return smaller


def _renumber_processor(processor: Any, place: dict[int, int]) -> None:
    """What sets special tokens around a text names them by number."""
    if not processor:
        return
    for one in processor.get("processors", ()):
        _renumber_processor(one, place)
    special = processor.get("special_tokens")
    if isinstance(special, dict):
        for token in special.values():
            token["ids"] = [place[one] for one in token["ids"]]
    for name in ("sep", "cls"):
        if isinstance(processor.get(name), list):
            processor[name][1] = place[processor[name][1]]


@torch.no_grad()
def keep_tokens(model: M, kept: Sequence[int]) -> M:
    """A copy whose vocabulary has these tokens alone, numbered in this order."""
    smaller, place = copy.deepcopy(model), {old: new for new, old in enumerate(kept)}
    index = torch.tensor(kept, device=model.device)
    for old in _of_vocabulary(smaller):
        new = nn.Parameter(old[index].clone(), requires_grad=old.requires_grad)
        for module in smaller.modules():  # tied ones too
            for name, held in module._parameters.items():
                if held is old:
                    module._parameters[name] = new
    embedding, head = smaller.get_input_embeddings(), smaller.get_output_embeddings()
    embedding.num_embeddings = head.out_features = len(kept)
    if embedding.padding_idx is not None:
        embedding.padding_idx = place.get(embedding.padding_idx)
    for holder in (smaller, smaller.base_model, smaller.config):
        if getattr(holder, "vocab_size", None) is not None:
            holder.vocab_size = len(kept)
    for config, name, tokens in _named(smaller):
        renamed = [place.get(one, one) for one in tokens]
        setattr(config, name, renamed if isinstance(getattr(config, name), list) else renamed[0])
    for name in FORBIDDEN:  # what is gone cannot be written
        if never := getattr(smaller.generation_config, name, None):
            setattr(smaller.generation_config, name, [place[one] for one in never if one in place] or None)
    for name in PHRASES:
        if phrases := getattr(smaller.generation_config, name, None):
            there = [phrase for phrase in phrases if {*phrase} <= place.keys()]
            setattr(smaller.generation_config, name, [[place[one] for one in phrase] for phrase in there] or None)
    return smaller


def _named(model: PreTrainedModel) -> list[tuple[Any, str, list[int]]]:
    """Tokens that configs name by number: where, under which name, and which."""
    found = []
    for config in (model.config, model.generation_config):
        for name, value in vars(config).items() if config is not None else ():
            if name.endswith("_token_id") and value is not None:
                found.append((config, name, value if isinstance(value, list) else [value]))
    return found


def _of_vocabulary(model: PreTrainedModel) -> list[nn.Parameter]:
    """Each once. A head may have a bias for each token."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    found = (embedding.weight, head.weight, getattr(head, "bias", None))
    return list({id(one): one for one in found if one is not None}.values())


def _rows(model: PreTrainedModel) -> int:
    """Of the embedding: a vocabulary may have been filled up to a round number."""
    return len(model.get_input_embeddings().weight)


def _per_token(model: PreTrainedModel) -> int:
    return sum(one.numel() // len(one) for one in _of_vocabulary(model))


def _renumbered(
    text: Text, kept: Sequence[int], before: PreTrainedTokenizerFast, after: PreTrainedTokenizerFast
) -> tuple[Text, int]:
    """The same text, and how many held-out rows have tokens that are gone: their pieces stand there, and the row ends
    earlier."""
    assert text.seen is not None
    size = max(int(text.train.max()), int(text.held_out.max()), max(kept), len(text.seen) - 1) + 1
    cuts = _Cuts(kept, before, after, size)
    seen = np.zeros(size, dtype=np.int64)
    seen[: len(text.seen)] = text.seen.numpy()
    train, held_out = cuts.of(text.train), cuts.of(text.held_out)
    recut = int(cuts.gone[text.held_out.numpy()].any(1).sum())
    rewritten = replace(
        text,
        train=train.rows,
        held_out=held_out.rows,
        seen=torch.from_numpy(np.bincount(cuts.pieces, np.repeat(seen, cuts.count), len(kept)).astype(np.int64)),
        pieces=train.pieces if train.pieces.any() else None,
        ends=held_out.ends if recut else None,
    )
    return rewritten, recut


class _Cut(NamedTuple):
    rows: Tensor
    pieces: Tensor  # where a piece of a token that is gone stands
    ends: Tensor  # where a token of the whole vocabulary ends


class _Cuts:
    """How each token of the whole vocabulary is written: as itself, or in pieces."""

    def __init__(self, kept: Sequence[int], before: PreTrainedTokenizerFast, after: PreTrainedTokenizerFast, size: int):
        place = {old: new for new, old in enumerate(kept)}
        name = {token: said for said, token in before.get_vocab().items()}
        written = [[place[old]] if old in place else pieces_of(name[old], after) if old in name else [] for old in range(size)]
        self.pieces = np.array([piece for its in written for piece in its], dtype=np.int64)
        self.count = np.array([*map(len, written)])
        self.first = self.count.cumsum() - self.count
        self.gone = np.array([old not in place for old in range(size)])

    def of(self, rows: Tensor) -> _Cut:
        """As long as before. Some rows at a time: what is made on the way is several times as large."""
        found = [self._some(part.numpy()) for part in rows.split(ROWS_AT_ONCE)]
        return _Cut(*(torch.from_numpy(np.concatenate(parts)) for parts in zip(*found, strict=True)))

    def _some(self, rows: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        count = self.count[rows]
        if not count.all():
            raise UserError("the text has a token that went and that nothing else can write: this tokenizer's tokens cannot go")
        flat, lengths = count.ravel(), count.sum(1)
        token = np.repeat(rows.ravel(), flat)  # that each piece is of
        nth = np.arange(len(token)) - np.repeat(flat.cumsum() - flat, flat)  # of its pieces
        at = (lengths.cumsum() - lengths)[:, None] + np.arange(rows.shape[1])
        token, nth = token[at], nth[at]
        return self.pieces[self.first[token] + nth], self.gone[token], nth == self.count[token] - 1


def pieces_of(said: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that write one that is gone, as its name in the vocabulary has it."""
    return [piece.id for piece in tokenizer.backend_tokenizer.model.tokenize(said)]
