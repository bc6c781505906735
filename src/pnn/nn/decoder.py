"""Parts of a decoder: RMSNorm, rotary positions, causal attention, SwiGLU.

    RMSNorm(x) = w ⊙ x / √(mean x² + ε)                              (in fp32)
    Attn(c)    = W_o · concat_i softmax(q_i k_iᵀ / √d_head + causal) v_i,   q_i = norm(rotate(W_q c)), k_i = norm(rotate(W_k c))
    MLP(c)     = W_2 (silu(W_1 c) ⊙ W_1' c)

Queries and keys are normalised after their rotation. The three input projections of attention are one matrix, and the two
of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pnn.nn import fast
from pnn.nn.causal import Past, attention_weights, causal_attention
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


@dataclass(frozen=True)
class Context:
    """What attention has to know about a batch: rotations of its positions, what may be seen, and what came before."""

    cos: Tensor
    sin: Tensor
    past: Past
    watched: list[Tensor] | None = None  # attention leaves its weights here, where somebody asked for them
    read: list[Tensor] | None = None  # and each block what it reads of the state


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
        past = context.past
        if past.cache is not None:
            past = replace(past, place=past.place + self.layer)
        if self.num_heads == 0:
            past.count(qkv)
            return self.out(qkv.new_zeros(batch, length, 0))
        q, k, v = self.rotated(qkv, context)
        out = causal_attention(q, k, v, past, watched=context.watched, attend=fast.attend_by(q, batch * self.num_heads, length))
        return self.out(out.transpose(1, 2).flatten(2))

    def rotated(self, qkv: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, heads, T, width) each, the first two rotated and normalised."""
        q, k, v = qkv.view(*qkv.shape[:2], 3, self.num_heads, self.head_width).unbind(2)
        q = self.query_norm(rotate(q, context.cos, context.sin)).transpose(1, 2)
        k = self.key_norm(rotate(k, context.cos, context.sin)).transpose(1, 2)
        return q, k, v.transpose(1, 2)

    def weights(self, c: Tensor, context: Context) -> Tensor:
        """Of a text without cache, (B, heads, T, T)."""
        q, k, _ = self.rotated(self.qkv(c), context)
        return attention_weights(q, k, context.past.mask)


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
