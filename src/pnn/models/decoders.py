"""What our decoders share: how a text and what came before it are read in, what a pass hands back, steps of one token, and the
head that classifies whole texts. Deep Delta decoders (`ddl`) and causal PNNs (`pnn_causal`) fill in what lies between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import ModelOutput

from pnn.models.decoder_cache import DecoderCache
from pnn.models.decoder_steps import recorded_step
from pnn.models.pretrained import OwnPreTrainedModel
from pnn.nn.causal import Past, causal_mask
from pnn.nn.rotary import rotation

# What HF Trainer's predictions leave out: logits remain
KEYS_TO_IGNORE = ["past_key_values", "step_losses", "states", "deltas", "gates", "last_loss", "hidden_states", "attentions"]


@dataclass
class DecoderOutput(ModelOutput):
    """`states`: before the first block and after each, in a Deep Delta decoder X, (B, T, channels, d), in a PNN hᵗ, (B, T, d).
    `gates`: of every sublayer, (B, T), or of every step, (B, T, d); `deltas`: of every step. transformers' names:
    `hidden_states` are what each block reads of its state, and the last one; (B, T, d) each. `attentions`: (B, heads, T, all
    tokens) for each block."""

    last_hidden_state: Tensor | None = None
    past_key_values: DecoderCache | None = None
    states: tuple[Tensor, ...] | None = None
    gates: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    deltas: tuple[Tensor, ...] | None = None


@dataclass
class CausalLMOutput(ModelOutput):
    """`step_losses`: of a PNN the unweighted loss of each supervised step, without gradient; `last_loss`: the last of them."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: DecoderCache | None = None
    states: tuple[Tensor, ...] | None = None
    gates: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    deltas: tuple[Tensor, ...] | None = None
    step_losses: Tensor | None = None
    last_loss: Tensor | None = None


@dataclass(frozen=True)
class Text:
    """A batch as a decoder reads it."""

    tokens: Tensor  # embeddings, (B, T, d)
    positions: Tensor  # of real tokens, (B or 1, T)
    past: Past
    cache: DecoderCache | None
    keep: Tensor | None  # (B, T), False at padding; None without any


class DecoderBase(OwnPreTrainedModel):
    """A decoder without its head."""

    def read_in(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: DecoderCache | None,
        inputs_embeds: Tensor | None,
        use_cache: bool | None,
    ) -> Text:
        """`attention_mask` is (B, T), or (B, past + T) behind a cache: 1 at real tokens, 0 at padding, which lies on the left
        when text is generated. Positions count real tokens."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        tokens: Tensor = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values
        if cache is None and use_cache and not self.computes_twice:  # a cache would remember both
            cache = DecoderCache()
        if cache is not None and not isinstance(cache, DecoderCache):
            kind = type(cache).__name__
            raise ValueError(f"our decoders may keep more than keys and values: give them a DecoderCache, not a {kind}")
        if cache is not None:
            cache.leave_buffers()
        before = 0 if cache is None else cache.get_seq_length()
        length, most = tokens.shape[1], self.config.max_position_embeddings
        if length == 0:
            raise ValueError("an empty prompt: give at least one token")
        if before + length > most:
            raise ValueError(f"a sequence of {before + length} tokens, but the model takes {most}")
        keep = None if attention_mask is None else attention_mask.bool()
        if keep is not None and not torch.compiler.is_exporting():  # an exported graph cannot ask
            # a token that is generated is real, so nobody asks about it: that would wait for the device at every token
            generates = cache is not None and before > 0 and length == 1
            all_real = cache.all_real if cache is not None and generates else bool(keep.all())
            if cache is not None:
                cache.all_real = all_real
            keep = None if all_real else keep
        if position_ids is None:
            position_ids = torch.arange(before, before + length, device=tokens.device)[None]
            if keep is not None:
                position_ids = (keep.long().cumsum(-1) - 1).clamp(min=0)[:, before:]
        past = Past(causal_mask(keep, length, before, tokens.device), cache)
        return Text(tokens, position_ids, past, cache, None if keep is None else keep[:, before:])

    @property
    def computes_twice(self) -> bool:
        """Gradient checkpointing does so with every block."""
        return self.gradient_checkpointing and self.training

    def rotation(self, positions: Tensor, base: float) -> tuple[Tensor, Tensor]:
        return rotation(positions, self.config.hidden_size // self.config.num_attention_heads, base)


class CausalLMBase(OwnPreTrainedModel, GenerationMixin):
    """Predicts the next token. A subclass has `model`, `head` and `forward`."""

    accepts_loss_kwargs = True  # HF Trainer: we divide by `num_items_in_batch` ourselves

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """`generate` leaves the cache to the first forward pass: it must be a DecoderCache."""
        return False

    def next_logits(self, ids: Tensor, positions: Tensor, past: Past, real: Tensor) -> Tensor:
        """Of one more token for each text, (B, 1): (B, 1, vocabulary). `past` has the buffers of recorded steps for a cache."""
        raise NotImplementedError

    def caches(self, use_cache: bool | None, labels: Tensor | None) -> bool:
        if use_cache is not None:
            return use_cache
        generates = not self.training and labels is None and not torch.compiler.is_exporting()  # a graph holds no cache
        return bool(self.config.use_cache and generates)

    def recorded(
        self, cache: Any, input_ids: Tensor | None, attention_mask: Tensor | None, position_ids: Tensor | None, asked: bool
    ) -> Tensor | None:
        """The logits of a step of one token, where it is recorded. `asked`: for more than logits."""
        if asked or torch.is_grad_enabled() or not isinstance(cache, DecoderCache):
            return None
        if input_ids is None or input_ids.shape[1] != 1:
            return None
        if any(getattr(self.config, key) for key in ("output_hidden_states", "output_attentions")):
            return None
        return recorded_step(self, cache, input_ids, attention_mask, position_ids)


def kept(h: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """The last so many tokens of each text (0: all), or these."""
    return h[:, slice(-logits_to_keep, None)] if isinstance(logits_to_keep, int) else h[:, logits_to_keep]


class TextClassifierBase(GenericForSequenceClassification, PreTrainedModel):
    """Reads the last token that is no padding, as transformers' decoders do."""

    accepts_loss_kwargs = False  # a mean over the batch, which HF Trainer averages itself
    model_class: ClassVar[type[DecoderBase]]

    def __init__(self, config: PreTrainedConfig):
        # theirs asks the Auto classes, which do not know remote code
        super(GenericForSequenceClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = type(self).model_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
