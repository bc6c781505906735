"""A reorganised model: the original class with other matrices, under a `model_type` of its own.

`prune` and `grow` give an instance of the model's own class (a pruned GPT2LMHeadModel is one), so whatever takes the original
takes it too. Its config is the original's with one entry more, `head_map`. On disk that would not do: no class of transformers
builds layers with different numbers of heads, and loading would fail over the shapes. So config.json says

    {"model_type": "pnn_plastic", "head_map": [[0, 2], …], "original_class": "GPT2LMHeadModel",
     "original": {"model_type": "gpt2", …}}

and after `import pnn` the Auto classes find their way from there: build the original, cut its matrices to the map, read the
weights. `save_pretrained` writes this too, so HF `Trainer` and our own loop leave checkpoints that load again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pnn.errors import UserError, first_line
from pnn.files import is_taken, new_folder, sha256, write_json
from pnn.models.sections import LOADING_ERRORS, load_model
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.heads import rearrange
from pnn.runs import verify_checkpoint

OF_ANY_CONFIG = ("dtype", "torch_dtype", "name_or_path")  # what `from_pretrained` says to a config of any kind


class PlasticConfig(PreTrainedConfig):
    """What config.json holds. A model's own `config` is that of its original."""

    model_type = "pnn_plastic"

    def __init__(
        self,
        original: dict[str, Any] | None = None,
        original_class: str = "",
        head_map: list[list[int]] | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.original = original or {}
        self.original_class = original_class
        self.head_map = head_map or []

    @classmethod
    def of(cls, config: PreTrainedConfig, original_class: str) -> PlasticConfig:
        """The other way round: from a reorganised model's own config to what is written."""
        original = config.to_diff_dict()
        new_map = original.pop("head_map")
        original["architectures"] = [original_class]
        return cls(original, original_class, new_map, dtype=original.get("dtype"))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """What a caller of `from_pretrained` sets (num_labels, pad_token_id, …) is meant for the original."""
        original = dict(config_dict.get("original") or {})
        if original.get("model_type") in CONFIG_MAPPING:
            known = AutoConfig.for_model(**original)
            meant = {key: value for key, value in kwargs.items() if hasattr(known, key) and key not in OF_ANY_CONFIG}
            if meant:
                config_dict = config_dict | {"original": type(known).from_dict(original, **meant).to_diff_dict()}
                common = PreTrainedConfig()  # what every config has stays said to this one too, which tells of it
                kwargs = {key: value for key, value in kwargs.items() if key not in meant or hasattr(common, key)}
        return super().from_dict(config_dict, **kwargs)

    def original_config(self) -> PreTrainedConfig:
        """The original's config, with the head map and with what a caller of `from_pretrained` has set."""
        values = dict(self.original)
        try:
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        except KeyError as error:
            raise ValueError(f"a reorganised model without its original's config ({error})") from None
        config.head_map = self.head_map
        if self.dtype is not None:
            config.dtype = self.dtype
        return config


class Plastic:
    """Added to the original's class: builds the reorganised shape, and saves under the reorganised model's type."""

    original_class: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        new_map = config.head_map
        config.head_map = None  # so long as the model is as its original's constructor makes it
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        rearrange(self, new_map)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        if kwargs.get("push_to_hub"):  # it would send the original's config before this one is written
            raise UserError("save a reorganised model first and call its push_to_hub() then")
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_main_process", True):
            config = PlasticConfig.of(self.config, self.original_class.__name__)  # type: ignore[attr-defined]
            config.architectures = [type(self).__name__]
            config.save_pretrained(save_directory)


class _Entry(PreTrainedModel):
    """What the Auto classes know for a `PlasticConfig`: leads on to the class of the original."""

    config_class = PlasticConfig
    auto: ClassVar[Any]  # the Auto class that loads the original

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, config: PlasticConfig | None = None, **kwargs: Any) -> Any:
        if config is None:
            config = PlasticConfig.from_pretrained(name)
        if config._attn_implementation is not None:  # said to `from_pretrained`, it has come with the config
            kwargs.setdefault("attn_implementation", config._attn_implementation)
        return cls._class_for(config).from_pretrained(name, *args, config=config.original_config(), **kwargs)

    @classmethod
    def _from_config(cls, config: PlasticConfig, **kwargs: Any) -> Any:
        return cls._class_for(config)._from_config(config.original_config(), **kwargs)

    @classmethod
    def _class_for(cls, config: PlasticConfig) -> Any:
        original = type(config.original_config())
        known = {one.__name__: one for one in _classes(cls.auto, original)}
        everywhere = {one.__name__ for entry in ENTRIES for one in _classes(entry.auto, original)}
        if not known or config.original_class not in everywhere:
            raise ValueError(f"a reorganised {config.original_class} is nothing for {cls.auto.__name__}")
        # where it has another head, the layers are taken and the head is new, as transformers does it
        return plastic_class(known.get(config.original_class) or next(iter(known.values())))


