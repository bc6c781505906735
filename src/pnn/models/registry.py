"""The models: which config and which classes belong to each kind, for every Auto class, and what a card says of it.

Importing this registers ours with transformers. `kind_of` answers for any model or config, ours, transformers' or reorganised:
masked or causal, steps or layers. Names and words that need no torch stand in `pnn/kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from pnn import kinds
from pnn.kinds import Kind
from pnn.models.bert import (
    BertBaselineConfig,
    BertBaselineForMaskedLM,
    BertBaselineForMultipleChoice,
    BertBaselineForQuestionAnswering,
    BertBaselineForSequenceClassification,
    BertBaselineForTokenClassification,
    BertBaselineModel,
)
from pnn.models.ddl import DDLConfig, DDLForCausalLM, DDLForSequenceClassification, DDLModel
from pnn.models.image_processor import PNNImageProcessor
from pnn.models.plastic import PlasticConfig
from pnn.models.pnn import (
    PNNConfig,
    PNNForMaskedLM,
    PNNForMultipleChoice,
    PNNForQuestionAnswering,
    PNNForSequenceClassification,
    PNNForTokenClassification,
    PNNModel,
)
from pnn.models.pnn_causal import PNNCausalConfig, PNNCausalForSequenceClassification, PNNCausalModel, PNNForCausalLM
from pnn.models.pnn_image import PNNForImageClassification, PNNImageConfig, PNNImageModel
from pnn.nn.updates import UPDATES
from pnn.schedule import parts_of


@dataclass(frozen=True)
class Head:
    what: str  # a model with it
    pipeline: str | None = None  # that takes such a model
    language: bool = False


# What a checkpoint can hold, by the Auto class that loads it
AUTO_CLASSES: dict[Any, Head] = {
    AutoModelForMaskedLM: Head("masked language model", "fill-mask", language=True),
    AutoModelForCausalLM: Head("causal language model", "text-generation", language=True),
    AutoModelForSequenceClassification: Head("sequence classifier", "text-classification"),
    AutoModelForTokenClassification: Head("token classifier", "token-classification"),
    AutoModelForQuestionAnswering: Head("question answering model"),
    AutoModelForMultipleChoice: Head("multiple choice model"),
    AutoModel: Head("model without a head"),
}


@dataclass(frozen=True)
class Entry:
    config: type[PreTrainedConfig]
    classes: dict[Any, type[PreTrainedModel]]  # by Auto class
    sentence: Callable[[Any], str]  # what a card says of the model with this config


def _of_refiners(config: PNNConfig) -> str:
    """What a PNN does, which depends on how many refiners it has and how they change the state."""
    count, steps = config.num_refiners, config.num_steps
    gated = "gated " if config.update != "delta" and config.gate != "none" else ""
    if count == 1:
        times = "once" if steps == 1 else f"again and again, {steps} times"
        text = f"one {gated}refiner is applied to every token's state {times}."
    else:
        order = "one after the other" if count == steps else f"{steps} steps in all"
        if config.repeat is not None and config.schedule is not None:
            order += f": {parts_of(config.schedule, config.repeat)}, whose middle part more or fewer steps repeat"
        shared = " that share one attention" if config.shared_attention else ""
        text = f"{count} {gated}refiners{shared} are applied to every token's state, {order}."
    if config.random_steps is not None:
        text += f" It was trained with {config.random_steps[0]} to {config.random_steps[1]} steps, drawn at every update."
    return f"A Plastic Neural Network: {text} {UPDATES[config.update].sentence(config)}"


def _of_layers(config: BertBaselineConfig) -> str:
    layers = config.num_hidden_layers
    return f"The BERT baseline of the Plastic Neural Networks paper: {layers} distinct post-norm layers."


def _of_delta_residuals(config: DDLConfig) -> str:
    settings = f"residual: {config.residual}, value channels: {config.value_channels}"
    times = "" if config.num_rounds == 1 else f", applied {config.num_rounds} times one after the other"
    return f"A Deep Delta Learning decoder of {config.num_hidden_layers} layers{times} ({settings})."


ENTRIES = {
    "pnn": Entry(
        PNNConfig,
        {
            AutoModel: PNNModel,
            AutoModelForMaskedLM: PNNForMaskedLM,
            AutoModelForSequenceClassification: PNNForSequenceClassification,
            AutoModelForTokenClassification: PNNForTokenClassification,
            AutoModelForQuestionAnswering: PNNForQuestionAnswering,
            AutoModelForMultipleChoice: PNNForMultipleChoice,
        },
        _of_refiners,
    ),
    "bert": Entry(
        BertBaselineConfig,
        {
            AutoModel: BertBaselineModel,
            AutoModelForMaskedLM: BertBaselineForMaskedLM,
            AutoModelForSequenceClassification: BertBaselineForSequenceClassification,
            AutoModelForTokenClassification: BertBaselineForTokenClassification,
            AutoModelForQuestionAnswering: BertBaselineForQuestionAnswering,
            AutoModelForMultipleChoice: BertBaselineForMultipleChoice,
        },
        _of_layers,
    ),
    "ddl": Entry(
        DDLConfig,
        {
            AutoModel: DDLModel,
            AutoModelForCausalLM: DDLForCausalLM,
            AutoModelForSequenceClassification: DDLForSequenceClassification,
        },
        _of_delta_residuals,
    ),
    "pnn_causal": Entry(
        PNNCausalConfig,
        {
            AutoModel: PNNCausalModel,
            AutoModelForCausalLM: PNNForCausalLM,
            AutoModelForSequenceClassification: PNNCausalForSequenceClassification,
        },
        lambda config: _of_refiners(config).replace("A Plastic", "A causal Plastic", 1),
    ),
}

# Not a kind of the table above: commands, evaluation and plasticity read text. `pnn/images` trains and saves it.
IMAGES = Entry(
    PNNImageConfig,
    {AutoModel: PNNImageModel, AutoModelForImageClassification: PNNForImageClassification},
    lambda config: f"{_of_refiners(config)} Its tokens are the patches of an image.",
)


def register(config: type[PreTrainedConfig], classes: dict[Any, type[PreTrainedModel]]) -> None:
    AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto, model in classes.items():
        auto.register(config, model, exist_ok=True)


for _entry in (*ENTRIES.values(), IMAGES):
    register(_entry.config, _entry.classes)
AutoImageProcessor.register(IMAGES.config, image_processor_classes={"pil": PNNImageProcessor}, exist_ok=True)


def kind_of(subject: PreTrainedModel | PreTrainedConfig) -> Kind:
    """Of a model or a config. A reorganised model is of its original's kind."""
    config = getattr(subject, "config", subject)
    if isinstance(config, PlasticConfig):
        config = config.original_config()
    kind = kinds.of_type(config.model_type)
    return kind if kind.ours else replace(kind, causal=_predicts_next_token(config))


