"""Fill in [MASK]: what a model predicts for every masked token of every text, and how the prediction was rewritten.

    p(token | mask, t) = softmax(head(hᵗ))      step 0 reads the embeddings, step t the state after t refinements

Texts may be many. They are read in blocks; a block is sorted by length and packed into batches of a number of tokens, so that
no padding is computed and sequences of one batch are about equally long; logits are computed at masks only; results come
back in the order of the texts. While the device works on a block, the host puts the last one into words and reads the next.
A block with a text that cannot be filled is an error that names it: nothing is skipped and nothing is cut off.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pnn.data.batches import PackedBatch, cuts, pack
from pnn.data.tokenizers import canonical
from pnn.errors import UserError
from pnn.evaluation.passes import states_at
from pnn.models.base import MaskedLMBase
from pnn.models.precision import predicting
from pnn.results import Prediction

BLOCK_TEXTS = 4096  # enough to bring equal lengths together and to keep a GPU busy; results come a block at a time
HEAD_ROWS = 2048  # logits held at a time: a batch may be masks from end to end


class Filled(TypedDict):
    """One text. `predictions`: for each mask the best `top`, best first. `by_step`: for each mask the best one after each
    step 0 … T. `unknown`: pieces of the text that the tokenizer has no token for, if there are any."""

    text: str
    predictions: list[list[Prediction]]
    by_step: NotRequired[list[list[Prediction]]]
    unknown: NotRequired[int]


@dataclass(frozen=True)
class Block:
    """Texts that can be filled, as tokens. `order`: shortest first."""

    texts: list[str]
    tokens: list[list[int]]
    masks: NDArray[np.int64]  # how many in each text
    order: NDArray[np.int64]


@dataclass(frozen=True)
class Answers:
    """Token ids and probabilities, a row a mask, in the block's `order`; on the device until they are asked for."""

    best: tuple[Tensor, Tensor]  # (masks, top) each
    by_step: tuple[Tensor, Tensor] | None  # (masks, steps + 1) each


def fill(
    model: MaskedLMBase,
    tokenizer: PreTrainedTokenizerFast,
    texts: Iterable[str],
    *,
    top: int = 5,
    num_steps: int | None = None,
    by_step: bool = False,
    batch_tokens: int = 16384,
    precision: torch.dtype = torch.float32,
    origin: str = "text",
) -> Iterator[Filled]:
    """Predictions for each text, in order. `origin` is what a text's number stands behind in errors: "text 3"."""
    if not 1 <= top <= model.config.vocab_size:
        raise UserError(f"--top {top}: expected 1 to {model.config.vocab_size:,}, the size of the model's vocabulary")
    if tokenizer.mask_token_id is None:
        raise UserError("the tokenizer has no mask token: there is nothing to fill in")
    word = lru_cache(maxsize=None)(lambda token: tokenizer.decode([token]))
    running: tuple[Block, Answers] | None = None
    for block in _blocks(texts, tokenizer, model.config.max_position_embeddings, origin):
        done = None if running is None else (running[0], _read_back(running[1]))  # waits for the device
        running = block, _answer(model, tokenizer.mask_token_id, block, top, num_steps, by_step, batch_tokens, precision)
        if done is not None:
            yield from _in_words(*done, word, tokenizer.unk_token_id)
    if running is None:
        raise UserError(f"{origin} 1 is missing: the input is empty")
    yield from _in_words(running[0], _read_back(running[1]), word, tokenizer.unk_token_id)


def _blocks(texts: Iterable[str], tokenizer: PreTrainedTokenizerFast, longest: int, origin: str) -> Iterator[Block]:
    backend = tokenizer.backend_tokenizer.from_str(canonical(tokenizer))  # a saved tokenizer may cut texts off: this one not
    mask, mask_id = tokenizer.mask_token, tokenizer.mask_token_id
    texts, number = iter(texts), 1
    while chosen := list(itertools.islice(texts, BLOCK_TEXTS)):
        tokens = [encoding.ids for encoding in backend.encode_batch_fast([t if is_unicode(t) else "" for t in chosen])]
        for index, (text, ids) in enumerate(zip(chosen, tokens, strict=True), number):
            if wrong := _what_is_wrong(text, ids, mask, mask_id, longest):
                raise UserError(f"{origin} {index} {wrong}")
        masks = np.array([ids.count(mask_id) for ids in tokens])
        yield Block(chosen, tokens, masks, np.argsort([len(ids) for ids in tokens], kind="stable"))
        number += len(chosen)


