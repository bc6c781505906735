"""A pretrained encoder with a new head for a task: PNN, the BERT baseline, or any model that AutoModelForSequenceClassification
(for COPA AutoModelForMultipleChoice) takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from pnn import runs
from pnn.data.tokenizers import load_tokenizer
from pnn.errors import UserError, first_line
from pnn.evaluation.reading import LONGEST
from pnn.finetuning.tasks import Task
from pnn.models.bert import BertBaselineConfig
from pnn.models.pnn import PNNConfig
from pnn.models.sections import LOADING_ERRORS
from pnn.plasticity.models import PlasticConfig

LONGEST_INPUT = 512  # what GLUE's texts are cut to where a model takes more; RoBERTa's 514 positions are 512 tokens too


def find(model: str) -> Path | str:
    """Its checkpoint, compared with its checksums."""
    checkpoint = runs.find_checkpoint(model)
    if isinstance(checkpoint, Path):
        runs.verify_checkpoint(checkpoint)
    return checkpoint


def read_config(checkpoint: Path | str, steps: int | None) -> PreTrainedConfig:
    """`steps`: refinement steps to fine-tune with, of a PNN."""
    try:
        config = AutoConfig.from_pretrained(str(checkpoint), trust_remote_code=False)
    except LOADING_ERRORS as error:
        raise UserError(f"{checkpoint}: cannot read its config.json ({first_line(error)})") from error
    if isinstance(config, PlasticConfig):
        config = config.original_config()
    if steps is not None:
        if not isinstance(config, PNNConfig):
            raise UserError(f"--steps {steps}: a {config.model_type} model has no refinement steps")
        if steps < 1:
            raise UserError(f"--steps {steps}: at least one step is needed")
        assert config.schedule is not None
        schedule = [config.schedule[step % len(config.schedule)] for step in range(steps)]
        if set(schedule) != set(config.schedule):
            raise UserError(
                f"--steps {steps}: the schedule {config.schedule} needs {len(config.schedule)} to use every refiner"
            )
        config.num_steps, config.schedule, config.step_weights = steps, schedule, None
    return config


def read_tokenizer(checkpoint: Path | str, config: PreTrainedConfig) -> tuple[PreTrainedTokenizerFast, int]:
    """The tokenizer, able to pad, and the longest input."""
    longest = min(getattr(config, "max_position_embeddings", None) or LONGEST, LONGEST_INPUT)
    tokenizer = load_tokenizer(str(checkpoint), longest)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(f"{checkpoint}: its tokenizer has no pad token, which batches need")
        tokenizer.pad_token = tokenizer.eos_token
    vocabulary = config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise UserError(f"{checkpoint}: the tokenizer has {len(tokenizer):,} entries, the model {vocabulary:,}")
    tokenizer.padding_side = "right"
    return tokenizer, longest


def has_token_types(config: PreTrainedConfig) -> bool:
    """Ours have none."""
    return not isinstance(config, PNNConfig | BertBaselineConfig) and (getattr(config, "type_vocab_size", 0) or 0) > 1


def load_classifier(
    checkpoint: Path | str, config: PreTrainedConfig, task: Task, tokenizer: PreTrainedTokenizerFast, seed: int
) -> PreTrainedModel:
    """The encoder's weights must all be there; the head is new and follows from the seed."""
    auto: Any = AutoModelForMultipleChoice if task.choices else AutoModelForSequenceClassification
    changes: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id}
    if not task.choices:
        labels = task.labels or ("score",)
        changes |= {
            "id2label": dict(enumerate(labels)),
            "label2id": {label: number for number, label in enumerate(labels)},
            "problem_type": "regression" if task.regression else "single_label_classification",
        }
    config = type(config).from_dict(config.to_dict() | changes)
    quiet = logging.get_verbosity()
    logging.set_verbosity_error()  # that the head is new is the point, not news
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            if getattr(config, "head_map", None) is not None:  # heads were removed or grown
                config = PlasticConfig.of(config, config.architectures[0])
            fresh = auto.from_config(config)
            model, info = auto.from_pretrained(
                str(checkpoint),
                config=config,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # the head of another task
                output_loading_info=True,
                dtype=torch.float32,
            )
    except LOADING_ERRORS as error:
        what = "multiple choice" if task.choices else "sequence classification"
        raise UserError(f"{checkpoint}: cannot load it for {what} ({first_line(error)})") from error
    finally:
        logging.set_verbosity(quiet)
    base = model.base_model_prefix + "."
    lost = {
        key if isinstance(key, str) else key[0] for what in ("missing_keys", "mismatched_keys") for key in info.get(what, ())
    }
    lost = {key for key in lost if key.startswith(base) and "pooler" not in key}  # BERT's masked models have no pooler
    if lost:
        raise UserError(
            f"{checkpoint}: the weights are not those of the architecture in config.json ({len(lost)} missing or of another "
            f"shape, first {min(lost)})"
        )
    with torch.no_grad():
        new = dict(fresh.named_parameters())
        for name, parameter in model.named_parameters():  # also where the checkpoint has a head: it is another task's
            if not name.startswith(base):
                parameter.copy_(new[name])
    return model
