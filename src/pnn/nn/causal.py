"""Attention of tokens that see only themselves and what came before: who sees whom, and with a cache what is seen.

softmax(q_i k_jᵀ / √d_head) v_j   over j ≤ i
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[..., Tensor]  # torch's scaled_dot_product_attention, or what computes the same


class KeyValues(Protocol):
    """Where keys and values of earlier tokens are kept: takes new ones, (B, heads, T, width), and returns all."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Past:
    """What came before a batch's tokens, and who sees whom."""

    mask: Tensor | None = None  # (B or 1, 1, T, all tokens) bool; None: the plain causal order
    cache: KeyValues | None = None
    # In the cache, where what is applied again keeps keys and values of its own each time. Not changed, and not read, without a
    # cache: compiled code would be made for each place
    place: int = 0

    def grown(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, these behind those that came before."""
        return (keys, values) if self.cache is None else self.cache.update(keys, values, self.place)

    def count(self, tokens: Tensor) -> None:
        """(B, T, …). The first place of a cache says how long the text is: where no head is left it needs something to
        count."""
        nothing = tokens.new_zeros(tokens.shape[0], 1, tokens.shape[1], 1)
        self.grown(nothing, nothing)


def causal_mask(keep: Tensor | None, length: int, past: int, device: torch.device) -> Tensor | None:
    """Who sees whom: tokens themselves and those before them, never padding. `keep`: (B, past + length), True at real tokens.
    None where the plain causal order, or seeing everything, says it all."""
    if keep is None and (past == 0 or length == 1):
        return None
    order = torch.ones(length, past + length, dtype=torch.bool, device=device).tril(past)
    if keep is None:
        return order[None, None]
    # a padding token sees itself, so that no row of a softmax is empty
    own = torch.eye(length, past + length, dtype=torch.bool, device=device).roll(past, 1)
    return (order & keep[:, None, :] | own)[:, None]


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Past,
    dropout: float = 0.0,
    watched: list[Tensor] | None = None,
    attend: Attend = F.scaled_dot_product_attention,
) -> Tensor:
    """(B, heads, T, width) ×3 → the same shape. `watched` is given the weights."""
    k, v = past.grown(k, v)
    if watched is not None:
        watched.append(attention_weights(q, k, past.mask))
    ordered = past.mask is None and q.shape[2] == k.shape[2] and q.shape[2] > 1
    return attend(q, k, v, attn_mask=past.mask, is_causal=ordered, dropout_p=dropout)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q_i k_iᵀ / √d_head + causal), (B, heads, T, all tokens). For whoever studies attention: no fast form has them."""
    logits = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    if mask is None:
        length, tokens = logits.shape[-2:]
        mask = torch.ones(length, tokens, dtype=torch.bool, device=q.device).tril(tokens - length)
    return logits.masked_fill(~mask, -math.inf).softmax(-1)
