"""The delta refiner of PNN, equations (2)–(5):

    a      = LayerNorm(h + Attn(h))
    δ      = FFN(a)                      (published code: δ = LayerNorm(FFN(a)))
    Δ      = Gate(h, δ) ⊙ δ              (no gate: Δ = δ)

    hᵗ     = hᵗ⁻¹ + Δᵗ, with the same refiner at every step

The last FFN matrix and its bias start at zero, so
that Δ = 0 exactly before training; `zero_start` marks them for the model's initialiser, which runs after constructors and
would otherwise overwrite them (this is how the published code lost its zero init).

`update="delta"` replaces the gated addition by a rewrite along one direction (see `delta_rule`): k from δ, v = W_v a and
β = 2σ(w_β a + b_β), Δ = β k (v − kᵀh).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pnn.nn.attention import Layout, SelfAttention
from pnn.nn.delta_rule import rewrite_delta, soft_unit
from pnn.nn.feed_forward import FeedForward
from pnn.nn.gating import QueryKeyGate
from pnn.nn.pointwise import drop, drop_add_norm


class Refinement(NamedTuple):
    """One step's change Δ, the raw δ it came from, and the gate between them (None without one)."""

    delta: Tensor
    raw: Tensor
    gate: Tensor | None


class DeltaRefiner(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int,
        *,
        dropout: float,
        attention_dropout: float,
        eps: float,
        delta_norm: bool,
        gate: str,
        gate_bias: bool,
        update: str,
        zero_init: bool,
    ):
        super().__init__()
        self.attention = SelfAttention(hidden_size, num_heads, attention_dropout)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=eps)
        self.ffn = FeedForward(hidden_size, intermediate_size, dropout)
        self.delta_norm = nn.LayerNorm(hidden_size, eps=eps) if delta_norm else None
        self.gate = QueryKeyGate(hidden_size, gate_bias) if gate == "query_key" and update == "gated" else None
        # v (a number to write) and the logit of β (how much of it), read from the same context
        self.write = nn.Linear(hidden_size, 2) if update == "delta" else None
        self.dropout = nn.Dropout(dropout)
        self.ffn.down.zero_start = zero_init  # type: ignore[assignment]

    def forward(self, h: Tensor, layout: Layout) -> Tensor:
        """The next state, h + Δ."""
        if self.gate is None:
            return h + self.propose(h, layout).delta
        return self.gate.update(h, self.raw_delta(self.attend(h, layout)))

    def propose(self, h: Tensor, layout: Layout) -> Refinement:
        """Δ and what it is made of."""
        attended = self.attend(h, layout)
        raw = self.raw_delta(attended)
        if self.write is not None:
            v, beta = self.write(attended).split(1, dim=-1)
            return Refinement(rewrite_delta(h, soft_unit(raw), v, 2 * torch.sigmoid(beta)), raw, None)
        if self.gate is None:
            return Refinement(raw, raw, None)
        gate = self.gate(h, raw)
        return Refinement(gate * raw, raw, gate)

    def attend(self, h: Tensor, layout: Layout) -> Tensor:
        return drop_add_norm(*self.attention.unbiased(h, layout), self.dropout, h, self.attention_norm)

    def raw_delta(self, attended: Tensor) -> Tensor:
        if self.delta_norm is None:
            return drop(self.ffn(attended), self.dropout)
        return drop_add_norm(*self.ffn.unbiased(attended), self.dropout, None, self.delta_norm)
