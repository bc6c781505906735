"""LLM-Pruner's recovery: matrices of rank 8 beside the frozen ones learn, and are added to them in the end. Needs peft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from pnn.errors import UserError

RANK, ALPHA = 8, 16  # as published


@contextmanager
def low_rank(model: PreTrainedModel) -> Iterator[None]:
    """Inside, this model has adapters at every matrix of its layers, and nothing else learns; behind, they are merged and the
    model is of its own class with its own parameters again."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer
    except ImportError:
        raise UserError("the lesson lora needs peft: pip install peft, or leave it out with --lessons") from None
    learnt = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear"), model)
    try:
        yield
    finally:
        for name, module in list(model.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge()
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, module.get_base_layer())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(learnt[name])
