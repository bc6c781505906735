"""From the `model` section of a run's config, or from a checkpoint folder, to a model."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

from pnn.config import check_keys, typed
from pnn.errors import UserError, did_you_mean
from pnn.models.bert import BertBaselineConfig, BertBaselineForMaskedLM
from pnn.models.ddl import DDLConfig, DDLForCausalLM
from pnn.models.pnn import PNNConfig, PNNForMaskedLM

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "pnn": (PNNConfig, PNNForMaskedLM),
    "bert": (BertBaselineConfig, BertBaselineForMaskedLM),
    "ddl": (DDLConfig, DDLForCausalLM),
}


def model_config(section: dict[str, Any], vocab_size: int | None = None, **defaults: Any) -> PreTrainedConfig:
    """The Hugging Face config of a `model` section. The vocabulary's size comes from the tokenizer unless given."""
    section = dict(section)
    kind = section.pop("type", "pnn")
    if kind not in ARCHITECTURES:
        raise UserError(f"model.type: no architecture {kind!r}{did_you_mean(str(kind), ARCHITECTURES)}")
    config_class, _ = ARCHITECTURES[kind]
    hints = inspect.get_annotations(config_class, eval_str=True)  # the architecture's own fields, not the base class's
    check_keys(section, hints, "model")
    values = {key: typed(value, hints[key], f"model.{key}") for key, value in section.items()}
    if vocab_size is not None:
        given = values.setdefault("vocab_size", vocab_size)
        if given < vocab_size:
            raise UserError(f"model.vocab_size: {given}, but the tokenizer has {vocab_size} entries")
    try:
        return config_class(**(defaults | values))
    except StrictDataclassError as error:
        reason = error.__cause__ if error.__cause__ is not None else error
        raise UserError(f"model: {reason}") from None


def build_model(config: PreTrainedConfig) -> PreTrainedModel:
    for config_class, model_class in ARCHITECTURES.values():
        if isinstance(config, config_class):
            return model_class(config)
    raise UserError(f"no language model for a {type(config).__name__}")


def load_model(name: str | Path) -> PreTrainedModel:
    """A masked or causal language model from a checkpoint folder or hub name, whichever its config.json says. Reads safetensors
    only, and every weight must be there: a missing one would silently stay random."""
    kind = "masked"
    try:
        config = AutoConfig.from_pretrained(str(name), trust_remote_code=False)
        causal = any(architecture.endswith(("ForCausalLM", "LMHeadModel")) for architecture in config.architectures or [])
        kind = "causal" if causal else "masked"
        model, info = (AutoModelForCausalLM if causal else AutoModelForMaskedLM).from_pretrained(
            str(name), use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{name}: cannot load a {kind} language model ({reason})") from error
    wrong = {what: sorted(info[what]) for what in ("missing_keys", "mismatched_keys") if info.get(what)}
    if wrong:
        what, keys = next(iter(wrong.items()))
        raise UserError(
            f"{name}: the weights are not those of the architecture in config.json ({len(keys)} {what.replace('_', ' ')}, "
            f"first {keys[0]})"
        )
    return model
