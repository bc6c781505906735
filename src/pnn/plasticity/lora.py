"""Learning by LoRA (Hu et al., 2021): beside each frozen matrix W of attention and of feed-forward parts learns a product

    W x + (α / r) · B A x,    A of shape (r, in), random at first; B of shape (out, r), zero at first; α = 2 r

and in the end W ← W + (α / r) · B A, so that nothing of it is left. Rank 8 is LLM-Pruner's recovery. Needs peft.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.plasticity.architectures import HEAD, NEURON, architecture_of


def check_rank(rank: int) -> None:
    if rank < 1:
        raise UserError(f"LoRA of rank {rank}: expected 1 or more")
    if importlib.util.find_spec("peft") is None:
        raise UserError("LoRA needs peft: pip install peft")


@contextmanager
def low_rank(model: PreTrainedModel, rank: int, seed: int = 0) -> Iterator[None]:
    """Inside, this model has adapters at its layers' matrices, and nothing else learns; behind, they are merged and the model
    is of its own class with its own parameters again."""
    check_rank(rank)
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    learnt = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=_matrices(model))
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that GPT-2's matrices are transposed: it sees that itself
        torch.manual_seed(seed)  # adapters begin at random
        inject_adapter_in_model(config, model)
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
        vars(model).pop("peft_config", None)


def _matrices(model: PreTrainedModel) -> list[str]:
    """The names of those that heads and neurons lie in, but for empty ones, of layers that are gone."""
    architecture = architecture_of(model)
    parts = [
        part for block in architecture.blocks(model) for kind in (HEAD, NEURON) for part in architecture.parts(kind, block)
    ]
    wanted = {id(part.module) for part in parts if part.weight.numel()}
    return [name for name, module in model.named_modules() if id(module) in wanted]
