"""The refiner of PNN: attend, propose, update. Equations (2)–(5):

    a  = LayerNorm(h + Attn(h))
    δ  = propose(a, h)
    h⁺ = h + Δ,   Δ = change(h, δ, a)

What is proposed and how it changes the state is the update rule's: a subclass each, in `nn/updates`. The same refiner runs at
every step, or several in turn (`PNNConfig.schedule`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from pnn.nn.attention import SelfAttention
from pnn.nn.feed_forward import FEED_FORWARDS
from pnn.nn.packing import Layout, only_at


class Refinement(NamedTuple):
    """One step's change Δ, the raw δ it came from, and the gate between them (None without one)."""

    delta: Tensor
    raw: Tensor
    gate: Tensor | None


class DeltaRefiner(nn.Module):
    """Attention and FFN, which all rules share. `config`: anything with the fields of a PNNConfig."""

    fast_form: ClassVar[Callable[..., Tensor] | None] = None  # h⁺ of this very class in fewer passes, from `nn/fast`

    def __init__(self, config: Any):
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention = SelfAttention(width, config.num_attention_heads, config.attention_dropout)
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.ffn = FEED_FORWARDS[config.ffn](width, config.intermediate_size, config.dropout)
        self.delta_norm = nn.LayerNorm(width, eps=eps) if config.delta_norm else None
        self.gate: nn.Module | None = None
        self.dropout = nn.Dropout(config.dropout)
        # a subclass with a rule of its own must not inherit the form of another
        self.own_form = vars(type(self)).get("fast_form")

    def attend_with(self, owner: DeltaRefiner) -> None:
        """Share the attention of another refiner. It stays a module of that one alone: it is counted, saved and moved once,
        and where somebody replaces it, it is replaced for all."""
        del self.attention
        vars(self)["attends_with"] = owner

    def __getattr__(self, name: str) -> Any:
        if name == "attention" and "attends_with" in vars(self):
            return vars(self)["attends_with"].attention
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "attention" and "attends_with" in vars(self):
            vars(self)["attends_with"].attention = value
        else:
            super().__setattr__(name, value)

    def forward(self, h: Tensor, layout: Layout, at: Tensor | None = None) -> Tensor:
        """The next state h⁺. With `at` only of these tokens: attention sees all of them, the rest is per token."""
        if self.own_form is not None:
            return self.own_form(self, h, layout, at)
        return only_at(h, at) + self.refine(h, layout, at).delta

    def refine(self, h: Tensor, layout: Layout, at: Tensor | None = None) -> Refinement:
        """Δ and what it is made of: the equations."""
        here = only_at(h, at)
        a = self.attention_norm(here + self.dropout(self.attention(h, layout, at)))
        raw = self.propose(a, here)
        delta, gate = self.change(here, raw, a)
        return Refinement(delta, raw, gate)

    def propose(self, a: Tensor, h: Tensor) -> Tensor:
        """δ = FFN(a)                      (published code: δ = LayerNorm(FFN(a)))"""
        raw = self.dropout(self.ffn(a))
        return raw if self.delta_norm is None else self.delta_norm(raw)

    def change(self, h: Tensor, raw: Tensor, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """Δ, and the gate if there is one."""
        raise NotImplementedError

    @classmethod
    def sentence(cls, config: Any) -> str:
        """What a model card says of the rule."""
        raise NotImplementedError
