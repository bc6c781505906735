"""Training a decoder of Llama's kind in fewer passes over memory, on a GPU in 16 bit.

`with fused(model):` norms, feed-forward parts and rotations compute as `kernels/llama` does, all else as in transformers, whose
classes are the plain twins. Where the kernels do not compute (a CPU, fp32, another activation, somebody who listens) a module's
own `forward` does. It is for one thread, and no model is copied or saved meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from pnn.nn.fast import computed_in, for_kernels, untouched

FAMILIES = ("Llama", "Mistral", "Qwen2")  # whose blocks are alike: <family>RMSNorm, <family>MLP, <family>Attention
SILU = ("SiLU", "SiLUActivation")  # torch's own, or that of newer transformers
ROTATION = "apply_rotary_pos_emb"  # what an attention calls, by this name in its module
Rotation = tuple[Tensor, Tensor]


class OnePassNorm:
    """In front of a norm's own class."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if for_kernels(hidden_states) and untouched(self):
            from pnn.kernels import llama  # needs Triton: imported where it runs

            if llama.takes_width(hidden_states.shape[-1]):
                return llama.rms_norm(hidden_states, self.weight, self.variance_epsilon, computed_in(hidden_states))
        out: Tensor = super().forward(hidden_states)  # type: ignore[misc]
        return out


class OnePassGate:
    """In front of the class of a feed-forward part."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if for_kernels(x) and type(self.act_fn).__name__ in SILU and untouched(self.act_fn):
            from pnn.kernels import llama

            down: Tensor = self.down_proj(llama.swiglu(self.gate_proj(x), self.up_proj(x)))
            return down
        out: Tensor = super().forward(x)  # type: ignore[misc]
        return out


def rotated(plain: Callable[..., Rotation], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Rotation:
    """`plain` is the function of transformers."""
    if for_kernels(q) and unsqueeze_dim == 1:
        from pnn.kernels import llama

        if llama.takes_heads(q.shape[-1]):
            return llama.rotate(q, cos, sin), llama.rotate(k, cos, sin)
    return plain(q, k, cos, sin, unsqueeze_dim)


@contextmanager
def fused(*models: PreTrainedModel) -> Iterator[None]:
    with ExitStack() as stack:
        for name in {_attention_of(model) for model in models} - {None}:
            stack.enter_context(_with_rotation(sys.modules[str(name)]))
        for module in (one for model in models for one in model.modules()):
            front = _one_pass(module)
            if front is not None:
                stack.enter_context(_with_class(module, front))
        yield


def _one_pass(module: nn.Module) -> type | None:
    name = type(module).__name__ if type(module).__module__.startswith("transformers.") else ""
    if name in {f"{family}RMSNorm" for family in FAMILIES}:
        return OnePassNorm
    return OnePassGate if name in {f"{family}MLP" for family in FAMILIES} else None


_MADE: dict[type, type] = {}


@contextmanager
def _with_class(module: nn.Module, front: type) -> Iterator[None]:
    own = type(module)
    if own not in _MADE:
        _MADE[own] = type(f"OnePass{own.__name__}", (front, own), {"__module__": __name__})
    module.__class__ = _MADE[own]
    try:
        yield
    finally:
        module.__class__ = own


def _attention_of(model: PreTrainedModel) -> str | None:
    """The module of transformers that a model's attention is written in."""
    names = {f"{family}Attention" for family in FAMILIES}
    return next((type(one).__module__ for one in model.modules() if type(one).__name__ in names), None)


@contextmanager
def _with_rotation(written_in: Any) -> Iterator[None]:
    plain = getattr(written_in, ROTATION)
    setattr(written_in, ROTATION, partial(rotated, plain))
    try:
        yield
    finally:
        setattr(written_in, ROTATION, plain)
