"""A decoder of Llama's kind in fewer passes over memory: the same loss and gradients, and nobody who listens is bypassed.

The choice (`for_kernels`) is forced; without a GPU Triton's interpreter computes, in fp32.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or with the dev extra")

from pnn.kernels import divergence as kl
from pnn.kernels import llama
from pnn.models.fused import FAMILIES, ROTATION, fused
from pnn.nn import fast
from pnn.plasticity import prune
from pnn.plasticity.learning import learn
from pnn.plasticity.teaching import Teacher
from pnn.plasticity.units import Unit

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu compares whole models on a GPU")
SIZE = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
ROWS = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))


def build(family: str = "Llama", **more) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(
        **SIZE, num_hidden_layers=2, max_position_embeddings=16, initializer_range=0.2, **more
    )
    return getattr(hf, f"{family}ForCausalLM")(config)


@pytest.fixture
def seen(monkeypatch) -> list[str]:
    """Kernels compute wherever they are asked; which did."""
    monkeypatch.setattr(fast, "kernels_compute", lambda *_: True)
    calls = []
    for module, name in ((llama, "rms_norm"), (llama, "swiglu"), (llama, "rotate"), (kl, "linear_divergence")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, own=own, name=name: calls.append(name) or own(*given))
    return calls


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, grad in one.items():
        torch.testing.assert_close(grad, other[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_its_gradients_stay(family, pruned, seen, monkeypatch):
    model = build(family)
    if pruned:
        model = prune(model, [Unit("head", 0, 1), Unit("neuron", 1, 3), Unit("neuron", 1, 30)])
    model.train()
    with fused(model):
        found = model(ROWS, labels=ROWS).loss
        grads = gradients(model, found)
    assert seen.count("rms_norm") == 5  # two of each block and the last
    assert seen.count("swiglu") == 2
    assert seen.count("rotate") == 4  # queries and keys
    plain = model(ROWS, labels=ROWS).loss
    assert len(seen) == 11
    torch.testing.assert_close(found, plain)
    same(grads, gradients(model, plain))


def test_a_teacher_is_read_the_same_way(seen, monkeypatch):
    model = prune(build(), [Unit("neuron", 0, index) for index in range(8)])
    teacher, batch = Teacher(build()), {"input_ids": ROWS, "labels": ROWS}
    with fused(model, teacher.model):
        found = teacher.loss(model, batch)
    assert {*seen} == {"rms_norm", "swiglu", "rotate", "linear_divergence"}
    assert seen.count("rms_norm") == 10
    monkeypatch.setattr(fast, "kernels_compute", lambda *_: False)
    plain = teacher.loss(model, batch)
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-5)
    same(gradients(model, found), gradients(model, plain))


def test_learning_takes_the_kernels(seen):
    before = build()
    model = copy.deepcopy(before)
    list(learn(model, [], lambda _: {"input_ids": ROWS, "labels": ROWS}, steps=2, peak_rate=1e-3, multiplier=1.0, seed=0))
    assert seen.count("swiglu") == 4
    assert type(model.model.norm) is type(before.model.norm)


def test_activations_may_be_computed_again(seen):
    model = build()
    model.gradient_checkpointing_enable()
    list(learn(model, [], lambda _: {"input_ids": ROWS, "labels": ROWS}, steps=1, peak_rate=1e-3, multiplier=1.0, seed=0))
    assert seen.count("swiglu") == 4  # each block's twice


def test_whoever_listens_is_called(seen):
    model, heard = build(), []
    model.model.norm.register_forward_hook(lambda *_: heard.append("norm"))
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda *_: heard.append("down"))
    with fused(model):
        model(ROWS)
    assert heard == ["down", "norm"]
    assert seen.count("rms_norm") == 4
    assert seen.count("swiglu") == 2


def test_what_the_kernels_do_not_take_is_computed_as_ever(seen):
    model = build(hidden_act="gelu", head_dim=12)
    with fused(model):
        found = model(ROWS).logits
    assert {*seen} == {"rms_norm"}
    torch.testing.assert_close(found, model(ROWS).logits)


def test_afterwards_all_is_as_it_was(seen):
    from transformers.models.llama import modeling_llama

    model, rotation = build(), getattr(modeling_llama, ROTATION)
    kinds = [type(module) for module in model.modules()]
    with fused(model):
        assert [type(module) for module in model.modules()] != kinds
    with pytest.raises(TypeError), fused(model, build("Qwen2")):
        model("no rows")
    assert [type(module) for module in model.modules()] == kinds
    assert getattr(modeling_llama, ROTATION) is rotation
