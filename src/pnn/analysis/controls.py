"""What an effect has to beat: a model that never learnt, labels that belong to other tokens."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor

from pnn.data.masking import hash_of
from pnn.models.base import MaskedLMBase
from pnn.models.ddl import DDLForCausalLM

SEED = 0
Model = TypeVar("Model", MaskedLMBase, DDLForCausalLM)


def untrained(model: Model) -> Model:
    """The same architecture with weights drawn anew, on the same device. Zero init is left out: a model that does not move at
    all would be no control for what moving looks like."""
    config = copy.deepcopy(model.config)
    if getattr(config, "zero_init", False):
        config.zero_init = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        fresh = type(model)(config)
    return fresh.to(model.device).eval()


def generator(*key: int) -> torch.Generator:
    """On the CPU, the same on every machine; `key` tells draws apart."""
    return torch.Generator().manual_seed(hash_of(SEED, *key))


def shuffled(x: Tensor, *key: int) -> Tensor:
    """The rows of x in another order."""
    return x[torch.randperm(len(x), generator=generator(len(x), *key)).to(x.device)]
