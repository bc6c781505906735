"""What config.json says of a reorganised model: how many heads each layer has left, and what the model was before.

    {"model_type": "pnn_plastic", "head_map": [[0, 2], …], "original_class": "GPT2LMHeadModel",
     "original": {"model_type": "gpt2", …}}

`plasticity/models.py` builds the model from it.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
