# From plastic-neural-networks 0.1.0, pnn/nn/updates.py. MIT licence.
"""The update rules: what a refiner proposes (δ), and how that changes the state (Δ). Found by name in `UPDATES`.

A rule is one class: its equation in the docstring and in `propose` and `change`, its parameters in the constructor, and the
sentence that model cards say of it. Parameters, FLOPs and figures are counted from the module. The page
docs/howto/update_rule.md adds one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .nn_fast import __doc__ as _fast  # noqa: F401
from . import nn_fast as fast
from .nn_delta_rule import rewrite_delta, soft_unit
from .nn_gating import make_gate
from .nn_refiner import DeltaRefiner


class Gated(DeltaRefiner):
    """The paper's rule:  δ = FFN(a),   Δ = g ⊙ δ,   g = σ(W_q h ⊙ W_k δ / τ)        (no gate: Δ = δ)

    The last FFN matrix and its bias start at zero, so that Δ = 0 exactly before training. The model's initialiser runs after
    constructors and would overwrite zeros (this is how the published code lost its zero init): `zero_start` tells it.
    """

    fast_form = fast.gated_step

    def __init__(self, config: Any):
        super().__init__(config)
        self.gate = make_gate(config)
        self.ffn.down.zero_start = config.zero_init  # type: ignore[union-attr]
        if self.gate is None:
            self.own_form = None

    def change(self, h: Tensor, raw: Tensor, a: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.gate is None:
            return raw, None
        gate = self.gate(h, raw)
        return gate * raw, gate

    @classmethod
    def sentence(cls, config: Any) -> str:
        if config.gate == "none":
            return "What a refiner proposes is added as it is, without a gate."
        return "A gate decides how much of what a refiner proposes is added."


class Delta(DeltaRefiner):
    """A rewrite along one direction (see `delta_rule`):  Δ = β k (v − kᵀh),   k = δ / √(‖δ‖² + 1),   δ = FFN(a),
    v = w_v a + b_v,   β = 2σ(w_β a + b_β)."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.write = nn.Linear(config.hidden_size, 2)  # v (a number to write) and the logit of β (how much of it)
        self.ffn.down.zero_start = config.zero_init  # type: ignore[union-attr]

    def change(self, h: Tensor, raw: Tensor, a: Tensor) -> tuple[Tensor, Tensor | None]:
        v, beta = self.write(a).split(1, dim=-1)
        return rewrite_delta(h.unsqueeze(-2), soft_unit(raw), v, 2 * torch.sigmoid(beta)).squeeze(-2), None

    @classmethod
    def sentence(cls, config: Any) -> str:
        return "A step rewrites the state along one direction, by the delta rule."


class Rewrite(DeltaRefiner):
    """The whole next state is proposed:  c = LayerNorm(a + FFN(a)),   δ = c − h,   Δ = g ⊙ δ,   so   h⁺ = (1 − g) ⊙ h + g ⊙ c

    It is the delta rule, target minus what is there, with a gate for each dimension. Without a gate h⁺ = c: a BERT layer.
    States stay bounded, so it can be repeated. `delta_norm` is the second norm and always there; nothing starts at zero.
    """

    fast_form = fast.rewriting_step

    def __init__(self, config: Any):
        super().__init__(config)
        self.delta_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gate = make_gate(config)

    def propose(self, a: Tensor, h: Tensor) -> Tensor:
        assert self.delta_norm is not None
        return self.delta_norm(a + self.dropout(self.ffn(a))) - h

    change = Gated.change

    @classmethod
    def sentence(cls, config: Any) -> str:
        if config.gate == "none":
            return "A refiner proposes the whole next state, and the state becomes what it proposes."
        return "A refiner proposes the whole next state, and a gate decides how far the state moves there."


UPDATES: dict[str, type[DeltaRefiner]] = {"gated": Gated, "delta": Delta, "rewrite": Rewrite}
