"""Where heads are in each architecture: one small class, and an entry in `ARCHITECTURES`.

A class says where attention modules are, what their projections are called, which attributes hold the number of heads, and
how to see attention weights. Everything else about heads follows from that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.kinds import OURS
from pnn.models.registry import distinct_blocks
from pnn.plasticity.matrices import Projection

See = Callable[[int, Tensor, Tensor | None], None]  # a layer, its attention weights (B, query heads, T, T), its real tokens


class Architecture(ABC):
    model_types: ClassVar[tuple[str, ...]]

    @abstractmethod
    def attentions(self, model: PreTrainedModel) -> list[nn.Module]:
        """The attention module of each layer."""

    @abstractmethod
    def original_count(self, config: Any) -> int:
        """Heads of a layer in the model as its config builds it."""

    @abstractmethod
    def inputs(self, attention: Any) -> tuple[Projection, ...]:
        """Where queries, keys and values come from."""

    @abstractmethod
    def output(self, attention: Any) -> Projection:
        """W_o. One head's width here is all that it hands on."""

    @abstractmethod
    def set_count(self, attention: Any, count: int) -> None:
        """Tell the module how many heads it has, after its matrices were changed."""

    @abstractmethod
    def watching(self, model: PreTrainedModel, see: See) -> Any:
        """A context in which `see` gets every layer's attention weights on each forward pass."""

    def projections(self, attention: nn.Module) -> tuple[Projection, ...]:
        return (*self.inputs(attention), self.output(attention))


# Transformers ---------------------------------------------------------------------------------------------------------