def steps_read(config: Any) -> list[int]:
    """The steps or layers after which a model was trained to be read."""
    if not kind_of(config).has_steps:
        return [config.num_hidden_layers]
    weights = config.step_weights or [1.0] * (config.trained_steps or config.num_steps)
    return [step for step, weight in enumerate(weights, 1) if weight > 0]


def _predicts_next_token(config: PreTrainedConfig) -> bool:
    """transformers' encoders can be decoders too, if their config says so."""
    can_fill_in = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and (not can_fill_in or getattr(config, "is_decoder", False))


def classes_of(auto: Any, config: type[PreTrainedConfig]) -> tuple[type[PreTrainedModel], ...]:
    """What an Auto class builds for this config."""
    if config not in auto._model_mapping:
        return ()
    known = auto._model_mapping[config]
    return known if isinstance(known, tuple) else (known,)


def language_class(subject: PreTrainedModel | PreTrainedConfig) -> Any:
    """The Auto class of its language models."""
    return AutoModelForCausalLM if kind_of(subject).causal else AutoModelForMaskedLM


def class_named(config: PreTrainedConfig) -> Any:
    """The Auto class that loads what config.json names, or None where that is something else."""
    known = {one.__name__: auto for auto in reversed(AUTO_CLASSES) for one in classes_of(auto, type(config))}
    return next((known[name] for name in config.architectures or () if name in known), None)


def class_of(model: PreTrainedModel) -> Any:
    """The Auto class that loads this model once it is saved."""
    return next(auto for auto in AUTO_CLASSES if isinstance(model, classes_of(auto, type(model.config))))


def sentence(model: PreTrainedModel) -> str:
    """What the model is, for its card."""
    kind = kind_of(model)
    return ENTRIES[kind.type].sentence(model.config) if kind.ours else f"A {type(model).__name__}."


def distinct_blocks(model: PreTrainedModel) -> list[Any]:
    """What runs one after the other: our refiners or layers, or the longest list of modules that transformers made."""
    if kind_of(model).ours:
        return list(model.base_model.blocks)
    return list(max((one for one in model.base_model.modules() if isinstance(one, nn.ModuleList)), key=len, default=()))
