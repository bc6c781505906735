"""The BERT baseline of the PNN paper: the same embeddings and head, twelve distinct post-norm layers, 132,066,618 parameters.

No segment embedding, no pooler and no transform before the vocabulary: this is what gives the paper's 132.1M.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedConfig

from pnn.models.base import (
    KEYS_TO_IGNORE,
    EncoderBase,
    EncoderOutput,
    MaskedLMBase,
    check_encoder,
)
from pnn.models.config_checks import check_kinds, warn_of_misspelt
from pnn.models.heads import (
    MultipleChoiceBase,
    QuestionAnsweringBase,
    SequenceClassificationBase,
    TokenClassificationBase,
)
from pnn.nn.guess import Gaps
from pnn.nn.halting import Rule
from pnn.nn.packing import Layout
from pnn.nn.transformer import TransformerLayer


@strict
class BertBaselineConfig(PreTrainedConfig):
    """A BERT baseline: as many distinct layers as `num_hidden_layers` says."""

    model_type = "pnn_bert_baseline"
    keys_to_ignore_at_inference = KEYS_TO_IGNORE

    vocab_size: int = 30522
    hidden_size: int = 768
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 128
    num_hidden_layers: int = 12
    ffn: str = "gelu"  # or "geglu", which has as many parameters at two thirds of the intermediate_size
    positions: str = "learned"  # or "rotary"
    tie_word_embeddings: bool = False
    head_transform: bool = False
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs: Any) -> None:
        check_kinds(self)
        warn_of_misspelt(self, kwargs)
        super().__post_init__(**kwargs)

    def validate_layers(self) -> None:
        check_encoder(self)
        if self.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers={self.num_hidden_layers}, but at least one layer is needed")


class BertBaselineModel(EncoderBase):
    """Tokens to states: the embeddings and what each layer makes of them."""

    config_class = BertBaselineConfig

    def __init__(self, config: BertBaselineConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers

    def refine(
        self,
        h: Tensor,
        layout: Layout,
        num_steps: int | None,
        details: bool,
        last_at: Tensor | None,
        rule: Rule | None = None,
        gaps: Gaps | None = None,
    ) -> EncoderOutput:
        if num_steps is not None and num_steps > len(self.layers):
            raise ValueError(f"num_steps={num_steps}, but a BERT baseline of {len(self.layers)} layers has no more steps")
        layers, states = self.layers[:num_steps], [h]
        for number, layer in enumerate(layers, 1):
            h = self.through(layer, h, layout, last_at if number == len(layers) else None)
            states.append(h)
        return EncoderOutput(last_hidden_state=h, states=tuple(states), deltas=(), gates=())


class BertBaselineForMaskedLM(MaskedLMBase):
    """A BERT baseline that predicts masked tokens."""

    config_class = BertBaselineConfig
    encoder_class = BertBaselineModel

    def supervised(self, states: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[float]]:
        return states[-1:], [1.0]


class BertBaselineForSequenceClassification(SequenceClassificationBase):
    """A BERT baseline that classifies whole texts, by the last state of their first token."""

    config_class = BertBaselineConfig
    encoder_class = BertBaselineModel


class BertBaselineForTokenClassification(TokenClassificationBase):
    """A BERT baseline that gives each token a label."""

    config_class = BertBaselineConfig
    encoder_class = BertBaselineModel


class BertBaselineForQuestionAnswering(QuestionAnsweringBase):
    """A BERT baseline that finds where in a text an answer starts and ends."""

    config_class = BertBaselineConfig
    encoder_class = BertBaselineModel


class BertBaselineForMultipleChoice(MultipleChoiceBase):
    """A BERT baseline that chooses between candidate texts."""

    config_class = BertBaselineConfig
    encoder_class = BertBaselineModel