def _what_is_wrong(text: str, ids: list[int], mask: str, mask_id: int, longest: int) -> str | None:
    if not text.strip():
        return f"is empty: a text with {mask} is needed"
    if not is_unicode(text):
        return "is not valid UTF-8"
    if mask_id not in ids:
        return f"has no {mask}: there is nothing to fill in"
    if len(ids) > longest:
        return f"has {len(ids):,} tokens, but the model takes {longest:,}: shorten it"
    return None


def is_unicode(text: str) -> bool:
    """False for what Python makes of a command line argument's broken bytes."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


@torch.inference_mode()
def _answer(
    model: MaskedLMBase,
    mask: int,
    block: Block,
    top: int,
    num_steps: int | None,
    by_step: bool,
    batch_tokens: int,
    precision: torch.dtype,
) -> Answers:
    best, steps = [], []
    with predicting(model, precision):
        for batch in _batches(block, batch_tokens):
            states = states_at(model, batch, (batch.input_ids == mask).nonzero().squeeze(1), num_steps, every_step=by_step)
            ids, probabilities = best_tokens(model, states[-1], top)
            best.append((ids, probabilities))
            if by_step:
                before = [best_tokens(model, h, 1) for h in states[:-1]]
                steps.append(_joined([*before, (ids[:, :1], probabilities[:, :1])], dim=1))
    return Answers(_joined(best), _joined(steps) if by_step else None)


def _batches(block: Block, batch_tokens: int) -> Iterator[PackedBatch]:
    """The block's texts, shortest first, in batches of at most `batch_tokens` tokens."""
    lengths = np.array([len(block.tokens[i]) for i in block.order])
    for start, stop in cuts(lengths, batch_tokens):
        tokens = itertools.chain.from_iterable(block.tokens[i] for i in block.order[start:stop])
        yield pack(np.fromiter(tokens, np.int64), lengths[start:stop], keys=np.zeros(stop - start, np.int64))


def best_tokens(model: MaskedLMBase, states: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Ids and probabilities of the `top` best tokens for each state, (states, top) each."""
    parts = []
    for rows in states.split(HEAD_ROWS):
        logits = model.read_out(rows).float()
        best = logits.topk(top)
        parts.append((best.indices, (best.values - logits.logsumexp(-1, keepdim=True)).exp()))
    return _joined(parts)


def _joined(parts: list[tuple[Tensor, Tensor]], dim: int = 0) -> tuple[Tensor, Tensor]:
    return torch.cat([ids for ids, _ in parts], dim), torch.cat([probabilities for _, probabilities in parts], dim)


def _read_back(answers: Answers) -> Answers:
    best = (answers.best[0].cpu(), answers.best[1].cpu())
    by_step = None if answers.by_step is None else (answers.by_step[0].cpu(), answers.by_step[1].cpu())
    return Answers(best, by_step)


def _in_words(block: Block, answers: Answers, word: Callable[[int], str], unknown: int | None) -> Iterator[Filled]:
    def rows(found: tuple[Tensor, Tensor]) -> list[list[Prediction]]:
        return [
            [{"token": word(token), "probability": probability} for token, probability in zip(*row, strict=True)]
            for row in zip(found[0].tolist(), found[1].tolist(), strict=True)
        ]

    best = rows(answers.best)
    by_step = None if answers.by_step is None else rows(answers.by_step)
    ends = np.empty_like(block.masks)
    ends[block.order] = np.cumsum(block.masks[block.order])  # where each text's masks end among the answers
    for text, tokens, count, end in zip(block.texts, block.tokens, block.masks, ends, strict=True):
        filled: Filled = {"text": text, "predictions": best[end - count : end]}
        if by_step is not None:
            filled["by_step"] = by_step[end - count : end]
        if unknown is not None and unknown in tokens:
            filled["unknown"] = tokens.count(unknown)
        yield filled
