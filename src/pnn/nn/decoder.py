"""Parts of a decoder: RMSNorm, rotary positions, causal attention, SwiGLU.

    RMSNorm(x) = w ⊙ x / √(mean x² + ε)                              (in fp32)
    Attn(c)    = W_o · concat_i softmax(q_i k_iᵀ / √d_head + causal) v_i,   q_i = norm(rotate(W_q c)), k_i = norm(rotate(W_k c))
    MLP(c)     = W_2 (silu(W_1 c) ⊙ W_1' c)

Queries and keys are normalised after their rotation. The three input projections of attention are one matrix, and the two
of the MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pnn.nn.rotary import rotate


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


class KeyValues(Protocol):
    """Where keys and values of earlier tokens are kept: takes new ones, (B, heads, T, width), and returns all."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Context:
    """What attention has to know about a batch: rotations of its positions, what may be seen, and what came before."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None  # (B, 1, T, all tokens) bool; None: causal
    cache: KeyValues | None = None
    watched: list[Tensor] | None = None  # attention leaves its weights here, where somebody asked for them
    read: list[Tensor] | None = None  # and each block what it reads of the state


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


class CausalAttention(nn.Module):
    """Heads may have been taken away or added since (see `plasticity/`): there may be none at all."""

    def __init__(self, hidden_size: int, num_heads: int, eps: float, layer: int = 0):
        super().__init__()
        self.layer = layer  # its place in a cache. Not read without one: compiled code would be made for each layer
        self.num_heads, self.head_width = num_heads, hidden_size // num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.qkv.parts = 3  # type: ignore[assignment]  # as `SelfAttention`'s
        self.query_norm = RMSNorm(self.head_width, eps)
        self.key_norm = RMSNorm(self.head_width, eps)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out.role = "branch end"  # type: ignore[assignment]  # for the model's initialiser

    def forward(self, c: Tensor, context: Context) -> Tensor:
        return self.attended(self.qkv(c), context)

    def attended(self, qkv: Tensor, context: Context) -> Tensor:
        """Everything after the first product."""
        batch, length, _ = qkv.shape
        if self.num_heads == 0:
            if context.cache is not None:  # the first layer's cache says how long the text is: it needs something to count
                nothing = qkv.new_zeros(batch, 1, length, 1)
                context.cache.update(nothing, nothing, self.layer)
            return self.out(qkv.new_zeros(batch, length, 0))
        q, k, v = self.rotated(qkv, context)
        if context.cache is not None:
            k, v = context.cache.update(k, v, self.layer)
        if context.watched is not None:
            context.watched.append(attention_weights(q, k, context.mask))
        causal = context.mask is None and length == k.shape[2] and length > 1
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=context.mask, is_causal=causal)
        return self.out(out.transpose(1, 2).reshape(batch, length, -1))

    def rotated(self, qkv: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, heads, T, width) each, the first two rotated and normalised."""
        q, k, v = qkv.view(*qkv.shape[:2], 3, self.num_heads, self.head_width).unbind(2)
        q = self.query_norm(rotate(q, context.cos, context.sin)).transpose(1, 2)
        k = self.key_norm(rotate(k, context.cos, context.sin)).transpose(1, 2)
        return q, k, v.transpose(1, 2)

    def weights(self, c: Tensor, context: Context) -> Tensor:
        """Of a text without cache, (B, heads, T, T)."""
        q, k, _ = self.rotated(self.qkv(c), context)
        return attention_weights(q, k, context.mask)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q_i k_iᵀ / √d_head + causal), (B, heads, T, all tokens). For whoever studies attention: no fast form has them."""
    logits = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    if mask is None:
        length, tokens = logits.shape[-2:]
        mask = torch.ones(length, tokens, dtype=torch.bool, device=q.device).tril(tokens - length)
    return logits.masked_fill(~mask, -math.inf).softmax(-1)


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.up = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.up.parts = 2  # type: ignore[assignment]
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.down.role = "branch end"  # type: ignore[assignment]

    def forward(self, c: Tensor) -> Tensor:
        return self.gated(self.up(c))

    def gated(self, up: Tensor) -> Tensor:
        """Everything after the first product."""
        gate, value = up.chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)
