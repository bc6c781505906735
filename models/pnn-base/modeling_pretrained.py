# From plastic-neural-networks 0.1.0, pnn/models/pretrained.py. MIT licence.
"""What encoders and decoders of ours share as models of transformers: the names of attention they take, gradient checkpointing,
and what a forward pass hands back on request."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor, nn
from transformers import PreTrainedModel

ATTENTION = ("sdpa", "eager")


class Asked(TypedDict, total=False):
    """What a forward pass hands back beside its result. `output_hidden_states` and `output_attentions` are as the config says
    where they are not given. `halt`: when tokens stop being refined (`models/base`: Halting)."""

    output_states: bool
    output_gates: bool
    output_hidden_states: bool | None
    output_attentions: bool | None
    halt: Any


class OwnPreTrainedModel(PreTrainedModel):
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _supports_sdpa = True
    _supports_attention_backend = False

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """transformers asks here when a model is built or told. Both names are one to us: the fastest form that computes what
        is asked for runs, flash attention among them, and weights are computed where somebody wants to see them."""
        if attn_implementation not in (None, *ATTENTION):
            raise ValueError(
                f'attn_implementation="{attn_implementation}": a {type(self).__name__} chooses its fast attention by itself, '
                f'so leave it out, or say "sdpa" or "eager"'
            )
        return attn_implementation or ATTENTION[0]

    def wants(self, asked: bool | None, key: str) -> bool:
        """What was said to this call, or else in the config."""
        return bool(getattr(self.config, key) if asked is None else asked)

    def through(self, block: nn.Module, *inputs: Any) -> Tensor:
        """block(*inputs). Gradient checkpointing keeps only the inputs, and computes the block again in the backward pass."""
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(block.__call__, *inputs)
        return block(*inputs)
