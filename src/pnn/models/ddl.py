"""Deep Delta Learning: a decoder whose residual stream is read, compared and overwritten.

    X⁰ = expand(embed(tokens)),   and in every sublayer (attention, then MLP, in each of L blocks):
    x = compress(X),   c̄ = RMSNorm(x),   X⁺ = X + β k (vᵀ − kᵀX)   with k from F(c̄), v and β from x and c̄
    logits = head(RMSNorm(compress(Xᴸ)))

`DDLConfig()` is the paper's bare "DDL" at its small size: four value channels, channel compressor, input expansion,
generators as in the published code (`reading="code"`; `"paper"` follows the text, see `nn/delta_rule`). `residual` says how a
branch's output enters the state: `"delta"` as above, `"write_only"` without the erasure, `"additive"` as everybody does. With
`value_channels=1` the state is a vector and needs neither compressor nor expansion, so `residual="additive",
value_channels=1` is the baseline. Attention and MLP are the same in all of them. `num_rounds` applies the L blocks again and
again, with the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.utils import can_return_tuple

from pnn.models.base import check_heads
from pnn.models.config_checks import check_kinds, warn_of_misspelt
from pnn.models.decoder_cache import DecoderCache, Histories
from pnn.models.decoders import (
    KEYS_TO_IGNORE,
    CausalLMBase,
    CausalLMOutput,
    DecoderBase,
    DecoderOutput,
    TextClassifierBase,
    kept,
)
from pnn.models.pretrained import OwnPreTrainedModel
from pnn.nn import delta_stream
from pnn.nn.causal import Past
from pnn.nn.decoder import CausalAttention, Context, RMSNorm, SwiGLU
from pnn.nn.delta_rule import (
    AdditiveResidual,
    ChannelCompressor,
    DeltaResidual,
    InputExpansion,
    Repetition,
    Squeeze,
    TokenCompressor,
)
from pnn.nn.delta_stream import Sublayer
from pnn.nn.fast import computed_in, for_kernels, untouched
from pnn.objectives import next_token_loss

RESIDUALS = ("delta", "write_only", "additive")
COMPRESSORS = ("channel", "token")
VARIANTS = ("code", "paper")


@strict
class DDLConfig(PreTrainedConfig):
    """A Deep Delta decoder. The values of what decides what it is:

    * `residual`: `"delta"` reads, compares and overwrites; `"write_only"` does not erase; `"additive"` adds, as everybody does.
    * `value_channels`: numbers for each dimension of the state; 1 is a vector, as everybody's.
    * `compressor`: `"channel"` mixes the channels of a token, `"token"` also those of the tokens before it.
    * `reading`: `"code"` follows the published code, `"paper"` the text.
    """

    model_type = "ddl"
    keys_to_ignore_at_inference = KEYS_TO_IGNORE

    vocab_size: int = 50304  # GPT-2's 50,257, rounded up to a multiple of 128
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_rounds: int = 1  # how often the layers are applied, one after the other
    num_attention_heads: int = 6
    intermediate_size: int | None = None  # None: ⌊8 d / 3⌋
    max_position_embeddings: int = 1024
    residual: str = "delta"
    value_channels: int = 4
    compressor: str = "channel"
    expand_input: bool = True
    reading: str = "code"
    compressor_kernel_size: int = 4  # tokens that a token compressor sees
    expansion_kernel_size: int = 4
    beta_init: float = 1.0  # β before training, between 0 and 2
    rotary_base: float = 10000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02  # of the embeddings; matrices start with 0.5 / √d
    tie_word_embeddings: bool = True
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_kinds(self)
        warn_of_misspelt(self, kwargs)
        if self.intermediate_size is None:
            self.intermediate_size = 8 * self.hidden_size // 3
        if self.bos_token_id == self.eos_token_id == 50256 >= self.vocab_size:  # GPT-2's, in another vocabulary
            self.bos_token_id = self.eos_token_id = None
        super().__post_init__(**kwargs)

    def validate_decoder(self) -> None:
        """Called by `@strict` after construction and before saving."""
        check_heads(self, rotary=True)
        for name, known in (("residual", RESIDUALS), ("compressor", COMPRESSORS), ("reading", VARIANTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(known)}")
        for name in ("value_channels", "compressor_kernel_size", "expansion_kernel_size", "num_hidden_layers", "num_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, but at least one is needed")
        for name in ("compressor_kernel_size", "expansion_kernel_size"):
            if getattr(self, name) > self.max_position_embeddings:
                raise ValueError(
                    f"{name}={getattr(self, name)} is longer than the context of {self.max_position_embeddings} tokens"
                )
        if not 0 <= self.beta_init <= 2:
            raise ValueError(f"beta_init={self.beta_init} does not lie between 0 and 2")

    @property
    def depth(self) -> int:
        """Blocks that a token passes."""
        return self.num_hidden_layers * self.num_rounds

    @property
    def residual_bias(self) -> float:
        """The gate's bias that gives β = beta_init."""
        p = min(max(self.beta_init / 2, 1e-6), 1 - 1e-6)
        return math.log(p / (1 - p))


