"""Where heads and neurons are in each architecture: one small class, and an entry in `ARCHITECTURES`.

A class says where layers are, what the projections of their attention and their feed-forward part are called, which attributes
hold the number of heads, how to see attention weights, and what a layer does that is gone. Everything else follows from that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from pnn.errors import UserError
from pnn.kinds import OURS
from pnn.models.registry import distinct_blocks
from pnn.nn.packing import only_at
from pnn.nn.refiner import Refinement
from pnn.plasticity.matrices import Projection
from pnn.plasticity.stream import Stream

KINDS = HEAD, NEURON, LAYER = "head", "neuron", "layer"  # of units: what each is says `units`
WIDTH = "width"  # one more, for those who ask for it: not every architecture can lose some of it
ALL_KINDS = (*KINDS, WIDTH)

See = Callable[[int, Tensor, Tensor | None], None]  # a layer, its attention weights (B, query heads, T, T), its real tokens


class Architecture(ABC):
    model_types: ClassVar[tuple[str, ...]]

    @abstractmethod
    def blocks(self, model: PreTrainedModel) -> list[nn.Module]:
        """The layers, as the original model has them. One that is gone is there without anything in it."""

    @abstractmethod
    def attention(self, block: Any) -> nn.Module:
        """A layer's attention module."""

    @abstractmethod
    def neurons(self, block: Any) -> tuple[Projection, ...]:
        """The matrices of a layer's feed-forward part, that which leads back to the state last."""

    @abstractmethod
    def original(self, kind: str, config: Any) -> int:
        """Heads or neurons of a layer in the model as its config builds it."""

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

    @abstractmethod
    def hand_on(self, block: Any, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What a layer that is gone gives: what it got."""

    def stream(self, model: PreTrainedModel) -> Stream:
        """What reads and writes the state, where its dimensions can go."""
        raise UserError(
            f"width goes only from models whose one state passes RMSNorms alone ({', '.join(Llama.model_types)}): a "
            f"{model.config.model_type} model without some dimensions would not give what it gives with these at zero"
        )

    def attentions(self, model: PreTrainedModel) -> list[nn.Module]:
        return [self.attention(block) for block in self.blocks(model)]

    def projections(self, attention: nn.Module) -> tuple[Projection, ...]:
        return (*self.inputs(attention), self.output(attention))

    def parts(self, kind: str, block: nn.Module) -> tuple[Projection, ...]:
        """Where a layer's heads or neurons lie, the output projection last."""
        return self.projections(self.attention(block)) if kind == HEAD else self.neurons(block)

    def empty(self, block: Any) -> None:
        """Take everything out of a layer that has neither heads nor neurons left: norms, biases, and what it computes."""
        parts = [*self.parts(HEAD, block), *self.parts(NEURON, block)]
        kept = {id(part.module) for part in parts}
        for part in parts:
            if part.is_output:
                part.module.register_parameter("bias", None)
        _without_numbers(block, kept)
        block.forward = MethodType(self.hand_on, block)


def _without_numbers(module: nn.Module, kept: set[int]) -> None:
    """Replace everything in a module that holds numbers by nothing, but for those that are kept."""
    for name, child in list(module.named_children()):
        if any(id(one) in kept for one in child.modules()):
            _without_numbers(child, kept)
        elif any(True for _ in child.parameters()):
            setattr(module, name, nn.Identity())


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

    def hand_on(self, block: Any, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cache = next((one for one in (*args, *kwargs.values()) if isinstance(one, Cache)), None)  # called differently
        _count_tokens(self.core(self.attention(block)), state, cache)
        return state

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

    def blocks(self, model: PreTrainedModel) -> list[nn.Module]:
        return list(model.base_model.h)

    def attention(self, block: Any) -> nn.Module:
        return block.attn

    def neurons(self, block: Any) -> tuple[Projection, ...]:
        mlp = block.mlp
        return Projection(mlp.c_fc, "u", 1, transposed=True), Projection(mlp.c_proj, "o", 1, transposed=True)

    def original(self, kind: str, config: Any) -> int:
        return config.num_attention_heads if kind == HEAD else config.n_inner or 4 * config.hidden_size

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

    def blocks(self, model: PreTrainedModel) -> list[nn.Module]:
        return list(model.base_model.decoder.layers)

    def attention(self, block: Any) -> nn.Module:
        return block.self_attn

    def neurons(self, block: Any) -> tuple[Projection, ...]:
        return Projection(block.fc1, "u", 1), Projection(block.fc2, "o", 1)

    def original(self, kind: str, config: Any) -> int:
        return config.num_attention_heads if kind == HEAD else config.ffn_dim

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

    def blocks(self, model: PreTrainedModel) -> list[nn.Module]:
        return list(model.base_model.layers)

    def attention(self, block: Any) -> nn.Module:
        return block.self_attn

    def neurons(self, block: Any) -> tuple[Projection, ...]:
        mlp = block.mlp
        return Projection(mlp.gate_proj, "g", 1), Projection(mlp.up_proj, "u", 1), Projection(mlp.down_proj, "o", 1)

    def original(self, kind: str, config: Any) -> int:
        names = {HEAD: "num_key_value_heads", NEURON: "intermediate_size", WIDTH: "hidden_size"}
        return getattr(config, names[kind])

    def stream(self, model: PreTrainedModel) -> Stream:
        if not hasattr(model.config, "rms_norm_eps"):  # an architecture that is like Llama but for its norms
            return super().stream(model)
        base: Any = model.base_model
        blocks: list[Any] = self.blocks(model)
        parts = [part for block in blocks for kind in (HEAD, NEURON) for part in self.parts(kind, block)]
        norms = [base.norm, *(norm for block in blocks for norm in (block.input_layernorm, block.post_attention_layernorm))]
        heads = [child for child in model.children() if child is not base] if base is not model else []
        reading = [one for head in heads for one in head.modules() if isinstance(one, nn.Linear)]  # words, labels, answers
        return Stream(
            embeddings=base.embed_tokens,
            readers=(*(part.module for part in parts if not part.is_output), *reading),  # type: ignore[arg-type]
            writers=tuple(part.module for part in parts if part.is_output),  # type: ignore[misc]
            norms=tuple(norm for norm in norms if not isinstance(norm, nn.Identity)),  # of layers that are not gone
            epsilon=model.config.rms_norm_eps,
            writes=(base.embed_tokens, *(part for block in blocks for part in (block.self_attn, block.mlp))),
        )

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

    def blocks(self, model: PreTrainedModel) -> list[nn.Module]:
        if model.config.is_decoder:
            raise UserError("plasticity knows BERT as an encoder, not as a decoder (is_decoder=True)")
        return list(model.base_model.encoder.layer)

    def attention(self, block: Any) -> nn.Module:
        return block.attention

    def neurons(self, block: Any) -> tuple[Projection, ...]:
        return Projection(block.intermediate.dense, "u", 1), Projection(block.output.dense, "o", 1)

    def core(self, attention: Any) -> nn.Module:
        return attention.self

    def original(self, kind: str, config: Any) -> int:
        return config.num_attention_heads if kind == HEAD else config.intermediate_size

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

    def blocks(self, model: PreTrainedModel) -> list[nn.Module]:
        return distinct_blocks(model)

    def attention(self, block: Any) -> nn.Module:
        return block.attention

    def neurons(self, block: Any) -> tuple[Projection, ...]:
        ffn = block.mlp if hasattr(block, "mlp") else block.ffn
        return Projection(ffn.up, "gu"[-getattr(ffn.up, "parts", 1) :], 1), Projection(ffn.down, "o", 1)

    def original(self, kind: str, config: Any) -> int:
        return config.num_attention_heads if kind == HEAD else config.intermediate_size

    def inputs(self, attention: Any) -> tuple[Projection, ...]:
        return (Projection(attention.qkv, "qkv", attention.head_width),)

    def output(self, attention: Any) -> Projection:
        return Projection(attention.out, "o", attention.head_width)

    def set_count(self, attention: Any, count: int) -> None:
        attention.num_heads = count

    def hand_on(self, block: Any, state: Tensor, context: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """A decoder's cache still counts tokens in this place; a last layer may be asked for some of the tokens alone."""
        past = getattr(context, "past", None)
        if past is not None and past.cache is not None:
            replace(past, place=past.place + getattr(block.attention, "layer", 0)).count(state)
        at = args[0] if args and isinstance(args[0], Tensor) else None
        return only_at(state, at)

    def empty(self, block: Any) -> None:
        super().empty(block)
        if hasattr(block, "refine"):  # what a PNN asks a refiner for where somebody looks at its steps
            block.refine = MethodType(_no_refinement, block)

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


def _no_refinement(refiner: Any, h: Tensor, layout: Any, at: Tensor | None = None) -> Refinement:
    nothing = torch.zeros_like(only_at(h, at))
    return Refinement(nothing, nothing, None)


ARCHITECTURES: dict[str, Architecture] = {
    name: known() for known in (GPT2, OPT, Llama, Bert, OwnArchitecture) for name in known.model_types
}


def architecture_of(model: PreTrainedModel) -> Architecture:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in ARCHITECTURES:
        raise UserError(f'plasticity does not know the heads of a "{kind}" model (it knows {", ".join(sorted(ARCHITECTURES))})')
    if getattr(model.config, "shared_attention", False) and model.config.num_refiners > 1:
        raise UserError("plasticity does not reorganise models whose refiners share one attention")
    return ARCHITECTURES[kind]
