"""From the `model` section of a run's config to a model with fresh weights.

`type` is one of ours, or `transformers`: then `architecture` is transformers' own name of a decoder (gpt2, opt, llama …), which
starts from fresh weights and has the fields of its own config.
"""

from __future__ import annotations

import typing
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pnn import kinds
from pnn.config import check_keys, typed
from pnn.errors import UserError, did_you_mean, first_line
from pnn.memory import check_counts
from pnn.models.config_checks import own_fields, parts
from pnn.models.registry import ENTRIES, distinct_blocks, kind_of, language_class

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "num_steps",
    "num_rounds",
    "trained_steps",
)
PLAIN = (bool, int, float, str, type(None))  # what a YAML file can say


def model_config(section: dict[str, Any], vocab_size: int | None = None, **defaults: Any) -> PreTrainedConfig:
    """The Hugging Face config of a `model` section. The vocabulary's size comes from the tokenizer unless given."""
    check_counts(section, "model")
    kind, section = kinds.of_section(section), {key: value for key, value in section.items() if key != "type"}
    config_class: Any = ENTRIES[kind.type].config if kind.ours else _decoder_config(section.pop("architecture", None))
    hints = own_fields(config_class)
    check_keys(section, hints, "model")
    values = {key: typed(value, _plain(hints[key]), f"model.{key}") for key, value in section.items()}
    for size in (config_class.attribute_map.get(name, name) for name in SIZES):
        if values.get(size) is not None and values[size] < 1:
            raise UserError(f"model.{size}: must be above zero, got {values[size]}")
    if vocab_size is not None:
        given = values.setdefault("vocab_size", vocab_size)
        if given < vocab_size:
            raise UserError(
                f"model.vocab_size: {given}, but the tokenizer has {vocab_size} entries: --set model.vocab_size={vocab_size}"
            )
    own_names = {config_class.attribute_map.get(key, key): value for key, value in defaults.items()}
    try:
        config = config_class(**(own_names | values))
    except (StrictDataclassError, ValueError) as error:
        reason = error.__cause__ if error.__cause__ is not None else error
        raise UserError(f"model: {reason}") from None
    if kind_of(config).causal != kind.causal:
        raise UserError(f"model.architecture: a {config.model_type} model sees the tokens that it predicts: set is_decoder")
    return config


def with_room_for(section: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """A `model` section, enlarged where its `vocab_size` is too small: it was meant for another text than the one that this
    vocabulary was made from."""
    given = section.get("vocab_size")
    return section if given is None or given >= vocabulary else section | {"vocab_size": vocabulary}


def _decoder_config(name: Any) -> Any:
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known = did_you_mean(str(name), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise UserError(f"model.architecture: transformers has no decoder {name!r}{known}")
    return CONFIG_MAPPING[name]


def _plain(hint: Any) -> Any:
    """What can be checked of a field here; of transformers' own kinds of values its config checks the rest."""
    return hint if all(part in PLAIN or typing.get_origin(part) in (list, dict) for part in parts(hint)) else Any


def build_model(config: PreTrainedConfig) -> PreTrainedModel:
    """With fresh weights."""
    try:
        return language_class(config).from_config(config)
    except ValueError as error:  # a shape that its modules refuse
        raise UserError(f"model: {first_line(error)}") from None


def compile_blocks(model: PreTrainedModel, *, with_kernels: bool = False) -> None:
    """Compile in place what runs again and again; blocks of one shape share one graph."""
    if kind_of(model).ours:
        model.base_model.compile_blocks(with_kernels=with_kernels)
        return
    for block in distinct_blocks(model):
        block.compile()
