"""What config.json says of a reorganised model: what each layer has left, and what the model was before.

    {"model_type": "pnn_plastic", "head_map": [[0, 2], …], "neuron_map": ["0-63 66 70-127", …], "gone_layers": [5],
     "width_map": "0-255", "original_class": "LlamaForCausalLM", "original": {"model_type": "llama", …}}

There is no `neuron_map` where all neurons are there, no `gone_layers` where all layers are, and no `width_map` where the width
is whole. A model's own config has the same entries, with neurons and dimensions as lists of numbers.

`plasticity/models.py` builds the model from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CHANGES = ("head_map", "neuron_map", "gone_layers", "width_map")  # what a reorganised model's config has beyond its original's
OF_ANY_CONFIG = ("dtype", "torch_dtype", "name_or_path")  # what `from_pretrained` says to a config of any kind


class PlasticConfig(PreTrainedConfig):
    """What config.json holds. A model's own `config` is that of its original."""

    model_type = "pnn_plastic"

    def __init__(
        self,
        original: dict[str, Any] | None = None,
        original_class: str = "",
        head_map: list[list[int]] | None = None,
        neuron_map: list[str] | None = None,
        gone_layers: list[int] | None = None,
        width_map: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.original = original or {}
        self.original_class = original_class
        self.head_map = head_map or []
        self.neuron_map = neuron_map
        self.gone_layers = gone_layers
        self.width_map = width_map

    @classmethod
    def of(cls, config: PreTrainedConfig, original_class: str) -> PlasticConfig:
        """The other way round: from a reorganised model's own config to what is written."""
        original = config.to_diff_dict()
        changes = {name: original.pop(name, None) for name in CHANGES}
        if changes["neuron_map"] is not None:
            changes["neuron_map"] = [as_ranges(row) for row in changes["neuron_map"]]
        if changes["width_map"] is not None:
            changes["width_map"] = as_ranges(changes["width_map"])
        original["architectures"] = [original_class]
        return cls(original, original_class, **changes, dtype=original.get("dtype"))

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
        """The original's config, with what was changed and with what a caller of `from_pretrained` has set."""
        values = dict(self.original)
        try:
            config = AutoConfig.for_model(values.pop("model_type"), **values)
        except KeyError as error:
            raise ValueError(f"a reorganised model without its original's config ({error})") from None
        if not all(isinstance(index, int) and index >= 0 for row in self.head_map for index in row):
            raise ValueError("a head_map that is no list of heads for each layer")
        config.head_map = self.head_map
        config.neuron_map = None if self.neuron_map is None else [of_ranges(row) for row in self.neuron_map]
        config.gone_layers = self.gone_layers
        config.width_map = None if self.width_map is None else of_ranges(self.width_map)
        if self.dtype is not None:
            config.dtype = self.dtype
        return config


def as_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, written short: 0, 1, 2, 5 as "0-2 5"."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def of_ranges(text: str) -> list[int]:
    """The other way round."""
    ends = [[int(end) for end in part.split("-")] for part in text.split()]
    return [number for pair in ends for number in range(pair[0], pair[-1] + 1)]
