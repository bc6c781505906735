"""A reorganised model: the original class with other matrices, under a `model_type` of its own.

`prune` and `grow` give an instance of the model's own class (a pruned GPT2LMHeadModel is one), so whatever takes the original
takes it too. Its config is the original's with up to four entries more, `head_map`, `neuron_map`, `gone_layers` and
`width_map`. On disk that would not do: no class of transformers builds layers with different numbers of heads, and loading
would fail over the shapes. So config.json is that of `models/plastic.py`, and after `import pnn` the Auto classes find their
way from there: build the original, cut its matrices to the maps, read the weights. `save_pretrained` writes it too, so HF
`Trainer` and our own loop leave checkpoints that load again. What was removed shows in the time it takes: see
`models/recorded`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel

from pnn.errors import UserError
from pnn.files import is_taken, new_folder, write_checksums, write_json
from pnn.models.loading import load_as_named, save_tokenizer
from pnn.models.plastic import CHANGES, PlasticConfig
from pnn.models.recorded import quicken
from pnn.models.registry import AUTO_CLASSES, classes_of, register
from pnn.plasticity.architectures import HEAD, LAYER, NEURON, WIDTH, architecture_of
from pnn.plasticity.units import rearrange, unit_map


class Plastic:
    """Added to the original's class: builds the reorganised shape, and saves under the reorganised model's type."""

    original_class: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        changes = {name: getattr(config, name, None) for name in CHANGES}
        for name in CHANGES:  # so long as the model is as its original's constructor makes it
            setattr(config, name, None)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        maps: dict[str, Any] = {HEAD: changes["head_map"]}
        if changes["neuron_map"] is not None:
            maps[NEURON] = changes["neuron_map"]
        if changes["gone_layers"]:
            maps[LAYER] = [[] if layer in changes["gone_layers"] else row for layer, row in enumerate(unit_map(self, LAYER))]
        if changes["width_map"] is not None:
            maps[WIDTH] = [changes["width_map"]]
        rearrange(self, maps)
        quicken(self)

    def __reduce__(self) -> Any:
        """Its class is made at run time: a pickle names the original instead."""
        return _of_plastic_class, (self.original_class,), self.__dict__

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        if kwargs.get("push_to_hub"):  # it would send the original's config before this one is written
            raise UserError("save a reorganised model first, then call its push_to_hub()")
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
        known = {one.__name__: one for one in classes_of(cls.auto, original)}
        everywhere = {one.__name__ for auto in AUTO_CLASSES for one in classes_of(auto, original)}
        if not known or config.original_class not in everywhere:
            raise ValueError(f"a reorganised {config.original_class} is nothing for {cls.auto.__name__}")
        # where it has another head, the layers are taken and the head is new, as transformers does it
        return plastic_class(known.get(config.original_class) or next(iter(known.values())))


# PlasticForMaskedLM, PlasticForCausalLM, …, PlasticModel
ENTRIES: dict[Any, type[_Entry]] = {
    auto: type(f"Plastic{auto.__name__.removeprefix('AutoModel') or 'Model'}", (_Entry,), {"auto": auto})
    for auto in AUTO_CLASSES
}
register(PlasticConfig, ENTRIES)

_MADE: dict[Any, type[PreTrainedModel]] = {}


def plastic_class(original: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The original's class, made able to build and save other numbers of heads; one for each original."""
    if original in _MADE:
        return _MADE[original]
    entry = next((one for auto, one in ENTRIES.items() if original in classes_of(auto, original.config_class)), None)
    if entry is None:
        known = ", ".join(auto.__name__ for auto in AUTO_CLASSES)
        raise UserError(f"a reorganised {original.__name__} could not be loaded again: no class of {known}")
    # transformers looks into a class's module to see what its attention can do: that is the original's
    body = {"original_class": original, "__module__": original.__module__, "__doc__": original.__doc__}
    _MADE[original] = type(entry.__name__, (Plastic, original), body)
    return _MADE[original]


def _of_plastic_class(original: type[PreTrainedModel]) -> PreTrainedModel:
    made: Any = plastic_class(original)
    return made.__new__(made)


def as_plastic(model: PreTrainedModel) -> PreTrainedModel:
    """Make this very model one that saves as reorganised. Its class stays a subclass of the original's."""
    if not isinstance(model, Plastic):
        model.__class__ = plastic_class(type(model))
        quicken(model)
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
                save_tokenizer(tokenizer, model, partial)
            if history is not None:
                write_json(partial / HISTORY, history)
            write_checksums(partial)
    except (OSError, SafetensorError) as error:
        raise UserError(f"could not write the model to {folder}: {error}") from error


def load(path: str | Path) -> PreTrainedModel:
    """A model, reorganised or not, with the head that its config.json names, from a folder that `save` or `save_pretrained`
    wrote or by its hub name. Reads safetensors only; files are compared with their checksums first."""
    model = load_as_named(path)
    architecture_of(model)
    return model.eval()
