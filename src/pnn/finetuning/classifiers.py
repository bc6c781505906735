"""A pretrained encoder with a new head for a task: PNN, the BERT baseline, or any model that AutoModelForSequenceClassification
(for COPA AutoModelForMultipleChoice) takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from pnn.errors import UserError
from pnn.finetuning.tasks import Task
from pnn.models import loading
from pnn.models.registry import kind_of
from pnn.nn.halting import CRITERIA

LONGEST_INPUT = 512  # what GLUE's texts are cut to where a model takes more; RoBERTa's 514 positions are 512 tokens too


def read_config(checkpoint: Path | str, steps: int | None) -> PreTrainedConfig:
    """`steps`: refinement steps to fine-tune with, of a PNN."""
    config = loading.read_original_config(checkpoint)
    if steps is not None:
        if not kind_of(config).has_steps:
            raise UserError(f"--num-steps {steps}: a {config.model_type} model has no refinement steps")
        if steps < 1:
            raise UserError(f"--num-steps {steps}: at least one step is needed")
        loading.note_untrained_steps(steps, config)
        schedule = config.order(steps)
        if set(schedule) != set(config.schedule):
            raise UserError(
                f"--num-steps {steps}: the schedule {config.schedule} needs {len(config.schedule)} to use every refiner"
            )
        config.num_steps, config.trained_steps, config.schedule = steps, None, schedule
        config.step_weights, config.random_steps, config.random_halt = None, None, False
        config.halt = None  # it was chosen for another number
    return config


def read_tokenizer(checkpoint: Path | str, config: PreTrainedConfig) -> tuple[PreTrainedTokenizerFast, int]:
    """The tokenizer, able to pad, and the longest input."""
    longest = min(loading.longest_input(config), LONGEST_INPUT)
    tokenizer = loading.tokenizer_for(checkpoint, config, longest)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(f"{checkpoint}: its tokenizer has no pad token, which batches need")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer, longest


def has_token_types(config: PreTrainedConfig) -> bool:
    """Ours have none."""
    return not kind_of(config).ours and (getattr(config, "type_vocab_size", 0) or 0) > 1


def load_classifier(
    checkpoint: Path | str, config: PreTrainedConfig, task: Task, tokenizer: PreTrainedTokenizerFast, seed: int
) -> PreTrainedModel:
    """The encoder's weights must all be there; the head is new and follows from the seed."""
    changes: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id}
    if not task.choices:
        labels = task.labels or ("score",)
        changes |= {
            "id2label": dict(enumerate(labels)),
            "label2id": {label: number for number, label in enumerate(labels)},
            "problem_type": "regression" if task.regression else "single_label_classification",
        }
    halt = getattr(config, "halt", None)
    if halt is not None and CRITERIA[halt["criterion"]].reads:  # how sure another head was says nothing of the new one
        changes["halt"] = None
    if getattr(config, "random_halt", False):  # it was for pretraining: a classifier reads one token, and all others would halt
        changes["random_halt"] = False
    config = type(config).from_dict(config.to_dict() | changes)
    auto = AutoModelForMultipleChoice if task.choices else AutoModelForSequenceClassification
    return loading.load_with_new_head(checkpoint, config, auto, seed)
