"""From the `model` section of a run's config, or from a checkpoint folder, to a model.

`type` is one of ours, or `transformers`: then `architecture` is transformers' own name of a decoder (gpt2, opt, llama …), which
starts from fresh weights and has the fields of its own config.
"""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pnn.config import check_keys, typed
from pnn.errors import UserError, did_you_mean, first_line
from pnn.models.bert import BertBaselineConfig, BertBaselineForMaskedLM
from pnn.models.ddl import DDLConfig, DDLForCausalLM
from pnn.models.pnn import PNNConfig, PNNForMaskedLM

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "pnn": (PNNConfig, PNNForMaskedLM),
    "bert": (BertBaselineConfig, BertBaselineForMaskedLM),
    "ddl": (DDLConfig, DDLForCausalLM),
}


# What from_pretrained raises over files that are not there, damaged, or of something else
LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError)
CLASSIFIERS = ("ForSequenceClassification", "ForMultipleChoice")  # what fine-tuning leaves
TRANSFORMERS = "transformers"  # the type whose architectures are not ours
PLAIN = (bool, int, float, str, type(None))  # what a YAML file can say


def model_config(section: dict[str, Any], vocab_size: int | None = None, **defaults: Any) -> PreTrainedConfig:
    """The Hugging Face config of a `model` section. The vocabulary's size comes from the tokenizer unless given."""
    section = dict(section)
    config_class = _config_class(section)
    hints = inspect.get_annotations(config_class, eval_str=True)  # the architecture's own fields, not the base class's
    check_keys(section, hints, "model")
    values = {key: typed(value, _plain(hints[key]), f"model.{key}") for key, value in section.items()}
    if vocab_size is not None:
        given = values.setdefault("vocab_size", vocab_size)
        if given < vocab_size:
            raise UserError(f"model.vocab_size: {given}, but the tokenizer has {vocab_size} entries")
    own_names = {config_class.attribute_map.get(key, key): value for key, value in defaults.items()}
    try:
        return config_class(**(own_names | values))
    except (StrictDataclassError, ValueError) as error:
        reason = error.__cause__ if error.__cause__ is not None else error
        raise UserError(f"model: {reason}") from None


def _config_class(section: dict[str, Any]) -> Any:
    """Takes the keys that name the architecture out of the section."""
    kind = section.pop("type", "pnn")
    if kind in ARCHITECTURES:
        return ARCHITECTURES[kind][0]
    if kind != TRANSFORMERS:
        raise UserError(f"model.type: no architecture {kind!r}{did_you_mean(str(kind), [*ARCHITECTURES, TRANSFORMERS])}")
    name = section.pop("architecture", None)
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known = did_you_mean(str(name), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise UserError(f"model.architecture: transformers has no decoder {name!r}{known}")
    return CONFIG_MAPPING[name]


def _plain(hint: Any) -> Any:
    """What can be checked of a field here; of transformers' own kinds of values its config checks the rest."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return hint if all(part in PLAIN or typing.get_origin(part) in (list, dict) for part in parts) else Any


def build_model(config: PreTrainedConfig) -> PreTrainedModel:
    """With fresh weights."""
    for config_class, model_class in ARCHITECTURES.values():
        if isinstance(config, config_class):
            return model_class(config)
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            return AutoModelForCausalLM.from_config(config)
        except ValueError as error:  # a shape that its modules refuse
            raise UserError(f"model: {error}") from None
    raise UserError(f"no language model for a {type(config).__name__}")


def is_ours(model: PreTrainedModel) -> bool:
    """Ours know how to compile themselves and how to leave out logits that nobody reads."""
    return isinstance(model.config, tuple(config_class for config_class, _ in ARCHITECTURES.values()))


def compile_blocks(model: PreTrainedModel, *, with_kernels: bool = False) -> None:
    """Compile in place what runs again and again; blocks of one shape share one graph."""
    if is_ours(model):
        model.base_model.compile_blocks(with_kernels=with_kernels)
        return
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    for block in max(lists, key=len, default=()):
        block.compile()


def load_model(name: str | Path) -> PreTrainedModel:
    """A masked or causal language model from a checkpoint folder or hub name, whichever its config.json says. Reads safetensors
    only, and every weight must be there: a missing one would silently stay random."""
    kind = ""  # not known before its config is read
    try:
        config = AutoConfig.from_pretrained(str(name), trust_remote_code=False)
        causal = any(architecture.endswith(("ForCausalLM", "LMHeadModel")) for architecture in config.architectures or [])
        kind = "causal " if causal else "masked "
        other = next((one for one in config.architectures or [] if one.endswith(CLASSIFIERS)), None)
        if other is not None:  # its layers would load, and only the missing head be told of
            raise ValueError(f"its config.json names a {other}")
        model, info = (AutoModelForCausalLM if causal else AutoModelForMaskedLM).from_pretrained(
            str(name), use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except LOADING_ERRORS as error:
        raise UserError(f"{name}: cannot load a {kind}language model ({first_line(error)})") from error
    wrong = {what: sorted(info[what]) for what in ("missing_keys", "mismatched_keys") if info.get(what)}
    if wrong:
        what, keys = next(iter(wrong.items()))
        raise UserError(
            f"{name}: the weights are not those of the architecture in config.json ({len(keys)} {what.replace('_', ' ')}, "
            f"first {keys[0]})"
        )
    return model
