"""The benchmark of removed heads, at a size that says nothing about speed: what it compares is right."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pnn.bench.heads import _learning, heads_benchmark
from pnn.bench.run import check
from pnn.config import load_config
from pnn.errors import UserError
from pnn.plasticity import prune


@pytest.fixture(autouse=True)
def known_rates(monkeypatch):
    monkeypatch.setattr("pnn.bench.heads.matrix_rate", lambda device: {"flops_per_second": {"median": 1e11}})
    monkeypatch.setattr("pnn.bench.heads.copy_rate", lambda device: {"bytes_per_second": {"median": 1e10}})


@pytest.mark.parametrize("backward", [False, True])
def test_three_models_and_taylor_scores(backward):
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    result = heads_benchmark(config, 2, 16, backward=backward, device=torch.device("cpu"), seconds=0.0, read=(2, 16))
    names = [row["name"] for row in result["rows"]]
    attention = ["whole", "removed", "masked", "whole, reading", "removed, reading"]
    models = ["whole model", "removed model", "whole model, as transformers has it"]
    assert names == [*attention, *models, "forward pass over the data", "taylor scores of all heads"]
    assert result["model"] == {"layers": 2, "width": 32, "heads": 4, "removed": 4}
    assert result["largest_difference_removed_and_masked"] < 1e-5
    rows = {row["name"]: row["milliseconds"]["median"] for row in result["rows"]}
    assert result["ratios"]["half_heads_attention_speedup"] == rows["whole"] / rows["removed"]
    assert result["ratios"]["half_heads_removed_vs_masked"] == rows["masked"] / rows["removed"]
    assert result["rows"][0]["what"] == ("forward and backward" if backward else "forward")
    assert result["rows"][3]["what"] == "forward"
    assert result["ratios"]["half_heads_attention_speedup_reading"] == rows["whole, reading"] / rows["removed, reading"]
    assert result["rows"][8]["rows"] == 8
    speedup = rows["whole model"] / rows["removed model"]
    assert result["ratios"]["half_heads_model_speedup"] == speedup
    assert result["ratios"]["half_heads_model_speedup_vs_transformers"] == rows[models[2]] / rows["removed model"]
    assert 1 < result["ratios"]["half_heads_model_bound_by_flops"] < 2
    bound = result["ratios"]["half_heads_model_bound"]
    assert 1 < bound < 2
    assert result["ratios"]["half_heads_model_speedup_of_bound"] == speedup / bound


def test_updates_of_learning_are_timed():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16))
    before = model.lm_head.weight.clone()
    found = _learning(model, prune(model, [(0, 0)]), 2, 16, seconds=0.0)
    whole, removed, issued = (row["milliseconds"]["median"] for row in found["rows"])
    assert [row["turns"] for row in found["rows"]] == [3, 3, 3]
    assert found["ratios"] == {"half_heads_learning_speedup": whole / removed, "recorded_learning_speedup": issued / removed}
    assert torch.equal(model.lm_head.weight, before)


def test_a_decoder_of_transformers_has_no_row_in_pnn_bench():
    with pytest.raises(UserError, match="gpt2_tiny: transformers decoders cannot be timed here"):
        check([load_config("gpt2_tiny")], ["train"], [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_passes_are_recorded_and_stand_beside_issued_ones():
    config = GPT2Config(vocab_size=40, n_embd=64, n_layer=2, n_head=4, n_positions=16)
    result = heads_benchmark(config, 2, 16, backward=True, device=torch.device("cuda"), seconds=0.0, read=(2, 16))
    names = [row["name"] for row in result["rows"]]
    assert names[:6] == ["whole", "removed", "masked", "whole, issued", "removed, issued", "masked, issued"]
    assert {"half_heads_learning_speedup", "recorded_learning_speedup"} <= result["ratios"].keys()
    rows = {row["name"]: row["milliseconds"]["median"] for row in result["rows"]}
    assert result["ratios"]["half_heads_attention_speedup_issued"] == rows["whole, issued"] / rows["removed, issued"]
