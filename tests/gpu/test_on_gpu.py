"""What only a GPU can show: flash attention and masks agree with their plain twins. Run by hand: pytest -m gpu tests/gpu"""

import copy

import pytest
import torch
import torch.nn.functional as F

import pnn
from pnn.data.masking import SpecialTokens, apply_mask
from pnn.nn.fast import average_row, flash_packed_attention
from pnn.nn.head import VocabularyHead
from pnn.nn.packing import Layout, packed_attention
from pnn.objectives import step_weighted_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_equals_the_plain_form_in_values_and_gradients(dtype):
    torch.manual_seed(0)
    lengths = torch.tensor([5, 128, 1, 77, 64])
    borders = torch.cat((torch.tensor([0]), lengths.cumsum(0))).to("cuda", torch.int32)
    layout = Layout(cu_seqlens=borders, max_seqlen=128)
    qkv = torch.randn(int(lengths.sum()), 3, 12, 64, device="cuda", dtype=dtype)
    grad = torch.randn_like(qkv[:, 0])
    results = []
    for attend, kind in ((flash_packed_attention, dtype), (packed_attention, torch.float64)):
        leaf = qkv.detach().to(kind).requires_grad_()
        out = attend(leaf, layout)
        out.backward(grad.to(kind))
        results.append([out, *leaf.grad.unbind(1)])
    for fast, plain in zip(*results, strict=True):
        assert (fast.double() - plain).norm() / plain.norm() < 1e-2


def test_masks_are_the_same_on_cpu_and_gpu():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (5000,), generator=generator)
    keys = torch.arange(50).repeat_interleave(100)
    positions = torch.arange(100).repeat(50)
    special = SpecialTokens(4, 1000, (0, 2, 3))
    for style in ("mask", "bert"):
        here = apply_mask(ids, keys, positions, special, probability=0.15, seed=3, style=style, capacity=900)
        there = apply_mask(
            *(x.cuda() for x in (ids, keys, positions)), special, probability=0.15, seed=3, style=style, capacity=900
        )
        for name in ("input_ids", "positions", "labels"):
            assert torch.equal(getattr(here, name), getattr(there, name).cpu())


def test_compiled_training_loss_equals_the_plain_one():
    torch.manual_seed(0)
    config = pnn.PNNConfig(
        vocab_size=500, hidden_size=128, num_attention_heads=2, intermediate_size=256, dropout=0.0, zero_init=False
    )
    model = pnn.PNNForMaskedLM(config).cuda()
    compiled = copy.deepcopy(model)
    compiled.base_model.compile_blocks(with_kernels=True)
    for sequences in (7, 9):  # a second number of sequences makes their count a dynamic shape
        borders = torch.linspace(0, 512, sequences + 1).to("cuda", torch.int32)
        ids = torch.randint(5, 500, (1, 512), device="cuda")
        at = torch.arange(0, 512, 8, device="cuda")
        position_ids = (torch.arange(512, device="cuda") % 64)[None]
        call = {
            "input_ids": ids,
            "position_ids": position_ids,
            "cu_seqlens": borders,
            "labels": ids[0, at],
            "logit_positions": at,
        }
        with torch.autocast("cuda", torch.bfloat16):
            fast, plain = compiled(**call, output_logits=False).loss, model(**call).loss
        assert abs(fast.item() - plain.item()) < 2e-3
        grads = [
            torch.autograd.grad(loss, m.encoder.refiners[0].ffn.up.weight)[0] for loss, m in ((fast, compiled), (plain, model))
        ]
        assert (grads[0] - grads[1]).norm() / grads[1].norm() < 2e-2


FORMS = {
    "paper": {"zero_init": False},
    "rewrite": {"update": "rewrite", "schedule": [0, 1, 0, 1], "step_weights": [0.0, 0.3, 0.0, 0.7]},
    "open and rotary": {"update": "rewrite", "gate_start": 0.88, "gate_bias": True, "positions": "rotary"},
    "gateless": {"update": "rewrite", "gate": "none"},
    "diagonal, narrow": {"update": "rewrite", "gate": "diagonal", "embedding_size": 64, "head_transform": True},
    "diagonal, narrow, tied": {
        **{"update": "rewrite", "gate": "diagonal", "embedding_size": 64, "head_transform": True},
        **{"positions": "rotary", "tie_word_embeddings": True, "schedule": [0, 1, 0]},
    },
    "one attention": {
        **{"update": "rewrite", "gate": "diagonal", "positions": "rotary", "shared_attention": True},
        **{"schedule": [0, 1, 2, 1], "step_weights": [0, 0, 0, 1]},
    },
    "recall and guess": {
        **{"update": "rewrite", "gate": "diagonal", "embedding_size": 64, "head_transform": True, "positions": "rotary"},
        **{"shared_attention": True, "schedule": [0, 1, 2, 1], "step_weights": [0, 0.3, 0, 0.7]},
        **{"recall": "learned", "guess_after": [2], "mask_token_id": 4},
    },
    "gate of the token, GeGLU": {"update": "rewrite", "gate": "token", "ffn": "geglu", "positions": "rotary"},
    "bert": None,
    "bert, rotary": None,
}


