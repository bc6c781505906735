"""Which tokens are masked: a hash decides, on whatever device the tokens are, the same everywhere.

A token is selected when hash(seed, key of its sequence, its position) falls below the mask probability. In training the key
is the sequence's running number in the endless stream of epochs, so a mask depends on neither packing, process nor device,
and a resumed run draws what the unbroken one would have drawn. In evaluation the key is a hash of the sequence's own tokens:
the mask is a function of the text and a seed, the same for every model, run and machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pnn.objectives import IGNORE

LOW32 = 0xFFFFFFFF


def mix(x: Any) -> Any:
    """A 32-bit integer hash (the finaliser of MurmurHash3) of non-negative integers, a Python int or an int64 tensor.
    Products may wrap around; the low 32 bits, which are kept, do not depend on that."""
    x = x & LOW32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW32
    return x ^ (x >> 16)


def hash_of(*parts: Tensor | int) -> Any:
    """One hash of several integers, in order. Numbers stay Python ints: as tensors they would have to be sent to the device,
    and the host would wait for that."""
    state: Any = 0x9E3779B9
    for part in parts:
        state = mix(state * 31 + mix(part + 0x9E3779B9))
    return state


def content_keys(tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each packed sequence, a key made of its tokens and their order."""
    ends = np.cumsum(lengths)
    within = np.arange(len(tokens)) - np.repeat(ends - lengths, lengths)
    hashed = hash_of(torch.from_numpy(tokens), torch.from_numpy(within)).numpy()
    totals = np.concatenate(([0], np.cumsum(hashed)))
    return (totals[ends] - totals[ends - lengths]) & LOW32


@dataclass(frozen=True)
class SpecialTokens:
    """What masking must know of a tokenizer."""

    mask: int
    vocab_size: int
    never_masked: tuple[int, ...]  # [CLS], [SEP], padding …


@dataclass(frozen=True)
class Masked:
    """Masked input, the flat positions that are to be predicted, and their tokens (−100 in unused places)."""

    input_ids: Tensor
    positions: Tensor
    labels: Tensor


def select(
    input_ids: Tensor, keys: Tensor, position_ids: Tensor, special: SpecialTokens, probability: float, seed: int
) -> Tensor:
    """True at tokens that are to be predicted. All arguments are flat, one entry a token."""
    allowed = torch.ones_like(input_ids, dtype=torch.bool)
    for token in special.never_masked:
        allowed &= input_ids != token
    return allowed & (hash_of(seed, keys, position_ids, 0) < int(probability * (LOW32 + 1)))


def apply_mask(
    input_ids: Tensor,
    keys: Tensor,
    position_ids: Tensor,
    special: SpecialTokens,
    *,
    probability: float,
    seed: int,
    style: str = "mask",
    capacity: int | None = None,
) -> Masked:
    """Mask one packed batch. `capacity` asks for that many places (a fixed shape, no wait for the device to count): with
    fewer targets the rest is ignored, with more the surplus is dropped."""
    selected = select(input_ids, keys, position_ids, special, probability, seed)
    replaced = torch.full_like(input_ids, special.mask)
    if style == "bert":  # 80 % [MASK], 10 % any token, 10 % as it was
        share = hash_of(seed, keys, position_ids, 1)
        anything = hash_of(seed, keys, position_ids, 2) % special.vocab_size
        replaced = torch.where(share < int(0.1 * LOW32), input_ids, replaced)
        replaced = torch.where(share >= int(0.9 * LOW32), anything, replaced)
    masked = torch.where(selected, replaced, input_ids)
    if capacity is None:
        positions = selected.nonzero().squeeze(1)
        return Masked(masked, positions, input_ids[positions])
    # Targets first, in their order; the k-th selected token goes to place k, everything else to a place that is cut off.
    place = torch.where(selected, selected.cumsum(0) - 1, capacity).clamp(max=capacity)
    index = torch.arange(len(input_ids), device=input_ids.device)
    positions = torch.zeros(capacity + 1, dtype=torch.long, device=input_ids.device).scatter(0, place, index)[:-1]
    used = torch.arange(capacity, device=input_ids.device) < selected.sum()
    return Masked(masked, positions, torch.where(used, input_ids[positions], IGNORE))
