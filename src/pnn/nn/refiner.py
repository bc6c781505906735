"""The delta refiner of PNN, equations (2)–(5):

    a      = LayerNorm(h + Attn(h))
    δ      = FFN(a)                      (published code: δ = LayerNorm(FFN(a)))
    Δ      = Gate(h, δ) ⊙ δ              (no gate: Δ = δ)

    hᵗ     = hᵗ⁻¹ + Δᵗ, with the same refiner at every step

The last FFN matrix and its bias start at zero, so that Δ = 0 exactly before training; `zero_start` marks them for the model's
initialiser, which runs after constructors and would otherwise overwrite them (this is how the published code lost its zero
init).

`update="delta"` replaces the gated addition by a rewrite along one direction (see `delta_rule`): k from δ, v = W_v a and
β = 2σ(w_β a + b_β), Δ = β k (v − kᵀh).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pnn.nn.attention import Layout, SelfAttention, only_at
from pnn.nn.delta_rule import rewrite_delta, soft_unit
from pnn.nn.feed_forward import FeedForward
from pnn.nn.gating import QueryKeyGate
from pnn.nn.pointwise import computed_in, drop, drop_add_norm, for_kernels, probability, untouched


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

    def forward(self, h: Tensor, layout: Layout, at: Tensor | None = None) -> Tensor:
        """The next state, h + Δ. With `at` only of these tokens: attention sees all of them, the rest is per token."""
        if self.gate is None or type(self).propose is not DeltaRefiner.propose:  # a rule of someone's own
            return only_at(h, at) + self.propose(h, layout, at).delta
        if layout.cu_seqlens is not None and self.in_one_piece(h, layout):
            return self.written_out(h, layout, at)
        here = only_at(h, at)
        return self.gate.update(here, self.raw_delta(self.attend(h, layout, here, at)))

    def in_one_piece(self, h: Tensor, layout: Layout) -> bool:
        """Whether a step is computed by kernels/refinement: in training, in 16 bit on a GPU, nothing hooked or replaced."""
        if not (for_kernels(h) and h.dtype == computed_in(h) and torch.is_grad_enabled()):
            return False
        from pnn.kernels import refinement

        plain = all(type(module) in PLAIN_PARTS and untouched(module) for module in self.modules())
        if self.attention.num_heads * self.attention.head_width != h.shape[-1]:
            return False  # heads were taken away or added: the written-out step has the original shapes
        return plain and refinement.takes(h.shape[-1], self.attention.num_heads, layout.max_seqlen)

    def written_out(self, h: Tensor, layout: Layout, at: Tensor | None) -> Tensor:
        from pnn.kernels import refinement

        assert self.gate is not None
        assert layout.cu_seqlens is not None
        attention, ffn, gate, norm = self.attention, self.ffn, self.gate, self.delta_norm
        weights = refinement.Weights(
            qkv=attention.qkv.weight,
            qkv_bias=attention.qkv.bias,
            out=attention.out.weight,
            out_bias=attention.out.bias,
            norm=self.attention_norm.weight,
            norm_bias=self.attention_norm.bias,
            up=ffn.up.weight,
            up_bias=ffn.up.bias,
            down=ffn.down.weight,
            down_bias=ffn.down.bias,
            delta=None if norm is None else norm.weight,
            delta_bias=None if norm is None else norm.bias,
            query=gate.query.weight,
            query_bias=gate.query.bias,
            key=gate.key.weight,
            key_bias=gate.key.bias,
            temperature=gate.temperature,
        )
        dropout, attention_dropout = probability(self.dropout), attention.attention_dropout if self.training else 0.0
        settings = refinement.Settings(
            attention.num_heads, layout.max_seqlen, dropout, attention_dropout, self.attention_norm.eps
        )
        return refinement.step(h, at, layout.cu_seqlens, weights, settings)

    def propose(self, h: Tensor, layout: Layout, at: Tensor | None = None) -> Refinement:
        """Δ and what it is made of."""
        here = only_at(h, at)
        attended = self.attend(h, layout, here, at)
        raw = self.raw_delta(attended)
        if self.write is not None:
            v, beta = self.write(attended).split(1, dim=-1)
            delta = rewrite_delta(here.unsqueeze(-2), soft_unit(raw), v, 2 * torch.sigmoid(beta)).squeeze(-2)
            return Refinement(delta, raw, None)
        if self.gate is None:
            return Refinement(raw, raw, None)
        gate = self.gate(here, raw)
        return Refinement(gate * raw, raw, gate)

    def attend(self, h: Tensor, layout: Layout, here: Tensor, at: Tensor | None) -> Tensor:
        return drop_add_norm(*self.attention.unbiased(h, layout, at), self.dropout, here, self.attention_norm)

    def raw_delta(self, attended: Tensor) -> Tensor:
        if self.delta_norm is None:
            return drop(self.ffn(attended), self.dropout)
        return drop_add_norm(*self.ffn.unbiased(attended), self.dropout, None, self.delta_norm)


# What a refiner is made of when nobody has replaced a part of it
PLAIN_PARTS = (DeltaRefiner, SelfAttention, FeedForward, QueryKeyGate, nn.Linear, nn.LayerNorm, nn.Dropout)
