"""A shape that a kernel does not take falls to flash attention or to the plain form, and the model's values stay what they are.

As in test_models_with_kernels, `for_kernels` is forced. Flash attention has no CPU version: its plain twin stands in.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or with the dev extra")

import pnn
import pnn.nn.fast
import pnn.objectives
from pnn.kernels import attention, diagonal_gate, gate, norm, recall
from pnn.nn.attention import SelfAttention
from pnn.nn.packing import Layout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")


def choose(monkeypatch, kernels: bool) -> None:
    for module in (pnn.nn.fast, pnn.objectives):
        monkeypatch.setattr(module, "for_kernels", lambda x: kernels)


@pytest.fixture
def forms(monkeypatch):
    """Which form of attention ran, in order."""
    ran: list[str] = []
    kernel = attention.short_attention

    def counted(*inputs):
        ran.append("kernel")
        return kernel(*inputs)

    def twin(qkv, layout):
        ran.append("flash")
        borders = layout.cu_seqlens.tolist()
        rows = [[x[a:b].transpose(0, 1) for x in qkv.unbind(1)] for a, b in itertools.pairwise(borders)]
        return torch.cat([F.scaled_dot_product_attention(*row).transpose(0, 1) for row in rows])

    choose(monkeypatch, True)
    monkeypatch.setattr(attention, "short_attention", counted)
    monkeypatch.setattr(pnn.nn.fast, "flash_packed_attention", twin)
    return ran


@pytest.mark.parametrize(
    ("width", "longest", "dropout", "form"),
    [
        (16, 64, 0.0, ["kernel"]),
        (16, 128, 0.0, ["kernel"]),
        (48, 64, 0.0, ["flash"]),  # no power of two
        (16, 129, 0.0, ["flash"]),  # too long for one program
        (20, 64, 0.0, []),  # flash attention reads 8 numbers at a time
        (264, 64, 0.0, []),  # wider than it knows
        (48, 64, 0.1, []),  # it has no dropout
    ],
)
def test_attention_takes_the_fastest_form_that_knows_the_shape(forms, monkeypatch, width, longest, dropout, form):
    torch.manual_seed(0)
    module = SelfAttention(2 * width, 2, attention_dropout=dropout).train(dropout > 0)
    h = torch.randn(1, 40, 2 * width)
    layout = Layout(cu_seqlens=torch.tensor([0, 3, 30, 40], dtype=torch.int32), max_seqlen=longest)
    out = module.context(h, layout)
    assert forms == form
    assert out.shape == h.shape
    if dropout == 0:
        choose(monkeypatch, False)
        assert torch.allclose(out, module.context(h, layout), atol=1e-5)


def test_steps_wider_than_their_kernels_are_plain():
    wide = torch.empty(1, norm.WIDEST + 8)
    assert not norm.takes(wide)
    assert not gate.takes(wide)
    assert not diagonal_gate.takes(wide)
    assert not recall.takes(wide, wide)


def test_a_model_of_shapes_that_no_kernel_takes_is_the_plain_model(forms, monkeypatch):
    """The limits are lowered instead of the model raised above them, which a CPU would notice."""
    torch.manual_seed(0)
    size = {"vocab_size": 50, "hidden_size": 40, "num_attention_heads": 2, "intermediate_size": 24, "dropout": 0.0}
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**size, zero_init=False, num_steps=2, initializer_range=0.2))
    ids = torch.randint(5, 50, (1, 20))
    call = {"input_ids": ids, "cu_seqlens": torch.tensor([0, 4, 20], dtype=torch.int32), "labels": ids}

    def measured():
        model.zero_grad()
        loss = model(**call).loss
        loss.backward()
        return loss.item(), model.encoder.refiners[0].ffn.up.weight.grad.clone()

    with monkeypatch.context() as undone:
        choose(undone, False)
        loss, gradient = measured()

    def fails(*_):
        raise AssertionError("a kernel ran on a shape that it does not take")

    for module, name in ((norm, "dropout_add_norm"), (gate, "gated_update")):
        monkeypatch.setattr(module, "WIDEST", 32)
        monkeypatch.setattr(module, name, fails)
    fast_loss, fast_gradient = measured()
    assert forms == []  # heads of 20
    assert fast_loss == pytest.approx(loss, abs=1e-5)
    assert torch.allclose(fast_gradient, gradient, atol=1e-5)
