"""Where bf16 is faster than fp32, and how a model is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

NARROW = 128  # below, converting numbers may take longer than multiplying them in 16 bit saves


def gpu_has_bf16(device: torch.device | str) -> bool:
    """Whether `device` is a GPU whose matrix units compute in bf16. Older ones emulate it, slowly."""
    return torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def predicts_in(device: torch.device | str) -> torch.dtype:
    """fp32 on every CPU: one sentence takes as long as its weights take to be read, and autocast would copy them first."""
    return torch.bfloat16 if gpu_has_bf16(device) else torch.float32


def width_of(config: PreTrainedConfig) -> int:
    """Of the states, in the part that reads text; 0 where a config does not tell."""
    return int(getattr(config.get_text_config(), "hidden_size", 0))


def learns_in(device: torch.device | str, width: int) -> torch.dtype:
    """`width`: of the model's states. With instructions for bf16 a CPU needs 0.30 of fp32's time for an update of a PNN of
    width 768 and 0.48 at width 128, 0.28 to 0.35 to fine-tune models/pnn-base, 0.34 for SmolLM2-135M and 0.57 for a GPT-2 of
    width 128 (`benchmarks/learning_precision.py`). At width 64 it hangs on the vocabulary and on how many heads there are."""
    if torch.device(device).type != "cpu":
        return predicts_in(device)
    if width < NARROW:
        return torch.float32
    can: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 does not say
    return torch.bfloat16 if can.get("avx512_bf16") or can.get("amx_bf16") else torch.float32


@contextmanager
def undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout; afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def predicting(model: PreTrainedModel, precision: torch.dtype) -> Iterator[None]:
    """Undisturbed, in this precision."""
    with undisturbed(model), torch.autocast(model.device.type, precision, enabled=precision != torch.float32):
        yield
