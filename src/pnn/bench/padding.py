"""From our packed, masked batches to the padded ones that other people's code takes: the same sequences, the same masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pnn.data.batches import PackedBatch
from pnn.data.masking import Masked
from pnn.objectives import IGNORE


@dataclass(frozen=True)
class Padded:
    """(sequences, max_length) each: masked tokens, −100 wherever nothing is predicted, 1 at real tokens and 0 at padding."""

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor

    def to(self, device: torch.device | str) -> Padded:
        return Padded(*(x.to(device) for x in (self.input_ids, self.labels, self.attention_mask)))


def pad(batch: PackedBatch, masked: Masked, max_length: int, pad_token: int) -> Padded:
    """Every sequence of a packed batch as a row. The filler at a packed batch's end (it begins with padding, where a
    sequence begins with [CLS]) is nobody's data and gets no row."""
    borders = batch.cu_seqlens.long()
    starts, lengths = borders[:-1], borders.diff()
    last = len(batch.input_ids) - 1
    real = (lengths > 0) & (batch.input_ids[starts.clamp(max=last)] != pad_token)
    starts, lengths = starts[real], lengths[real]
    column = torch.arange(max_length, device=starts.device)
    keep = column < lengths[:, None]
    at = (starts[:, None] + column).clamp(max=last)
    used = masked.labels != IGNORE
    packed_labels = torch.full_like(masked.input_ids, IGNORE)
    packed_labels[masked.positions[used]] = masked.labels[used]
    return Padded(
        input_ids=torch.where(keep, masked.input_ids[at], pad_token),
        labels=torch.where(keep, packed_labels[at], IGNORE),
        attention_mask=keep.long(),
    )


def micro_batches(parts: Sequence[Padded], rows: int) -> list[Padded]:
    """All rows of an update, shared out evenly over micro-batches of about `rows` rows."""
    whole = [torch.cat([getattr(part, name) for part in parts]) for name in ("input_ids", "labels", "attention_mask")]
    count = max(1, round(len(whole[0]) / rows))
    return [Padded(*piece) for piece in zip(*(x.tensor_split(count) for x in whole), strict=True)]
