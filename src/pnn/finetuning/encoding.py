"""From texts to batches of token ids. A text that is too long loses tokens at the end of its longer half, one after the other
until it fits (`longest_first`, what fine-tuning of BERT has always done), and is counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerFast

from pnn.data.batches import PackedBatch, pack
from pnn.finetuning.examples import Example
from pnn.finetuning.tasks import Task

POOL = 50  # batches whose examples are sorted by length together: little padding, and still a new order every epoch
LENGTH_MULTIPLE = 8


@dataclass(frozen=True)
class Encoded:
    """`ids` and `types` hold a row a candidate: `choices` of them an example, else one."""

    ids: list[list[int]]
    types: list[list[int]] | None
    choices: int
    labels: NDArray[np.float64]  # NaN where not known
    lengths: NDArray[np.int64]  # of an example's longest candidate
    truncated: int  # examples
    tokens: int
    unknown: int  # tokens that the vocabulary does not have
    questions: NDArray[np.int64] | None = None  # MultiRC: of each answer its question, and its passage
    units: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)


def encode(
    task: Task, examples: list[Example], tokenizer: PreTrainedTokenizerFast, max_length: int, token_types: bool
) -> Encoded:
    pairs = [pair for example in examples for pair in example.texts]
    first = [a for a, _ in pairs]
    second = [b for _, b in pairs] if pairs[0][1] is not None else None
    out = tokenizer(first, second, truncation="longest_first", max_length=max_length, return_token_type_ids=token_types)
    ids: list[list[int]] = out["input_ids"]
    per = task.choices or 1
    cut = np.array([bool(one.overflowing) for one in out.encodings]).reshape(-1, per)
    labels = [np.nan if example.label is None else float(example.label) for example in examples]
    questions = units = None
    if "em" in task.metrics:
        passages = [example.index[0] for example in examples]
        units = np.unique(passages, return_inverse=True)[1]
        questions = np.unique([example.index[:2] for example in examples], axis=0, return_inverse=True)[1].reshape(-1)
    unknown = tokenizer.unk_token_id
    return Encoded(
        ids=ids,
        types=_types(out) if token_types else None,
        choices=task.choices,
        labels=np.array(labels),
        lengths=np.array([len(row) for row in ids]).reshape(-1, per).max(axis=1),
        truncated=int(cut.any(axis=1).sum()),
        tokens=sum(map(len, ids)),
        unknown=0 if unknown is None else sum(row.count(unknown) for row in ids),
        questions=questions,
        units=units,
    )


def _types(out: BatchEncoding) -> list[list[int]]:
    """0 for the first text, 1 for the second and its [SEP]: also where a tokenizer frames pairs without saying so (ours)."""
    given: list[list[int]] = out["token_type_ids"]
    if any(1 in row for row in given) or not any(1 in one.sequence_ids for one in out.encodings):
        return given
    starts = [one.sequence_ids.index(1) if 1 in one.sequence_ids else len(one.ids) for one in out.encodings]
    return [[int(place >= start) for place in range(len(row))] for row, start in zip(given, starts, strict=True)]


def training_order(encoded: Encoded, batch_size: int, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """The examples of each batch. They follow from (seed, epoch) alone."""
    generator = np.random.default_rng([seed, epoch])
    shuffled = generator.permutation(len(encoded))
    pool = POOL * batch_size
    batches = []
    for start in range(0, len(shuffled), pool):
        part = shuffled[start : start + pool]
        part = part[np.argsort(encoded.lengths[part], kind="stable")]
        batches += [part[at : at + batch_size] for at in range(0, len(part), batch_size)]
    return [batches[place] for place in generator.permutation(len(batches))]


def by_length(encoded: Encoded, batch_size: int) -> Iterator[NDArray[np.int64]]:
    order = np.argsort(-encoded.lengths, kind="stable")  # the longest first: what does not fit into memory shows at once
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def collate(encoded: Encoded, chosen: NDArray[np.int64], pad: int, max_length: int, device: torch.device) -> dict[str, Tensor]:
    """Padded (B, L), or (B, C, L) for choices. Without labels: those are the loop's."""
    rows = _rows(encoded, chosen)
    longest = max(len(encoded.ids[row]) for row in rows)
    length = min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, max_length)
    ids = torch.full((len(rows), length), pad)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    types = torch.zeros(len(rows), length, dtype=torch.long)
    for place, row in enumerate(rows):
        here = encoded.ids[row]
        ids[place, : len(here)] = torch.tensor(here)
        mask[place, : len(here)] = 1
        if encoded.types is not None:
            types[place, : len(here)] = torch.tensor(encoded.types[row])
    batch = {"input_ids": ids, "attention_mask": mask}
    if encoded.types is not None:
        batch["token_type_ids"] = types
    if encoded.choices:
        batch = {name: x.view(-1, encoded.choices, length) for name, x in batch.items()}
    return {name: x.to(device) for name, x in batch.items()}


def packed(encoded: Encoded, chosen: NDArray[np.int64]) -> PackedBatch:
    """The same without padding, as our models read it best."""
    ids = [encoded.ids[row] for row in _rows(encoded, chosen)]
    lengths = np.array([len(row) for row in ids])
    return pack(np.concatenate(ids), lengths, keys=np.zeros(len(ids), np.int64))


def _rows(encoded: Encoded, chosen: NDArray[np.int64]) -> list[int]:
    per = encoded.choices or 1
    return [int(example) * per + choice for example in chosen for choice in range(per)]
