"""Small files of the official forms, and tiny encoders that know their words."""

from pathlib import Path

import pytest
import torch
from official_files import sentence, write_glue, write_superglue

from pnn.data.tokenizers import trained_on
from pnn.models import BertBaselineConfig, BertBaselineForMaskedLM, PNNConfig, PNNForMaskedLM


@pytest.fixture(scope="session")
def task_files(tmp_path_factory) -> Path:
    """Both benchmarks, every task: 24 examples to train on, 12 in dev. Copy before changing anything."""
    root = tmp_path_factory.mktemp("tasks")
    write_glue(root / "glue", 24, 12)
    write_superglue(root / "superglue", 24, 12)
    return root


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return trained_on(
        [sentence(i) for i in range(200)] + ["what was cause of this happened as result which ? : * # ."] * 5, 120, 48
    )


@pytest.fixture(scope="session")
def tiny_encoders(tmp_path_factory, tiny_tokenizer) -> dict[str, Path]:
    """Checkpoints of masked models, as pretraining leaves them."""
    torch.manual_seed(0)
    size = {
        "vocab_size": len(tiny_tokenizer),
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 48,
        "initializer_range": 0.1,
    }
    models = {
        "pnn": PNNForMaskedLM(PNNConfig(**size, num_steps=3, zero_init=False)),
        "bert": BertBaselineForMaskedLM(BertBaselineConfig(**size, num_hidden_layers=2)),
    }
    folders = {}
    for name, model in models.items():
        folders[name] = tmp_path_factory.mktemp("encoders") / name
        model.save_pretrained(folders[name])
        tiny_tokenizer.save_pretrained(folders[name])
    return folders
