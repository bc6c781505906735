"""What a cycle reads: rows of token ids, some to learn from and some held out.

A decoder's rows are running text and predict their own next tokens. An encoder's rows are lines, [CLS] line [SEP], as ours are
pretrained on them, padded to the longest; a share of their tokens is masked: in learning by (seed, place in the stream), in
scoring and measuring by the row's own tokens, so that every model sees the same masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn.config import DataConfig
from pnn.data.batches import special_tokens
from pnn.data.corpora import open_source
from pnn.data.masking import SpecialTokens, content_keys, select
from pnn.data.shards import Progress, TokenSet, prepare_source
from pnn.data.tokenizers import check_masks, unknown_share
from pnn.errors import UserError
from pnn.models.loading import longest_input
from pnn.models.registry import kind_of
from pnn.numbers import unknown_tokens
from pnn.objectives import IGNORE
from pnn.progress import say

LONGEST_ROW = 128  # unless asked otherwise: the source's length, and a small model's cycle then takes minutes on a CPU
SHORTEST_ROW = 8
NOT_TOLD = -1  # a label that a teacher is asked for
MASKED = 0.15  # share of an encoder's tokens that are predicted
COUNTED_AT_ONCE = 4096  # rows
FEWEST_ROWS = 4  # two to learn from, two to measure on


@dataclass(frozen=True)
class Text:
    """`train` and `held_out` are (rows, length). `special` is what masking has to know: for encoders, and only for them.
    `padding` is the token behind the end of short rows, if there are any. The sources are names, for the record. `seen`: how
    often each token occurs in all the text that could be learnt from, of which `train` may be a sample; if it was counted.

    Of a decoder's text whose vocabulary lost tokens that it has (`vocabulary`): `pieces`, where rows of `train` have pieces of
    such tokens, and `ends`, where a token of the whole vocabulary ends in `held_out`."""

    train: Tensor
    held_out: Tensor
    special: SpecialTokens | None = None
    source: str = ""
    padding: int | None = None
    held_out_source: str = ""
    seen: Tensor | None = None
    pieces: Tensor | None = None
    ends: Tensor | None = None

    def __post_init__(self) -> None:
        for name, rows in (("learn from", self.train), ("measure on", self.held_out)):
            if rows.dim() != 2 or len(rows) < 2 or rows.shape[1] < 2:
                raise UserError(f"too little text to {name}: a cycle needs at least two rows of two tokens for that")

    def inputs(self, rows: Tensor, keys: Tensor | None = None, seed: int = 0) -> dict[str, Tensor]:
        """A batch with labels. `keys` name an encoder's rows in the stream of learning; without, a row is its own key."""
        if self.special is None:
            return {"input_ids": rows, "labels": rows}
        count, length = rows.shape
        if keys is None:
            flat = rows.flatten().numpy()
            keys = torch.from_numpy(content_keys(flat, np.full(count, length)))
        places = torch.arange(length).repeat(count)
        at = select(rows.flatten(), keys.repeat_interleave(length), places, self.special, MASKED, seed).view_as(rows)
        batch = {"input_ids": rows.masked_fill(at, self.special.mask), "labels": rows.masked_fill(~at, IGNORE)}
        return batch if self.padding is None else batch | {"attention_mask": (rows != self.padding).long()}

    def batches(self, rows: Tensor, size: int) -> Iterator[dict[str, Tensor]]:
        """These rows in order, masked by their own tokens."""
        for part in rows.split(size):
            yield self.inputs(part)

    def for_update(self, step: int, size: int, seed: int) -> dict[str, Tensor]:
        """The batch of an update, counted from 0 over all rounds: the shuffled rows of epoch after epoch. `told`, for teachers:
        the labels that the text itself has to tell, NOT_TOLD elsewhere."""
        places = np.arange(step * size, (step + 1) * size)
        rows = torch.tensor(
            [
                shuffled(len(self.train), seed, int(epoch))[at]
                for epoch, at in zip(*divmod(places, len(self.train)), strict=True)
            ]
        )
        # copies row by row; indexing would copy number by number, on several threads, which takes milliseconds on busy cores
        batch = self.inputs(self.train.index_select(0, rows), torch.from_numpy(places), seed)
        if self.pieces is not None:
            batch["told"] = batch["labels"].masked_fill(~self.pieces.index_select(0, rows), NOT_TOLD)
        return batch

    def measured(self) -> tuple[Tensor, Tensor] | None:
        """Where each held-out row is measured, and of how many tokens of the whole vocabulary that is the loss: of those that
        are there in full, but for the first, which nothing comes before. None: everywhere, and of its own tokens."""
        if self.ends is None:
            return None
        before, total = self.ends.cumsum(1) - self.ends.long(), self.ends.sum(1)
        return (before > 0) & (before < total[:, None]), (total - 1).clamp(min=0)

    def sample(self, count: int, seed: int, round_: int) -> Tensor:
        """Rows to score heads on, others in every round."""
        order = np.random.default_rng([seed, round_, 1]).permutation(len(self.train))
        return self.train[torch.from_numpy(np.sort(order[:count]))]

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        more = (one for one in (self.seen, self.pieces, self.ends) if one is not None)
        for rows in (self.train, self.held_out, *more):
            digest.update(repr(tuple(rows.shape)).encode())
            digest.update(rows.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


@lru_cache(maxsize=2)
def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def row_length(model: PreTrainedModel, asked: int | None) -> int:
    """Tokens of a row: as asked, or the model's context up to a limit."""
    longest = longest_input(model)
    if asked is not None and not SHORTEST_ROW <= asked <= longest:
        raise UserError(f"--max-length {asked}: the model takes rows of {SHORTEST_ROW} to {longest:,} tokens")
    return asked or min(longest, LONGEST_ROW)


def read_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    data: str,
    *,
    validation: str | None = None,
    length: int | None = None,
    train_rows: int | None = None,
    held_out_rows: int = 64,
    count: bool = False,
    progress: Progress,
) -> Text:
    """Text by file, glob or name, in the model's own tokens. The last tenth is held out, `held_out_rows` at most, where no
    `validation` names another text. `train_rows`: a random sample of so many, if there are more. `length`: tokens of a row, or
    the most that are taken of a line. `count`: also how often each token occurs in all that is not held out."""
    kind = kind_of(model)
    row = row_length(model, length)
    if kind.masked:
        check_masks(tokenizer, "of the model")
    config = DataConfig(layout=kind.layout, filter="none", max_length=row)
    rows_of = _rows if kind.causal else partial(_padded, padding=tokenizer.pad_token_id)
    unit = f"rows of {row} tokens" if kind.causal else "lines"
    tokens = _tokens(data, config, tokenizer, "train", progress)
    if validation is None:
        held = min(held_out_rows, max(2, len(tokens) // 10))
        if len(tokens) < FEWEST_ROWS:
            raise UserError(
                f"{data} is too short: it has {len(tokens)} {unit}, but needs at least {FEWEST_ROWS}"
                + (" (--max-length makes rows shorter)" if kind.causal else "")
            )
        chosen, held_out = np.arange(len(tokens) - held), rows_of(tokens, np.arange(len(tokens) - held, len(tokens)))
    else:
        other = _tokens(validation, config, tokenizer, "validation", progress)
        for name, found in ((data, tokens), (validation, other)):
            if len(found) < 2:
                raise UserError(f"{name} is too short: it has {len(found)} {unit}, but needs at least two")
        chosen, held_out = np.arange(len(tokens)), rows_of(other, np.arange(min(held_out_rows, len(other))))
    seen = _how_often(tokens, chosen, max(tokenizer.get_vocab().values()) + 1) if count else None
    if train_rows is not None and train_rows < len(chosen):
        chosen = np.sort(np.random.default_rng(0).choice(chosen, max(2, train_rows), replace=False))
    train = rows_of(tokens, chosen)
    note_unknown(tokenizer, {data: [train, held_out]} if validation is None else {data: [train], validation: [held_out]})
    special, padding = (None, None) if kind.causal else (special_tokens(tokenizer), tokenizer.pad_token_id)
    return Text(train, held_out, special, data, padding, validation or f"the end of {data}", seen)


def note_unknown(tokenizer: PreTrainedTokenizerFast, texts: dict[str, list[Tensor]]) -> None:
    """Of texts, by name, that the vocabulary cannot express."""
    for name, rows in texts.items():
        counts = np.bincount(np.concatenate([part.numpy().ravel() for part in rows]))
        if said := unknown_tokens(unknown_share(counts, tokenizer), name):
            say(f"note: {said}")


def _tokens(name: str, config: DataConfig, tokenizer: PreTrainedTokenizerFast, split: str, progress: Progress) -> TokenSet:
    return prepare_source(open_source(name, config, split), tokenizer, config, progress)


def _rows(tokens: TokenSet, sequences: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(tokens.take(sequences)).view(len(sequences), -1)


def _how_often(tokens: TokenSet, sequences: NDArray[np.int64], size: int) -> Tensor:
    """Each token, in a text that need not fit into memory."""
    parts = np.array_split(sequences, len(sequences) // COUNTED_AT_ONCE + 1)
    return torch.from_numpy(sum(np.bincount(tokens.take(part), minlength=size) for part in parts))


def _padded(tokens: TokenSet, sequences: NDArray[np.int64], padding: int) -> Tensor:
    lengths = tokens.lengths[sequences].astype(np.int64)
    rows = np.full((len(sequences), lengths.max()), padding, dtype=np.int64)
    rows[np.arange(lengths.max()) < lengths[:, None]] = tokens.take(sequences)
    return torch.from_numpy(rows)