def of_form(form, **size):
    """Away from its first weights, where gates would not depend on what they read."""
    if form.startswith("bert"):
        positions = {"positions": "rotary"} if form.endswith("rotary") else {}
        model = pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig(**size, **positions, num_hidden_layers=2))
    else:
        model = pnn.PNNForMaskedLM(pnn.PNNConfig(**size, **FORMS[form]))
    for name, parameter in model.named_parameters():
        parameter.data += (1.0 if name.endswith("gate.product") else 0.03) * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_16_bit_with_kernels_is_its_equations_in_fp32(form, compiled):
    torch.manual_seed(0)
    torch.compiler.reset()
    size = {"vocab_size": 500, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "dropout": 0.0}
    model = of_form(form, **size, initializer_range=0.05).cuda()
    fast = copy.deepcopy(model)
    if compiled:
        fast.base_model.compile_blocks(with_kernels=True)
    ids, at = torch.randint(5, 500, (1, 512), device="cuda"), torch.arange(0, 512, 8, device="cuda")
    call = {
        "input_ids": ids,
        "position_ids": (torch.arange(512, device="cuda") % 64)[None],
        "cu_seqlens": torch.arange(0, 513, 64, device="cuda", dtype=torch.int32),
        "labels": ids[0, at],
        "logit_positions": at,
    }
    call["input_ids"] = ids.index_fill(1, at, 4)
    with torch.autocast("cuda", torch.bfloat16):
        loss = fast(**call, output_logits=False).loss
    expected = model(**call).loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-2)
    for one, other in ((loss, fast), (expected, model)):
        one.backward()
        assert all(p.grad is not None for p in other.parameters())
    grads, wanted = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (fast, model))
    assert (grads - wanted).norm() / wanted.norm() < 5e-2
    for (name, one), other in zip(fast.named_parameters(), model.parameters(), strict=True):
        if one.numel() > 1:  # a single number's gradient may be near zero; in a bias, what cancels leaves up to 6 % to rounding
            assert (one.grad - other.grad).norm() / other.grad.norm() < (4e-2 if one.dim() > 1 else 0.15), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_average_rows_of_a_table_are_those_in_fp32(dtype):
    torch.manual_seed(0)
    head = VocabularyHead(768, 30522, transform=True, eps=1e-5, token_size=384).cuda()
    h = torch.randn(700, 768, device="cuda")
    head.decoder.weight.data.mul_(3)  # some tokens are far likelier than others
    with torch.no_grad():
        expected = head(h).double().softmax(-1) @ head.decoder.weight.double()
        with torch.autocast("cuda", dtype):
            found = average_row(head, h.to(dtype), head.decoder.weight)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() / expected.norm() < 3e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_kernel_equals_the_plain_form(dtype):
    torch.manual_seed(0)
    decoder = torch.nn.Linear(768, 30522).cuda()
    features = [torch.randn(700, 768, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    labels = torch.randint(0, 30522, (700,), device="cuda")
    labels[::50] = -100
    weights = [0.2, 0.3, 0.5]
    with torch.autocast("cuda", dtype):
        fast, fast_steps = step_weighted_loss(features, decoder, labels, weights)
    fast_grads = torch.autograd.grad(3 * fast, [*features, decoder.weight, decoder.bias])
    leaves = [x.detach().double().requires_grad_() for x in features]
    double = copy.deepcopy(decoder).double()
    double.weight.data = decoder.weight.data.to(dtype).double()
    steps = [F.cross_entropy(double(x), labels, ignore_index=-100) for x in leaves]
    plain = sum(w * step for w, step in zip(weights, steps, strict=True))
    plain_grads = torch.autograd.grad(3 * plain, [*leaves, double.weight, double.bias])
    assert abs(fast.item() - plain.item()) < 2e-3
    assert torch.allclose(fast_steps.double(), torch.stack(steps).detach(), atol=3e-3)
    for fast_grad, plain_grad in zip(fast_grads, plain_grads, strict=True):
        assert (fast_grad.double() - plain_grad).norm() / plain_grad.norm() < 2e-2


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["pnn", "rewrite", "diagonal", "recall and guess", "gateless", "bert"])
def test_a_recorded_update_is_the_issued_one(tiny_config, dropout, passes, kind):
    """Recorded and replayed (`compile`) or issued kernel by kernel: the same curve, dropout included, over one and two
    micro-batches an update and batches with different numbers of sequences."""
    from pnn.config import load_config
    from pnn.training.loop import Trainer
    from pnn.training.updates import updates_ahead

    curves = {}
    rewrite = {"type": "pnn", "update": "rewrite"}
    narrow = {"embedding_size": 32, "head_transform": True, "tie_word_embeddings": True, "positions": "rotary"}
    kinds = {"pnn": {"type": "pnn"}, "rewrite": rewrite, "bert": {"type": "bert"}}
    kinds |= {"diagonal": {**rewrite, "gate": "diagonal", **narrow}, "gateless": {**rewrite, "gate": "none"}}
    kinds["recall and guess"] = {**kinds["diagonal"], "recall": "learned", "guess_after": [2]}
    for recorded in (True, False):
        config = tiny_config(
            f"recorded-{recorded}-{dropout}",
            model={**kinds[kind], "hidden_size": 64, "dropout": dropout, "attention_dropout": dropout},
            training={
                **{"compile": True, "precision": "bf16", "max_steps": 30},
                **{"batch_size": 80 // passes, "effective_batch_size": 80},
            },
        )
        torch.compiler.reset()
        trainer = Trainer(load_config(str(config)), config.parent / f"run-{recorded}-{dropout}", quiet=True)
        assert trainer.recorder is not None
        recorder = trainer.recorder
        if not recorded:
            trainer.recorder = None
        losses = []
        for update in updates_ahead(trainer.stream, trainer.plan, 0, 1, 30):
            losses.append(trainer.apply(update, 1e-3)[0])
            trainer.step += 1
        curves[recorded] = torch.stack(losses)
        assert (recorder.graph is not None) == recorded
    assert curves[True][-1] < curves[True][0] - 0.3
    difference = (curves[True] - curves[False]).abs()
    assert difference[:5].max() < 1e-4  # the recording is made at the fourth
    assert difference.max() < 5e-3
