"""Small versions of every masked model: PNN in its published variants and others, and the BERT baseline. Weights are shaken
away from their start, where a zero-initialised refiner would make most checks empty."""

from __future__ import annotations

import pytest
import torch

import pnn

SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 12,
    "dropout": 0.0,
}
PUBLISHED = {"delta_norm": True, "gate_bias": True, "zero_init": False}
NARROW = {  # gates without matrices, a table of tokens that is half as wide
    "update": "rewrite",
    "gate": "diagonal",
    "embedding_size": 8,
    "tie_word_embeddings": True,
    "head_transform": True,
    "positions": "rotary",
}
TURNS = {"schedule": [0, 1, 0, 1]}
CONFIGS = {
    "pnn_equations": lambda **more: pnn.PNNConfig(**SMALL, **more),
    "pnn_published": lambda **more: pnn.PNNConfig(**SMALL, **PUBLISHED, **more),
    "pnn_no_gate": lambda **more: pnn.PNNConfig(**SMALL, gate="none", **more),
    "pnn_delta": lambda **more: pnn.PNNConfig(**SMALL, update="delta", **more),
    "pnn_schedule": lambda **more: pnn.PNNConfig(**SMALL, **TURNS | more),
    "pnn_tied": lambda **more: pnn.PNNConfig(**SMALL, tie_word_embeddings=True, head_transform=True, **more),
    "pnn_narrow": lambda **more: pnn.PNNConfig(**SMALL, **NARROW, **more),
    "pnn_one_attention": lambda **more: pnn.PNNConfig(**SMALL, shared_attention=True, **TURNS | more),
    "bert": lambda **more: pnn.BertBaselineConfig(**SMALL, num_hidden_layers=3, **more),
}
WITH_GATE = {"pnn_equations", "pnn_published", "pnn_schedule", "pnn_tied", "pnn_narrow", "pnn_one_attention"}
PNN_NAMES = [name for name in CONFIGS if name != "bert"]
LENGTHS = (5, 12, 1, 7)

every_model = pytest.mark.parametrize("name", CONFIGS)
every_pnn = pytest.mark.parametrize("name", PNN_NAMES)


def masked_lm(config):
    return pnn.BertBaselineForMaskedLM(config) if isinstance(config, pnn.BertBaselineConfig) else pnn.PNNForMaskedLM(config)


@torch.no_grad()
def shake(model, seed=0):
    """Add noise to every parameter, so that nothing is at its start any more."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def build(name, **more):
    torch.manual_seed(0)
    return shake(masked_lm(CONFIGS[name](**more)))


def some_batch(lengths=LENGTHS, seed=1):
    """The same sequences padded on the right (padding holds random tokens, which nothing may read) and packed."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, SMALL["vocab_size"], (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ids, mask, ids[mask.bool()][None], borders


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())
