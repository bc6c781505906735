"""Small versions of every decoder of ours, Deep Delta and causal PNN, with weights shaken away from their start."""

from __future__ import annotations

import pytest
import torch
from small_models import PUBLISHED

import pnn

SMALL = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 40}
DEEP_DELTA = {
    "additive": {"residual": "additive", "value_channels": 1},
    "scalar": {"value_channels": 1},
    "token, repeated": {"compressor": "token", "expand_input": False},
    "token": {"compressor": "token"},
    "channel, repeated": {"expand_input": False},
    "channel": {},
    "write only": {"residual": "write_only"},
    "write only, scalar": {"residual": "write_only", "value_channels": 1},
    "additive, expanded": {"residual": "additive"},
    "additive, token": {"residual": "additive", "compressor": "token"},
    "paper": {"reading": "paper"},
    "paper, token": {"reading": "paper", "compressor": "token"},
    "two rounds": {"num_rounds": 2, "compressor": "token"},
    "long kernels": {"compressor": "token", "compressor_kernel_size": 7, "expansion_kernel_size": 6, "value_channels": 3},
}
CAUSAL_PNN = {
    "PNN": {"num_steps": 3},
    "PNN, published": PUBLISHED | {"num_steps": 2, "tie_word_embeddings": False},
    "PNN, rewrite": {
        "update": "rewrite",
        "schedule": [0, 1, 0, 1],
        "step_weights": [0.0, 0.3, 0.0, 0.7],
        "head_transform": True,
    },
    "PNN, delta": {"update": "delta", "num_steps": 2, "ffn": "geglu"},
    # 0 1 1 1 2: a cache of five steps, three of them of one refiner
    "PNN, repeat": {"update": "rewrite", "schedule": [0, 1, 2], "repeat": [1, 2], "num_steps": 5},
}
every_decoder = pytest.mark.parametrize("name", [*DEEP_DELTA, *CAUSAL_PNN])
every_deep_delta = pytest.mark.parametrize("name", DEEP_DELTA)
every_causal_pnn = pytest.mark.parametrize("name", CAUSAL_PNN)


def config_of(name, **more):
    if name in DEEP_DELTA:
        return pnn.DDLConfig(**(SMALL | {"num_hidden_layers": 2} | DEEP_DELTA[name] | more))
    return pnn.PNNCausalConfig(**(SMALL | {"intermediate_size": 32} | CAUSAL_PNN[name] | more))


def build(name, **more):
    torch.manual_seed(0)
    model = (pnn.DDLForCausalLM if name in DEEP_DELTA else pnn.PNNForCausalLM)(config_of(name, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def tokens(rows, length, seed=0):
    return torch.randint(0, SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))
