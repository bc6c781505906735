"""The heads of an encoder beside that for masked tokens: each a Linear that reads the last state, of the first token or of all.

Losses are means over the batch, which HF Trainer averages itself.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput, can_return_tuple

from pnn.models.base import EncoderBase, EncoderOutput, PnnPreTrainedModel, with_cost
from pnn.models.pretrained import Asked
from pnn.nn.halting import Read
from pnn.objectives import IGNORE, cross_entropy


@dataclass
class ClassifierOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    states: tuple[Tensor, ...] | None = None
    deltas: tuple[Tensor, ...] | None = None
    gates: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    halted_at: Tensor | None = None
    step_cost: Tensor | None = None


@dataclass
class SpanOutput(ModelOutput):
    loss: Tensor | None = None
    start_logits: Tensor | None = None
    end_logits: Tensor | None = None
    states: tuple[Tensor, ...] | None = None
    deltas: tuple[Tensor, ...] | None = None
    gates: tuple[Tensor, ...] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    halted_at: Tensor | None = None
    step_cost: Tensor | None = None


class EncoderWithHead(PnnPreTrainedModel):
    accepts_loss_kwargs = False
    encoder_class: ClassVar[type[EncoderBase]]
    head_name: ClassVar[str] = "classifier"

    def __init__(self, config: PreTrainedConfig):
        if getattr(config, "random_halt", False):  # for pretraining: of a text one token is read, and all others would halt
            config = copy.deepcopy(config)
            config.random_halt = False
        super().__init__(config)
        self.num_labels = config.num_labels
        self.encoder = type(self).encoder_class(config)
        self.dropout = nn.Dropout(config.dropout)
        setattr(self, self.head_name, nn.Linear(config.hidden_size, self.head_size(config)))
        self.post_init()

    def head_size(self, config: PreTrainedConfig) -> int:
        return config.num_labels

    @property
    def read_out(self) -> Read | None:
        """What chooses between labels, if something does: how sure it is may tell a token to halt."""
        return None

    def last_states(self, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Of every token, (B, L, d), and what else was asked for."""
        out: EncoderOutput = self.encoder(**inputs, read_out=self.read_out, return_dict=True)
        assert out.last_hidden_state is not None
        return self.dropout(out.last_hidden_state), {key: out[key] for key in out if key != "last_hidden_state"}

    def first_states(self, tokens: Tensor | None, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Of each row's first token, (B, d). Of the last step nothing else is computed, unless somebody asked for it."""
        inputs["output_hidden_states"] = self.wants(inputs.get("output_hidden_states"), "output_hidden_states")
        if tokens is None or any(inputs.get(key) for key in ("output_states", "output_gates", "output_hidden_states")):
            states, asked = self.last_states(**inputs)
            return states[:, 0], asked
        first = torch.arange(tokens.shape[0], device=tokens.device) * tokens.shape[1]
        states, asked = self.last_states(**inputs, last_at=first)
        return states[0], asked


class SequenceClassificationBase(EncoderWithHead):
    """Reads the last state of the first token ([CLS]). One label is regression."""

    @property
    def read_out(self) -> Read | None:
        one_of_many = self.num_labels > 1 and self.config.problem_type in (None, "single_label_classification")
        return self.classifier if one_of_many else None

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_steps: int | None = None,
        **asked: Unpack[Asked],
    ) -> ClassifierOutput:
        first, more = self.first_states(
            input_ids if inputs_embeds is None else inputs_embeds,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            num_steps=num_steps,
            **asked,
        )
        logits = self.classifier(first)
        loss = None if labels is None else with_cost(self.classification_loss(logits, labels), more.get("step_cost"))
        return ClassifierOutput(loss=loss, logits=logits, **more)

    def classification_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        kind = self.config.problem_type
        if kind is None:
            kind = "regression" if self.num_labels == 1 else "single_label_classification"
            if labels.is_floating_point() and self.num_labels > 1:
                kind = "multi_label_classification"
        if kind == "regression":
            return F.mse_loss(logits.float().squeeze(-1), labels.float().view_as(logits.squeeze(-1)))
        if kind == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits.float(), labels.float())
        return F.cross_entropy(logits.float(), labels.view(-1))


class MultipleChoiceBase(EncoderWithHead):
    """Scores each of C candidate sequences by its first token's last state: (B, C, L) → (B, C)."""

    def head_size(self, config: PreTrainedConfig) -> int:
        return 1

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_steps: int | None = None,
        **asked: Unpack[Asked],
    ) -> ClassifierOutput:
        """States are those of the candidates one by one, (B·C, L, d)."""
        if input_ids.dim() != 3:
            raise ValueError(f"multiple choice takes tokens of shape (batch, choices, length), not {tuple(input_ids.shape)}")
        batch, choices, length = input_ids.shape
        candidates = input_ids.reshape(-1, length)
        keep = None if attention_mask is None else attention_mask.reshape(-1, length)
        first, more = self.first_states(candidates, input_ids=candidates, attention_mask=keep, num_steps=num_steps, **asked)
        logits = self.classifier(first).view(batch, choices)
        loss = None if labels is None else with_cost(F.cross_entropy(logits.float(), labels), more.get("step_cost"))
        return ClassifierOutput(loss=loss, logits=logits, **more)


class TokenClassificationBase(EncoderWithHead):
    """A label for every token; −100 where nothing is to be learnt."""

    read_out = SequenceClassificationBase.read_out

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_steps: int | None = None,
        **asked: Unpack[Asked],
    ) -> ClassifierOutput:
        states, more = self.last_states(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            num_steps=num_steps,
            **asked,
        )
        logits = self.classifier(states)
        loss = None
        if labels is not None:
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss = with_cost(loss, more.get("step_cost"))
        return ClassifierOutput(loss=loss, logits=logits, **more)


class QuestionAnsweringBase(EncoderWithHead):
    """Where in the text an answer starts and ends: two scores for every token."""

    head_name = "qa_outputs"  # transformers' name, by which PEFT finds it

    def head_size(self, config: PreTrainedConfig) -> int:
        return 2

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_steps: int | None = None,
        **asked: Unpack[Asked],
    ) -> SpanOutput:
        """A position beyond the text is not learnt: the answer was cut off."""
        states, more = self.last_states(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            num_steps=num_steps,
            **asked,
        )
        logits = self.qa_outputs(states).float().unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            length = states.shape[1]
            loss = torch.stack(
                [
                    cross_entropy(one, torch.where(at.view(-1) < length, at.view(-1).clamp(min=0), IGNORE))
                    for one, at in zip(logits, (start_positions, end_positions), strict=True)
                ]
            ).mean()
            loss = with_cost(loss, more.get("step_cost"))
        return SpanOutput(loss=loss, start_logits=logits[0], end_logits=logits[1], **more)
