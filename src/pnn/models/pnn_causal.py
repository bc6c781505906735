"""A causal PNN: the gated refiner of `models/pnn`, applied again and again to tokens that see only what came before them.

    h⁰ = embed(x),   hᵗ = hᵗ⁻¹ + Δᵗ,   Δᵗ = refiner(hᵗ⁻¹) with causal attention,   t = 1 … T,   p(next) = softmax(head(hᵀ))

Positions are rotary. What a token attends to at step t are the states hᵗ⁻¹ of the tokens before it, so a cache keeps keys and
values of every step, also where steps share their weights. The loss is the paper's, of the next token: Σ_t w_t CE(head(hᵗ)).
"""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers.utils import can_return_tuple

from pnn.models.base import ROTARY_BASE, PnnPreTrainedModel, vocabulary_head
from pnn.models.config_checks import check_kinds
from pnn.models.decoder_cache import DecoderCache
from pnn.models.decoders import (
    KEYS_TO_IGNORE,
    CausalLMBase,
    CausalLMOutput,
    DecoderBase,
    DecoderOutput,
    TextClassifierBase,
    kept,
)
from pnn.models.pnn import PNNConfig, PNNForMaskedLM, PNNModel
from pnn.nn.causal import Past
from pnn.nn.packing import Layout
from pnn.objectives import next_tokens, step_weighted_loss


@strict
class PNNCausalConfig(PNNConfig):
    """A causal PNN: what a `PNNConfig` says, with the vocabulary, the context and the tied head of the other decoders."""

    model_type = "pnn_causal"
    keys_to_ignore_at_inference = KEYS_TO_IGNORE

    vocab_size: int = 50304  # GPT-2's 50,257, rounded up to a multiple of 128
    max_position_embeddings: int = 1024
    positions: str = "rotary"  # there are no others
    tie_word_embeddings: bool = True
    dropout: float | int = 0.0
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_kinds(self)
        if self.bos_token_id == self.eos_token_id == 50256 >= self.vocab_size:  # GPT-2's, in another vocabulary
            self.bos_token_id = self.eos_token_id = None
        super().__post_init__(**kwargs)

    def validate_order(self) -> None:
        """Called by `@strict`, beside what a PNNConfig checks."""
        if self.positions != "rotary":
            raise ValueError(f'positions="{self.positions}": a causal PNN has rotary positions')
        if self.halt is not None or self.random_halt:
            raise ValueError("halt: tokens of a causal PNN do not halt, because later ones read every step of them")
        if self.guess_after is not None:
            raise ValueError("guess_after: a causal PNN has no masked tokens")


class PNNCausalPreTrainedModel(PnnPreTrainedModel):
    config_class = PNNCausalConfig
    base_model_prefix = "model"


class PNNCausalModel(PNNCausalPreTrainedModel, PNNModel, DecoderBase):
    """Tokens to states, h⁰ … hᵀ, none of which knows of later tokens."""

    config_class = PNNCausalConfig

    def compile_blocks(self, with_kernels: bool = False) -> None:
        """All of them: no kernel takes a whole causal step."""
        super().compile_blocks(with_kernels=False)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DecoderCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_steps: int | None = None,
        output_states: bool = False,
        output_gates: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        last_at: Tensor | None = None,
    ) -> DecoderOutput:
        """`num_steps`: other than trained. `last_at` (flat indices into the B·T tokens) asks for the last state of these alone,
        (1, len(last_at), d)."""
        self.check_steps(past_key_values, num_steps)
        text = self.read_in(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache)
        watched: list[Tensor] | None = [] if self.wants(output_attentions, "output_attentions") else None
        h, layout = self.embedded(text.tokens, text.positions, text.past, watched)
        out = self.refine(h, layout, num_steps, output_gates, last_at)
        return DecoderOutput(
            last_hidden_state=out.last_hidden_state,
            past_key_values=text.cache,
            states=out.states if output_states else None,
            gates=out.gates if output_gates else None,
            hidden_states=out.states if self.wants(output_hidden_states, "output_hidden_states") else None,
            attentions=None if watched is None else tuple(watched),
            deltas=out.deltas if output_gates else None,
        )

    def embedded(
        self, tokens: Tensor, positions: Tensor, past: Past, watched: list[Tensor] | None = None
    ) -> tuple[Tensor, Layout]:
        """h⁰, and how its tokens lie."""
        layout = Layout(rotation=self.rotation(positions, ROTARY_BASE), watched=watched, past=past)
        return self.embeddings(tokens, positions), layout

    def check_steps(self, cache: Any, num_steps: int | None) -> None:
        """Every step of a text reads what the same step made of the tokens before."""
        steps = self.config.num_steps if num_steps is None else num_steps
        if steps < 1:
            raise ValueError(f"num_steps={steps}: a decoder needs at least one")
        if isinstance(cache, DecoderCache) and cache.layers and len(cache.layers) != steps:
            raise ValueError(f"num_steps={steps}, but the cache holds {len(cache.layers)} steps of the text before")


class PNNForCausalLM(PNNCausalPreTrainedModel, CausalLMBase):
    """A causal PNN that predicts the next token, and learns from what it predicts after each step."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.decoder.weight": "model.embeddings.token.weight"}
    supervised = PNNForMaskedLM.supervised
    get_output_embeddings = PNNForMaskedLM.get_output_embeddings
    set_output_embeddings = PNNForMaskedLM.set_output_embeddings

    def __init__(self, config: PNNCausalConfig):
        super().__init__(config)
        self.model = PNNCausalModel(config)
        self.head = vocabulary_head(config)
        self.post_init()

    def next_logits(self, ids: Tensor, positions: Tensor, past: Past, real: Tensor) -> Tensor:
        h, layout = self.model.embedded(self.model.embeddings.token(ids), positions, past)
        return self.head(self.model.refine(h, layout, None, False, None).last_hidden_state)

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
        num_steps: int | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_logits: bool = True,
        output_states: bool = False,
        output_gates: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutput:
        """`labels` are the tokens themselves, (B, T), −100 where nothing is predicted; they are shifted here. `num_steps`:
        other than trained, the same for a whole text. `logits_to_keep` limits logits to the last so many tokens, or to these;
        `output_logits=False` leaves them out."""
        self.model.check_steps(past_key_values, num_steps)
        usual = num_steps in (None, self.config.num_steps)
        asked = output_states or output_gates or output_hidden_states or output_attentions
        more = labels is not None or not output_logits or not usual or bool(asked)
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
            num_steps=num_steps,
            output_states=output_states or labels is not None,
            output_gates=output_gates,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        h = out.last_hidden_state
        loss = step_losses = None
        if labels is not None:
            trained, weights = self.supervised(out.states)
            features = [self.head.features(state).flatten(0, 1) for state in trained]
            targets = next_tokens(labels).flatten()
            loss, step_losses = step_weighted_loss(features, self.head.decoder, targets, weights, num_items_in_batch)
        return CausalLMOutput(
            loss=loss,
            logits=self.head(kept(h, logits_to_keep)) if output_logits else None,
            past_key_values=out.past_key_values,
            states=out.states if output_states else None,
            gates=out.gates,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            deltas=out.deltas,
            step_losses=step_losses,
            last_loss=None if step_losses is None else step_losses[-1],
        )


class PNNCausalForSequenceClassification(TextClassifierBase, PNNCausalPreTrainedModel):
    """A causal PNN that classifies whole texts, by its last token."""

    model_class = PNNCausalModel
