"""models/fused where Triton is not installed: decoders compute as transformers has them."""

import sys

import pytest
import torch
import transformers as hf

from pnn.models.fused import FAMILIES, fused

SIZE = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}


@pytest.mark.parametrize("family", FAMILIES)
def test_without_triton_the_plain_twins_compute(family, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith("pnn.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    monkeypatch.delattr("pnn.kernels.llama", raising=False)
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForCausalLM")(getattr(hf, f"{family}Config")(**SIZE, num_hidden_layers=2))
    rows = torch.randint(50, (2, 7))
    plain = model(rows, labels=rows)
    with fused(model):
        same = model(rows, labels=rows)
        same.loss.backward()
    assert torch.equal(same.logits, plain.logits)
    assert all(parameter.grad is not None for parameter in model.parameters())