class PlasticModel(_Entry):
    auto = AutoModel


class PlasticForCausalLM(_Entry):
    auto = AutoModelForCausalLM


class PlasticForMaskedLM(_Entry):
    auto = AutoModelForMaskedLM


class PlasticForSequenceClassification(_Entry):
    auto = AutoModelForSequenceClassification


class PlasticForMultipleChoice(_Entry):
    auto = AutoModelForMultipleChoice


ENTRIES: tuple[type[_Entry], ...] = (
    PlasticForCausalLM,
    PlasticForMaskedLM,
    PlasticForSequenceClassification,
    PlasticForMultipleChoice,
    PlasticModel,
)
AutoConfig.register(PlasticConfig.model_type, PlasticConfig, exist_ok=True)
for _entry in ENTRIES:
    _entry.auto.register(PlasticConfig, _entry, exist_ok=True)


def _classes(auto: Any, config_class: type[PreTrainedConfig]) -> tuple[type[PreTrainedModel], ...]:
    """What an Auto class would build for this config."""
    if config_class not in auto._model_mapping:
        return ()
    known = auto._model_mapping[config_class]
    return known if isinstance(known, tuple) else (known,)


_MADE: dict[Any, type[PreTrainedModel]] = {}


def plastic_class(original: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The original's class, made able to build and save other numbers of heads; one for each original."""
    if original in _MADE:
        return _MADE[original]
    entry = next((one for one in ENTRIES if original in _classes(one.auto, original.config_class)), None)
    if entry is None:
        kinds = ", ".join(one.auto.__name__ for one in ENTRIES)
        raise UserError(f"a reorganised {original.__name__} could not be loaded again: no class of {kinds}")
    # transformers looks into a class's module to see what its attention can do: that is the original's
    body = {"original_class": original, "__module__": original.__module__, "__doc__": original.__doc__}
    _MADE[original] = type(entry.__name__, (Plastic, original), body)
    return _MADE[original]


def as_plastic(model: PreTrainedModel) -> PreTrainedModel:
    """Make this very model one that saves as reorganised. Its class stays a subclass of the original's."""
    if not isinstance(model, Plastic):
        model.__class__ = plastic_class(type(model))
    return model


HISTORY = "plasticity.json"  # beside a model that came from `pnn plasticity prune` or `grow`: from which, and what was done


def save(model: PreTrainedModel, path: str | Path, tokenizer: Any = None, history: dict[str, Any] | None = None) -> None:
    """Write a model to a new folder, with checksums, whole or not at all: reorganised or not, it loads with `load`, and in
    transformers' Auto classes after `import pnn`. `tokenizer` goes into the same folder, and `history` as plasticity.json."""
    architecture_of(model)
    folder = Path(path)
    if is_taken(folder):
        raise UserError(f"{folder} exists already: choose another folder or remove it")
    try:
        with new_folder(folder) as partial:
            model.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            if history is not None:
                write_json(partial / HISTORY, history)
            write_json(partial / "checksums.json", {p.name: sha256(p) for p in sorted(partial.iterdir())})
    except (OSError, SafetensorError) as error:
        raise UserError(f"could not write the model to {folder}: {error}") from error


def load(path: str | Path) -> PreTrainedModel:
    """A model from a folder that `save` or `save_pretrained` wrote, or a plain one by its folder or hub name: a language model,
    or for a reorganised one whatever it was. Reads safetensors only; files are compared with their checksums first."""
    folder = Path(path)
    if folder.is_dir():
        verify_checkpoint(folder)
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except LOADING_ERRORS as error:
        raise UserError(f"{path}: cannot load a model ({first_line(error)})") from error
    entry = next((one for one in ENTRIES if one.__name__ in (config.architectures or [])), None)
    model = load_model(path) if entry in (None, PlasticForCausalLM, PlasticForMaskedLM) else _load_other(path, entry)
    architecture_of(model)
    return model.eval()


def _load_other(path: str | Path, entry: Any) -> PreTrainedModel:
    try:
        return entry.auto.from_pretrained(str(path), use_safetensors=True, trust_remote_code=False)
    except LOADING_ERRORS as error:
        raise UserError(f"{path}: cannot load a model ({first_line(error)})") from error