class TransformersArchitecture(Architecture):
    """What transformers' attention modules have in common: `forward` gives (output, weights), weights in eager mode only."""

    def core(self, attention: Any) -> nn.Module:
        """The module that attends, where it is not the whole of attention."""
        return attention

    def set_count(self, attention: Any, count: int) -> None:
        core = self.core(attention)
        self.set_attributes(core, count)
        if count == 0:
            core.forward = MethodType(self.without_heads, core)  # reshapes to (…, −1, width) fail where nothing is left
        else:
            core.__dict__.pop("forward", None)

    @abstractmethod
    def set_attributes(self, core: Any, count: int) -> None:
        """Set what holds the number of heads, if anything does."""

    @abstractmethod
    def without_heads(self, core: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """What is left of a layer's attention when no head is: the bias of W_o."""

    @contextmanager
    def watching(self, model: PreTrainedModel, see: See) -> Iterator[None]:
        before = model.config._attn_implementation

        def hook(layer: int) -> Callable[..., None]:
            def watch(module: nn.Module, args: Any, output: Any) -> None:
                if output[1] is not None:
                    see(layer, output[1].float(), None)

            return watch

        with ExitStack() as stack:
            model.set_attn_implementation("eager")
            stack.callback(model.set_attn_implementation, before)
            for layer, attention in enumerate(self.attentions(model)):
                stack.callback(self.core(attention).register_forward_hook(hook(layer)).remove)
            yield


def _count_tokens(core: Any, hidden_states: Tensor, cache: Any) -> None:
    """A cache asks its first layer how long the text is, so a layer without heads keeps a zero for every token."""
    if cache is not None:
        cache = getattr(cache, "self_attention_cache", cache)
        nothing = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
        cache.update(nothing, nothing, core.layer_idx)


def _bias_alone(projection: Any, hidden_states: Tensor) -> Tensor:
    nothing = torch.zeros_like(hidden_states)
    return nothing if projection.bias is None else nothing + projection.bias


class GPT2(TransformersArchitecture):
    """Queries, keys and values fused in one Conv1D, whose weight is (in, out)."""

    model_types = ("gpt2",)

    def attentions(self, model: PreTrainedModel) -> list[nn.Module]:
        return [block.attn for block in model.base_model.h]

    def original_count(self, config: Any) -> int:
        return config.num_attention_heads

    def inputs(self, attention: Any) -> tuple[Projection, ...]:
        return (Projection(attention.c_attn, "qkv", attention.head_dim, transposed=True),)

    def output(self, attention: Any) -> Projection:
        return Projection(attention.c_proj, "o", attention.head_dim, transposed=True)

    def set_attributes(self, core: Any, count: int) -> None:
        core.num_heads, core.split_size = count, count * core.head_dim

    def without_heads(
        self, core: Any, hidden_states: Tensor, past_key_values: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        _count_tokens(core, hidden_states, past_key_values)
        return core.resid_dropout(_bias_alone(core.c_proj, hidden_states)), None


class OPT(TransformersArchitecture):
    model_types = ("opt",)

    def attentions(self, model: PreTrainedModel) -> list[nn.Module]:
        return [layer.self_attn for layer in model.base_model.decoder.layers]

    def original_count(self, config: Any) -> int:
        return config.num_attention_heads

    def inputs(self, attention: Any) -> tuple[Projection, ...]:
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        return tuple(Projection(part, role, attention.head_dim) for part, role in zip(parts, "qkv", strict=True))

    def output(self, attention: Any) -> Projection:
        return Projection(attention.out_proj, "o", attention.head_dim)

    def set_attributes(self, core: Any, count: int) -> None:
        core.num_heads = count

    def without_heads(
        self, core: Any, hidden_states: Tensor, past_key_values: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        _count_tokens(core, hidden_states, past_key_values)
        return _bias_alone(self.output(core).module, hidden_states), None


class Llama(TransformersArchitecture):
    """Decoders with keys and values shared by groups of queries: a head is a whole group."""

    model_types = ("llama", "mistral", "qwen2")

    def attentions(self, model: PreTrainedModel) -> list[nn.Module]:
        return [layer.self_attn for layer in model.base_model.layers]

    def original_count(self, config: Any) -> int:
        return config.num_key_value_heads

    def inputs(self, attention: Any) -> tuple[Projection, ...]:
        width = attention.head_dim
        return (
            Projection(attention.q_proj, "q", width * attention.num_key_value_groups),
            Projection(attention.k_proj, "k", width),
            Projection(attention.v_proj, "v", width),
        )

    def output(self, attention: Any) -> Projection:
        return Projection(attention.o_proj, "o", attention.head_dim * attention.num_key_value_groups)

    def set_attributes(self, core: Any, count: int) -> None:
        """Nothing to set: the module infers its heads from the matrices, and groups keep their size."""

    def without_heads(
        self, core: Any, hidden_states: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        _count_tokens(core, hidden_states, past_key_values)
        return _bias_alone(self.output(core).module, hidden_states), None


class Bert(TransformersArchitecture):
    """W_o is not in the module that attends but in the one behind it."""

    model_types = ("bert",)

    def attentions(self, model: PreTrainedModel) -> list[nn.Module]:
        if model.config.is_decoder:
            raise UserError("plasticity knows BERT as an encoder, not as a decoder (is_decoder=True)")
        return [layer.attention for layer in model.base_model.encoder.layer]

    def core(self, attention: Any) -> nn.Module:
        return attention.self

    def original_count(self, config: Any) -> int:
        return config.num_attention_heads

    def inputs(self, attention: Any) -> tuple[Projection, ...]:
        core = attention.self
        parts = (core.query, core.key, core.value)
        return tuple(Projection(part, role, core.attention_head_size) for part, role in zip(parts, "qkv", strict=True))

    def output(self, attention: Any) -> Projection:
        return Projection(attention.output.dense, "o", attention.self.attention_head_size)

    def set_attributes(self, core: Any, count: int) -> None:
        core.num_attention_heads, core.all_head_size = count, count * core.attention_head_size

    def without_heads(self, core: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return hidden_states.new_zeros(*hidden_states.shape[:-1], 0), None


# Ours -----------------------------------------------------------------------------------------------------------------


class OwnArchitecture(Architecture):
    """Queries, keys and values fused in one Linear; the modules know what to do without heads. Layers are refiners in a PNN: as
    many as are distinct, however often each is applied. DDL's norms of queries and keys are shared by all heads of a layer and
    stay."""

    model_types = tuple(kind.model_type for kind in OURS)

    def attentions(self, model: PreTrainedModel) -> list[nn.Module]:
        return [block.attention for block in distinct_blocks(model)]

    def original_count(self, config: Any) -> int:
        return config.num_attention_heads

    def inputs(self, attention: Any) -> tuple[Projection, ...]:
        return (Projection(attention.qkv, "qkv", attention.head_width),)

    def output(self, attention: Any) -> Projection:
        return Projection(attention.out, "o", attention.head_width)

    def set_count(self, attention: Any, count: int) -> None:
        attention.num_heads = count

    @contextmanager
    def watching(self, model: PreTrainedModel, see: See) -> Iterator[None]:
        def hook(layer: int) -> Callable[..., None]:
            def watch(attention: Any, args: tuple[Any, ...]) -> None:
                if attention.num_heads:
                    weights = attention.weights(*args[:2])  # the state and how its tokens lie
                    see(layer, *(weights if isinstance(weights, tuple) else (weights, None)))

            return watch

        with ExitStack() as stack:
            for layer, attention in enumerate(self.attentions(model)):
                stack.callback(attention.register_forward_pre_hook(hook(layer)).remove)
            yield


ARCHITECTURES: dict[str, Architecture] = {
    name: known() for known in (GPT2, OPT, Llama, Bert, OwnArchitecture) for name in known.model_types
}


def architecture_of(model: PreTrainedModel) -> Architecture:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in ARCHITECTURES:
        raise UserError(f'plasticity does not know the heads of a "{kind}" model (it knows {", ".join(sorted(ARCHITECTURES))})')
    return ARCHITECTURES[kind]
