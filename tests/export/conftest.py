"""Checkpoints of every architecture and head, tiny, with weights at random."""

from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch

from pnn.data.tokenizers import trained_on
from pnn.models import (
    BertBaselineConfig,
    BertBaselineForMaskedLM,
    BertBaselineForMultipleChoice,
    DDLConfig,
    DDLForCausalLM,
    PNNCausalConfig,
    PNNConfig,
    PNNForCausalLM,
    PNNForMaskedLM,
    PNNForSequenceClassification,
)

SIZE = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 40}
WIDE = SIZE | {"initializer_range": 0.2}  # so that logits differ between tokens
DDL = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 40}
MODELS = {
    "pnn": lambda: PNNForMaskedLM(PNNConfig(**WIDE, zero_init=False, num_steps=3)),
    "pnn_delta": lambda: PNNForMaskedLM(
        PNNConfig(**WIDE, update="delta", schedule=[0, 1], head_transform=True, zero_init=False)
    ),
    "pnn_rewrite": lambda: PNNForMaskedLM(
        PNNConfig(
            **WIDE,
            update="rewrite",
            schedule=[0, 1, 0, 1],
            shared_attention=True,
            positions="rotary",
            tie_word_embeddings=True,
            head_transform=True,
            zero_init=False,
        )
    ),
    "pnn_halting": lambda: PNNForMaskedLM(
        PNNConfig(**WIDE, update="rewrite", zero_init=False, num_steps=3, halt={"criterion": "change", "threshold": 0.6})
    ),
    "pnn_recall": lambda: PNNForMaskedLM(PNNConfig(**WIDE, update="rewrite", zero_init=False, num_steps=3, recall=True)),
    "pnn_learned_recall": lambda: PNNForMaskedLM(PNNConfig(**WIDE, zero_init=False, num_steps=3, recall="learned")),
    "pnn_guess": lambda: PNNForMaskedLM(PNNConfig(**WIDE, zero_init=False, num_steps=3, guess_after=[1, 2], mask_token_id=4)),
    "pnn_classifier": lambda: PNNForSequenceClassification(PNNConfig(**WIDE, zero_init=False, num_steps=2, num_labels=3)),
    "bert": lambda: BertBaselineForMaskedLM(BertBaselineConfig(**WIDE, num_hidden_layers=2, tie_word_embeddings=True)),
    "bert_choice": lambda: BertBaselineForMultipleChoice(BertBaselineConfig(**WIDE, num_hidden_layers=2)),
    "pnn_causal": lambda: PNNForCausalLM(
        PNNCausalConfig(**WIDE, update="rewrite", schedule=[0, 1, 0], head_transform=True, zero_init=False)
    ),
    "ddl": lambda: DDLForCausalLM(DDLConfig(**DDL, num_hidden_layers=2)),
    "ddl_token": lambda: DDLForCausalLM(DDLConfig(**DDL, num_hidden_layers=1, compressor="token", reading="paper")),
    "ddl_additive": lambda: DDLForCausalLM(DDLConfig(**DDL, num_hidden_layers=1, residual="additive", value_channels=1)),
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    tokenizer = trained_on(["the red fox sat on the old mat and the hen slept"] * 20, vocab_size=60, max_length=40)
    torch.manual_seed(0)
    folders = {}
    for name, make in MODELS.items():
        folders[name] = tmp_path_factory.mktemp("checkpoints") / name
        make().save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture(autouse=True, scope="session")
def _operators_looked_up_once():
    """Of what torch can write as ONNX it makes the same list for every graph: a seventh of a tiny graph's time."""
    registration = import_module("torch.onnx._internal.exporter._registration")
    if not hasattr(getattr(registration, "ONNXRegistry", None), "from_torchlib"):  # another version of torch
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        once = cache(registration.ONNXRegistry.from_torchlib)
        patch.setattr(registration.ONNXRegistry, "from_torchlib", staticmethod(once))
        yield
