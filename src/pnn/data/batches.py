"""Token sets → packed batches: sequences end to end, no padding computed, a batch is a number of tokens.

Training reads an endless stream: epoch after epoch, each in its own shuffled order (a function of seed and epoch). Batches
take sequences from the stream until the next would not fit; the few slots left over are filler that nothing attends to.
The position in the stream is one number, how many sequences have been taken, so it can be saved and gone back to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pnn.data.masking import Masked, SpecialTokens, apply_mask, content_keys
from pnn.data.shards import TokenSet


@dataclass(frozen=True)
class PackedBatch:
    """Sequences end to end. Per token: id, position in its sequence, key of its sequence. `cu_seqlens`: their borders."""

    input_ids: Tensor
    position_ids: Tensor
    keys: Tensor
    cu_seqlens: Tensor

    def to(self, device: torch.device | str) -> PackedBatch:
        def move(x: Tensor) -> Tensor:
            return x.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else x

        return PackedBatch(*(move(x) for x in (self.input_ids, self.position_ids, self.keys, self.cu_seqlens)))

    def with_borders(self, count: int) -> PackedBatch:
        """The same batch with `count` borders, if it has fewer: what is added are empty sequences at the end. Batches of one
        shape, whatever the number of their sequences, are what a compiled or recorded GPU program wants."""
        missing = count - len(self.cu_seqlens)
        if missing <= 0:
            return self
        return replace(self, cu_seqlens=F.pad(self.cu_seqlens, (0, missing), value=len(self.input_ids)))

    def mask(
        self, special: SpecialTokens, probability: float, seed: int, style: str = "mask", capacity: int | None = None
    ) -> Masked:
        return apply_mask(
            self.input_ids,
            self.keys,
            self.position_ids,
            special,
            probability=probability,
            seed=seed,
            style=style,
            capacity=capacity,
        )


def pack(
    tokens: NDArray[np.int64],
    lengths: NDArray[np.int64],
    keys: NDArray[np.int64],
    size: int | None = None,
    filler: int = 0,
) -> PackedBatch:
    """One batch of these sequences; `size` fills it up to so many tokens with one filler sequence."""
    missing = 0 if size is None else size - len(tokens)
    if missing > 0:
        tokens = np.concatenate((tokens, np.full(missing, filler)))
        lengths = np.append(lengths, missing)
        keys = np.append(keys, 0)
    ends = np.cumsum(lengths)
    within = np.arange(len(tokens)) - np.repeat(ends - lengths, lengths)
    return PackedBatch(
        input_ids=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(within),
        keys=torch.from_numpy(np.repeat(keys, lengths)),
        cu_seqlens=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
    )


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> SpecialTokens:
    assert tokenizer.mask_token_id is not None
    return SpecialTokens(tokenizer.mask_token_id, len(tokenizer), tuple(tokenizer.all_special_ids))


class TrainingStream:
    """Batches of exactly `batch_tokens` tokens from the shuffled, endless stream of `sequences`."""

    def __init__(
        self, tokens: TokenSet, sequences: NDArray[np.int64], batch_tokens: int, seed: int, filler: int, start: int = 0
    ):
        if batch_tokens < tokens.lengths[sequences].max():
            raise ValueError(f"batch_tokens={batch_tokens} is too small for the longest sequence")
        self.tokens = tokens
        self.sequences = sequences
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.filler = filler
        self.position = start  # sequences taken so far, over all epochs
        self.tokens_taken = 0  # real tokens since `start`
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self._most_sequences = batch_tokens // int(tokens.lengths[sequences].min()) + 1

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(self.sequences)

    def _ahead(self, count: int) -> NDArray[np.int64]:
        """The next `count` sequences of the stream, without taking them."""
        parts, at = [], self.position
        while count > 0:
            epoch, offset = divmod(at, len(self.sequences))
            part = self._order(epoch)[offset : offset + count]
            parts.append(part)
            at += len(part)
            count -= len(part)
        return np.concatenate(parts)

    def next_sequences(self) -> tuple[NDArray[np.int64], int]:
        """The sequences of the next batch and the stream position of the first of them; moves on."""
        first = self.position
        ahead = self._ahead(self._most_sequences)
        ends = np.cumsum(self.tokens.lengths[ahead])
        fitting = int(np.searchsorted(ends, self.batch_tokens, side="right"))
        self.position += fitting
        self.tokens_taken += int(ends[fitting - 1])
        return ahead[:fitting], first

    def skip(self) -> None:
        """Pass over a batch that belongs to another process."""
        self.next_sequences()

    def __next__(self) -> PackedBatch:
        chosen, first = self.next_sequences()
        keys = np.arange(first, first + len(chosen))
        return pack(self.tokens.take(chosen), self.tokens.lengths[chosen], keys, self.batch_tokens, self.filler)


def evaluation_batches(
    tokens: TokenSet, sequences: NDArray[np.int64], batch_tokens: int
) -> Iterator[tuple[PackedBatch, NDArray[np.int64]]]:
    """Every sequence once, in order, in batches of at most `batch_tokens` tokens; with each batch, its sequences' indices."""
    lengths = tokens.lengths[sequences]
    for start, stop in cuts(lengths, batch_tokens):
        ids = tokens.take(sequences[start:stop])
        yield pack(ids, lengths[start:stop], content_keys(ids, lengths[start:stop])), np.arange(start, stop)


def cuts(lengths: NDArray[np.int64], batch_tokens: int) -> Iterator[tuple[int, int]]:
    """The first sequence of each batch of at most `batch_tokens` tokens, and the first after it; a long one is alone."""
    start = 0
    while start < len(lengths):
        ends = np.cumsum(lengths[start : start + batch_tokens])
        stop = start + max(1, int(np.searchsorted(ends, batch_tokens, side="right")))
        yield start, stop
        start = stop
