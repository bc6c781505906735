"""Whether what an update holds can fit on the device, before anything is allocated, and which shipped config would."""

from __future__ import annotations

from transformers import PreTrainedConfig

from pnn.config import RunConfig, load_config, shipped_configs
from pnn.memory import bytes_of_weights, check_fits
from pnn.models.sections import build_model, model_config

COPIES = 3  # of the weights, at least: themselves, gradients, an average of the optimiser


def check_update_fits(config: RunConfig, section: PreTrainedConfig, batch_tokens: int, device: str) -> None:
    """Weights, gradients, the optimiser's averages, and a state of every token."""

    def instead(has: int) -> str:
        fitting = {
            needed: name
            for name, shipped in ((name, load_config(name)) for name in shipped_configs() if not name.startswith("ablation_"))
            if _alike(config, shipped) and (needed := _needed(model_config(shipped.model), batch_tokens)) <= has
        }
        if not fitting:
            return "take a smaller model or batch"
        largest = max(fitting)
        return f"{fitting[largest]} would fit ({largest / 1e9:,.1f} GB), or a smaller batch"

    check_fits(
        lambda: build_model(section), config.name, device, COPIES, _state_of_every_token(section, batch_tokens), instead=instead
    )


def _alike(config: RunConfig, shipped: RunConfig) -> bool:
    return config.kind == shipped.kind and config.model.get("architecture") == shipped.model.get("architecture")


def _needed(section: PreTrainedConfig, batch_tokens: int) -> int:
    return COPIES * bytes_of_weights(lambda: build_model(section)) + _state_of_every_token(section, batch_tokens)


def _state_of_every_token(section: PreTrainedConfig, batch_tokens: int) -> int:
    return batch_tokens * getattr(section, "hidden_size", 1) * 4