def make_compressor(config: DDLConfig) -> nn.Module:
    if config.value_channels == 1:
        return Squeeze()
    if config.compressor == "channel":
        return ChannelCompressor(config.hidden_size, config.value_channels, config.reading)
    return TokenCompressor(config.hidden_size, config.value_channels, config.compressor_kernel_size)


def make_residual(config: DDLConfig) -> nn.Module:
    if config.residual == "additive":
        return AdditiveResidual(config.value_channels)
    return DeltaResidual(config.hidden_size, config.value_channels, config.reading, erase=config.residual == "delta")


class DDLBlock(nn.Module):
    """Attention, then MLP. One compressor serves both."""

    def __init__(self, config: DDLConfig, layer: int):
        super().__init__()
        self.compress = make_compressor(config)
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = CausalAttention(config.hidden_size, config.num_attention_heads, config.rms_norm_eps, layer)
        self.attention_residual = make_residual(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        assert config.intermediate_size is not None
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.mlp_residual = make_residual(config)

    def sublayers(self, context: Context, histories: Histories) -> tuple[Sublayer, Sublayer]:
        def history(branch: str) -> Tensor | None:
            return histories.buffer(lambda: f"{branch} {self.place(context)}")

        return (
            Sublayer(
                self.compress,
                self.attention_norm,
                lambda c: self.attention(c, context),
                self.attention_residual,
                history("attention"),
            ),
            Sublayer(self.compress, self.mlp_norm, self.mlp, self.mlp_residual, history("mlp")),
        )

    def place(self, context: Context) -> int:
        """In a cache."""
        return context.past.place + self.attention.layer

    def forward(self, state: Tensor, context: Context, histories: Histories) -> Tensor:
        x = histories.apply(self.compress, state, lambda: f"attention {self.place(context)}")
        if context.read is not None:
            context.read.append(x)
        c = self.attention_norm(x)
        state = self.attention_residual(state, self.attention(c, context), x, c)
        x = histories.apply(self.compress, state, lambda: f"mlp {self.place(context)}")
        c = self.mlp_norm(x)
        return self.mlp_residual(state, self.mlp(c), x, c)


class DDLPreTrainedModel(OwnPreTrainedModel):
    config_class = DDLConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar[list[str]] = ["DDLBlock"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, 0.5 / √d) for every matrix, kernels of compressors among them, less for what ends a branch; see the spec of
        the published code. Runs after the constructors: an initial value that matters has to be set here."""
        config = self.config
        std = 0.5 / math.sqrt(config.hidden_size)
        if isinstance(module, nn.Linear):
            role = getattr(module, "role", None)  # transformers may skip modules that own others but no numbers: leaves say it
            init.normal_(module.weight, mean=0.0, std=std / math.sqrt(config.depth) if role == "branch end" else std)
            if role == "gate":
                init.constant_(module.bias, config.residual_bias)
            elif module.bias is not None:
                init.uniform_(module.bias, -1 / math.sqrt(config.hidden_size), 1 / math.sqrt(config.hidden_size))
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=config.initializer_range)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, AdditiveResidual):
            if module.weight is not None:
                init.ones_(module.weight)
        elif isinstance(module, ChannelCompressor | TokenCompressor):
            if module.read is None:  # the paper's compressor: the mean of the channels
                init.constant_(module.kernel, 1 / config.value_channels)
            else:
                init.normal_(module.kernel, mean=0.0, std=std)
                init.constant_(module.read, 1 / config.value_channels)
        elif isinstance(module, InputExpansion):
            init.copy_(module.kernel, module.identity())


class DDLModel(DDLPreTrainedModel, DecoderBase):
    """Tokens to a state that every sublayer reads and rewrites."""

    def __init__(self, config: DDLConfig):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        channels = config.value_channels
        expands = config.expand_input and channels > 1
        self.expand = (
            InputExpansion(config.hidden_size, channels, config.expansion_kernel_size) if expands else Repetition(channels)
        )
        self.blocks = nn.ModuleList(DDLBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.readout = make_compressor(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = value  # type: ignore[assignment]

    def compile_blocks(self, with_kernels: bool = False) -> None:
        """Compile in place what runs again and again; blocks of one shape share one graph. Where kernels take what lies between
        branches, these are what is left to compile."""
        self.expand.compile()
        between = with_kernels and self.config.residual != "additive" and self._kernels_know_the_shape()
        for block in self.blocks:
            for part in (block.attention, block.mlp) if between else (block,):
                part.compile()  # type: ignore[union-attr]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_states: bool = False,
        output_gates: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> DecoderOutput:
        text = self.read_in(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache)
        context = self.context(text.positions, text.past)
        if self.wants(output_hidden_states, "output_hidden_states"):
            context = replace(context, read=[])
        if self.wants(output_attentions, "output_attentions"):
            context = replace(context, watched=[])
        histories = Histories(text.cache, text.keep)

        seen = output_states or output_gates or context.read is not None or context.watched is not None
        states: list[Tensor] | None = [] if seen or self.computes_twice else None
        gates: list[Tensor] = []
        watched = [
            _watch_gate(module, gates) for module in self.modules() if output_gates and isinstance(module, DeltaResidual)
        ]
        try:
            last = self.last_state(text.tokens, context, histories, states)
        finally:
            for handle in watched:
                handle.remove()
        return DecoderOutput(
            last,
            text.cache,
            tuple(states) if output_states and states is not None else None,
            tuple(gates) if output_gates else None,
            None if context.read is None else (*context.read, last),
            None if context.watched is None else tuple(context.watched),
        )

    def context(self, positions: Tensor, past: Past) -> Context:
        return Context(*self.rotation(positions, self.config.rotary_base), past)

    def last_state(self, h: Tensor, context: Context, histories: Histories, states: list[Tensor] | None = None) -> Tensor:
        """From embeddings to what the head reads. `states` is given X before the first block and after each; kernels, which
        keep none, then stay away."""
        if for_kernels(h):
            h = h.to(computed_in(h))
        state = histories.apply(self.expand, h, lambda: "input")
        if states is None:
            last = self._by_kernels(state, context, histories)
            if last is not None:
                return last
        else:
            states.append(state)
        for block, here in self.applied(context):
            state = self.through(block, state, here, histories)
            if states is not None:
                states.append(state)
        return self.norm(histories.apply(self.readout, state, lambda: "readout"))

    def applied(self, context: Context) -> Iterator[tuple[DDLBlock, Context]]:
        """The blocks in their order, round after round. A cache has a place for each application."""
        for number in range(self.config.num_rounds):
            here = context
            if context.past.cache is not None:
                here = replace(context, past=replace(context.past, place=number * len(self.blocks)))
            for block in self.blocks:
                yield block, here  # type: ignore[misc]

    @property
    def _compresses_over_tokens(self) -> bool:
        return self.config.value_channels > 1 and self.config.compressor == "token"

    def _kernels_know_the_shape(self) -> bool:
        from pnn.kernels import rewriting

        config = self.config
        taps = config.compressor_kernel_size if self._compresses_over_tokens else 1
        return rewriting.takes(config.hidden_size, config.value_channels, taps)

    def _by_kernels(self, state: Tensor, context: Context, histories: Histories) -> Tensor | None:
        """What the blocks and the last norm give, where kernels compute it; else None. They know of what came before and of
        padding in steps on buffers only. To what only looks at its own token both are all the same."""
        looks_back = self._compresses_over_tokens and not (histories.cache is None and histories.keep is None)
        if looks_back and histories.buffer(lambda: "readout") is None:
            return None
        if self.config.residual == "additive" or not all(untouched(block) for block in self.blocks):
            return None
        sublayers = [one for block, here in self.applied(context) for one in block.sublayers(here, histories)]
        sublayers.append(Sublayer(self.readout, self.norm, history=histories.buffer(lambda: "readout")))
        return delta_stream.run(state, sublayers, histories.keep) if delta_stream.takes(state, sublayers) else None


def _watch_gate(residual: DeltaResidual, into: list[Tensor]) -> Any:
    def see(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        into.append(2 * torch.sigmoid(residual.gate(args[3]).float()).squeeze(-1))

    return residual.register_forward_hook(see)


class DDLForCausalLM(DDLPreTrainedModel, CausalLMBase):
    """A Deep Delta decoder that predicts the next token."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "model.embeddings.weight"}

    def __init__(self, config: DDLConfig):
        super().__init__(config)
        self.model = DDLModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.head = value  # type: ignore[assignment]

    def next_logits(self, ids: Tensor, positions: Tensor, past: Past, real: Tensor) -> Tensor:
        context = self.model.context(positions, past)
        return self.head(self.model.last_state(self.model.embeddings(ids), context, Histories(past.cache, real)))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool = True,
        output_states: bool = False,
        output_gates: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutput:
        """`labels` are the tokens themselves, (B, T), −100 where nothing is predicted; they are shifted here. `logits_to_keep`
        limits logits to the last so many tokens, or to these; `output_logits=False` leaves them out."""
        asked = output_states or output_gates or output_hidden_states or output_attentions
        more = labels is not None or not output_logits or bool(asked)
        step = self.recorded(past_key_values, input_ids, attention_mask, position_ids, more)
        if step is not None:
            return CausalLMOutput(None, step, past_key_values)
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=self.caches(use_cache, labels),
            output_states=output_states,
            output_gates=output_gates,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        h = out.last_hidden_state
        loss = None if labels is None else next_token_loss(h, self.head, labels, num_items_in_batch)
        logits = self.head(kept(h, logits_to_keep)) if output_logits else None
        return CausalLMOutput(loss, logits, out.past_key_values, out.states, out.gates, out.hidden_states, out.attentions)


class DDLForSequenceClassification(TextClassifierBase, DDLPreTrainedModel):
    """A Deep Delta decoder that classifies whole texts, by its last token."""

    model_class = DDLModel
