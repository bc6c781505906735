"""Whole models with kernels in place of plain steps: the same loss and gradients, and hooks and adapters are never bypassed.

The choice (`for_kernels`) is forced; without a GPU Triton's interpreter computes, in fp32.
"""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or with the dev extra")

import pnn
import pnn.nn.fast
import pnn.objectives
from pnn.kernels import refinement
from pnn.models.registry import kind_of
from pnn.nn.head import VocabularyHead

SIZE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "dropout": 0.0,
    "max_position_embeddings": 16,
}
MASKED = 42  # stands in the packed text once
MODELS = {
    "equations": lambda: pnn.PNNForMaskedLM(pnn.PNNConfig(**SIZE, zero_init=False, num_steps=2, initializer_range=0.2)),
    "published": lambda: pnn.PNNForMaskedLM(
        pnn.PNNConfig(**SIZE, delta_norm=True, gate_bias=True, zero_init=False, num_steps=2, initializer_range=0.2)
    ),
    "delta": lambda: pnn.PNNForMaskedLM(pnn.PNNConfig(**SIZE, update="delta", zero_init=False, initializer_range=0.2)),
    "rewrite": lambda: pnn.PNNForMaskedLM(
        pnn.PNNConfig(**SIZE, update="rewrite", schedule=[0, 1, 0, 1], step_weights=[0.0, 0.3, 0.0, 0.7], initializer_range=0.2)
    ),
    "open": lambda: pnn.PNNForMaskedLM(
        pnn.PNNConfig(**SIZE, update="rewrite", gate_start=0.9, gate_bias=True, num_steps=2, initializer_range=0.2)
    ),
    "gateless": lambda: pnn.PNNForMaskedLM(
        pnn.PNNConfig(**SIZE, update="rewrite", gate="none", num_steps=2, initializer_range=0.2)
    ),
    "diagonal, narrow": lambda: pnn.PNNForMaskedLM(
        pnn.PNNConfig(
            **SIZE,
            update="rewrite",
            gate="diagonal",
            embedding_size=16,
            head_transform=True,
            tie_word_embeddings=True,
            num_steps=2,
            initializer_range=0.2,
        )
    ),
    "recall and guess": lambda: pnn.PNNForMaskedLM(
        pnn.PNNConfig(
            **SIZE,
            update="rewrite",
            schedule=[0, 1, 0],
            step_weights=[0.0, 0.3, 0.7],
            recall="learned",
            guess_after=[2],
            mask_token_id=MASKED,
            embedding_size=16,
            head_transform=True,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
    ),
    "one attention": lambda: pnn.PNNForMaskedLM(
        pnn.PNNConfig(
            **SIZE, update="rewrite", gate="diagonal", shared_attention=True, schedule=[0, 1, 2, 1], initializer_range=0.2
        )
    ),
    "turned": lambda: pnn.PNNForMaskedLM(
        pnn.PNNConfig(**SIZE, update="rewrite", positions="rotary", schedule=[0, 1], initializer_range=0.2)
    ),
    "rotary": lambda: pnn.PNNForMaskedLM(
        pnn.PNNConfig(
            **SIZE, update="rewrite", gate="token", positions="rotary", ffn="geglu", num_steps=2, initializer_range=0.2
        )
    ),
    "causal": lambda: pnn.PNNForCausalLM(
        pnn.PNNCausalConfig(**SIZE, update="rewrite", schedule=[0, 1], gate_bias=True, initializer_range=0.2)
    ),
    "causal, added": lambda: pnn.PNNForCausalLM(
        pnn.PNNCausalConfig(**SIZE, delta_norm=True, num_steps=2, zero_init=False, initializer_range=0.2)
    ),
    "bert": lambda: pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig(**SIZE, num_hidden_layers=2, initializer_range=0.2)),
}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu compares whole models on a GPU")


@pytest.fixture
def kernels_forced(monkeypatch):
    for module in (pnn.nn.fast, pnn.objectives):
        monkeypatch.setattr(module, "for_kernels", lambda x: True)


def packed_call(causal=False):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (1, 10), generator=generator)
    if causal:  # rows of one length
        return {"input_ids": ids.view(2, 5), "labels": ids.view(2, 5), "output_logits": False}
    borders = torch.tensor([0, 1, 7, 10, 10], dtype=torch.int32)  # the last sequence is empty
    positions = torch.cat([torch.arange(int(n)) for n in borders.diff()])[None]
    at = torch.arange(0, 10, 3)
    labels = ids[0, at].clone()
    labels[2] = -100
    return {
        "input_ids": ids,
        "position_ids": positions,
        "cu_seqlens": borders,
        "logit_positions": at,
        "labels": labels,
        "output_logits": False,
    }


def loss_and_gradients(model):
    model.zero_grad()
    out = model(**packed_call(kind_of(model).causal))
    out.loss.backward()
    return out.loss.item(), out.step_losses, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "in_one_piece"),
    [*((name, True) for name in MODELS), *((name, False) for name in ("published", "open", "diagonal, narrow"))],
)
def test_a_model_with_kernels_is_the_plain_model(name, in_one_piece, request, monkeypatch):
    if not in_one_piece:
        monkeypatch.setattr(pnn.nn.fast, "written_out", lambda *_: False)
    torch.manual_seed(0)
    model = MODELS[name]().train()
    for p in model.parameters():  # biases and norms away from their first values, so that each matters
        p.data += 0.1 * torch.randn_like(p)
    loss, steps, gradients = loss_and_gradients(model)
    plain = {k: v.clone() for k, v in gradients.items()}
    request.getfixturevalue("kernels_forced")
    written, step = [], refinement.step
    monkeypatch.setattr(refinement, "step", lambda *given: written.append(1) or step(*given))
    fast_loss, fast_steps, fast = loss_and_gradients(model)
    in_pieces = not in_one_piece or name in ("delta", "rotary", "causal", "causal, added")
    assert len(written) == (0 if in_pieces else model.base_model.config.to_dict().get("num_steps", 2))
    assert fast_loss == pytest.approx(loss, abs=1e-5)
    assert torch.allclose(fast_steps, steps, atol=1e-5)
    for key, wanted in plain.items():
        assert torch.allclose(fast[key], wanted, atol=2e-5), key


@pytest.mark.parametrize("name", ["equations", "diagonal, narrow", "gateless", "bert"])
def test_what_is_not_written_out_is_compiled(name):
    """Blocks that train in one piece need no compiling; those of longer texts or of heads that no kernel takes do."""

    def compiled(**changes):
        model = MODELS[name]()
        config = type(model.config)(**{**model.config.to_dict(), **changes})
        encoder = type(model)(config).base_model
        encoder.compile_blocks(with_kernels=True)
        return [block._compiled_call_impl is not None for block in encoder.blocks]

    assert not any(compiled())
    assert all(compiled(max_position_embeddings=512))
    assert all(compiled(num_attention_heads=4))  # of eight dimensions


@pytest.mark.parametrize("name", ["equations", "turned", "rotary", "causal", "bert"])
def test_predictions_with_kernels_are_those_of_the_plain_model(name, request):
    """Without gradients rotary positions turn queries and keys where they lie: never what a hook has seen."""
    torch.manual_seed(0)
    model, seen = MODELS[name]().eval(), []
    call = packed_call(kind_of(model).causal) | {"labels": None, "output_logits": True}
    with torch.no_grad():
        expected = model(**call).logits
        request.getfixturevalue("kernels_forced")
        assert torch.allclose(model(**call).logits, expected, atol=1e-5)
        keep = lambda _module, _inputs, out: seen.append((out, out.clone()))  # noqa: E731
        model.base_model.blocks[0].attention.qkv.register_forward_hook(keep)
        assert torch.allclose(model(**call).logits, expected, atol=1e-5)
    assert all(torch.equal(out, before) for out, before in seen)
    assert seen


@pytest.mark.slow
def test_hooks_and_replaced_layers_are_not_bypassed(kernels_forced):
    torch.manual_seed(0)
    model = MODELS["equations"]().eval()

    @torch.no_grad()
    def loss(model):
        return model(**packed_call()).loss.item()

    refiner, unwatched = model.encoder.refiners[0], loss(model)
    for part in ("attention", "attention.out", "attention.qkv", "attention_norm", "ffn", "ffn.up", "ffn.down", "gate.query"):
        calls = []
        handle = refiner.get_submodule(part).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        assert loss(model) == pytest.approx(unwatched, abs=1e-5)
        assert len(calls) == 2, part  # once a step
        handle.remove()

    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    adapted = copy.deepcopy(model)
    layer = adapted.encoder.refiners[0].ffn.down
    adapted.encoder.refiners[0].ffn.down = Adapted(layer.in_features, layer.out_features)
    adapted.encoder.refiners[0].ffn.down.load_state_dict(layer.state_dict())
    doubled = copy.deepcopy(model)
    doubled.encoder.refiners[0].ffn.down.weight.data *= 2
    doubled.encoder.refiners[0].ffn.down.bias.data *= 2
    found = loss(adapted)
    assert found == pytest.approx(loss(doubled), abs=1e-5)
    assert found != pytest.approx(unwatched, abs=1e-3)


def test_an_attention_that_refiners_share_is_not_bypassed(kernels_forced):
    """Whole steps are written out in training alone."""
    torch.manual_seed(0)
    model, calls = MODELS["one attention"]().train(), []
    unwatched = model(**packed_call()).loss.item()
    for part in ("attention", "attention.qkv", "attention.out"):
        calls.clear()
        module = model.encoder.refiners[0].get_submodule(part)
        handle = module.register_forward_hook(lambda *_: calls.append(1))
        assert model(**packed_call()).loss.item() == pytest.approx(unwatched, abs=1e-5)
        assert len(calls) == 4, part  # once a step
        handle.remove()


@pytest.mark.parametrize("how", ["subclass", "forward", "norm"])
def test_an_attention_or_norm_of_somebodys_own_is_called(how, kernels_forced):
    torch.manual_seed(0)
    model = MODELS["equations"]().eval()
    refiner, calls = model.encoder.refiners[0], []

    class OwnAttention(type(refiner.attention)):
        def forward(self, *args):
            calls.append(1)
            return super().forward(*args)

    class OwnNorm(torch.nn.RMSNorm):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    if how == "subclass":
        own = OwnAttention(SIZE["hidden_size"], SIZE["num_attention_heads"])
        own.load_state_dict(refiner.attention.state_dict())
        refiner.attention = own
    elif how == "forward":
        before = refiner.attention.forward
        refiner.attention.forward = lambda *args: calls.append(1) or before(*args)
    else:
        refiner.attention_norm = OwnNorm(SIZE["hidden_size"])
    model(**packed_call()).loss.backward()  # a whole step is written out in training alone
    assert len(calls) == 2  # once a step


@pytest.mark.parametrize("kind", ["pnn", "bert"])
def test_a_padded_batch_with_a_classifier(kind, kernels_forced, monkeypatch):
    """What fine-tuning computes: no packed layout, one token read."""
    size = SIZE | {"initializer_range": 0.2, "num_labels": 3}
    torch.manual_seed(0)
    if kind == "pnn":
        fast = pnn.PNNForSequenceClassification(pnn.PNNConfig(**size, zero_init=False, num_steps=2))
    else:
        fast = pnn.BertBaselineForSequenceClassification(pnn.BertBaselineConfig(**size, num_hidden_layers=2))
    plain = copy.deepcopy(fast)
    ids = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 2, 1])}
    with_kernels = fast(**inputs)
    with_kernels.loss.backward()
    monkeypatch.undo()
    without = plain(**inputs)
    without.loss.backward()
    torch.testing.assert_close(with_kernels.logits, without.logits, atol=1e-5, rtol=1e-4)
    for (name, one), (_, other) in zip(fast.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["published", "turned", "bert"])
def test_attentions_and_checkpointing_with_kernels(name, request):
    torch.manual_seed(0)
    model = MODELS[name]().train()

    def watched():
        return model(**packed_call(), output_attentions=True).attentions

    plain, (loss, _, gradients) = watched(), loss_and_gradients(model)
    wanted = {key: value.clone() for key, value in gradients.items()}
    request.getfixturevalue("kernels_forced")
    for one, other in zip(watched(), plain, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, atol=1e-5, rtol=1e-4)  # an empty sequence sees nothing
    model.gradient_checkpointing_enable()
    again, _, checkpointed = loss_and_gradients(model)
    assert again == pytest.approx(loss, abs=1e-5)
    for key, value in wanted.items():
        assert torch.allclose(checkpointed[key], value, atol=2e-5), key


@pytest.mark.parametrize(("vocabulary", "bias"), [(50, True), (50, False), (48, True)])
def test_many_rows_of_logits_go_through_a_padded_matrix(vocabulary, bias, kernels_forced, monkeypatch):
    monkeypatch.setattr(pnn.nn.fast, "MANY_ROWS", 6)
    torch.manual_seed(0)
    head = VocabularyHead(32, vocabulary, transform=True, eps=1e-5)
    if not bias:
        head.decoder = torch.nn.Linear(32, vocabulary, bias=False)
    h = torch.randn(6, 32)
    wanted = head(h).detach()
    with torch.no_grad():
        many, few, alone = (
            pnn.nn.fast.read_out(*given) for given in ((head, h), (head, h[:5]), (head.decoder, head.features(h)))
        )
    torch.testing.assert_close(many, wanted)
    torch.testing.assert_close(few, wanted[:5])
    torch.testing.assert_close(alone, wanted)
    assert many.is_contiguous() == alone.is_contiguous() == (vocabulary % 8 == 0)
    assert few.is_contiguous()
    table = torch.randn(vocabulary, 8)
    with torch.no_grad():
        for rows in (6, 5):
            torch.testing.assert_close(pnn.nn.fast.average_row(head, h[:rows], table), wanted[:rows].softmax(-1) @ table)
    assert pnn.nn.fast.read_out(head, h).requires_grad  # with gradients, the plain product
    seen = []
    head.decoder.register_forward_hook(lambda *given: seen.append(given))
    with torch.no_grad():
        pnn.nn.fast.read_out(head, h)
    assert len(seen) == 1  # whoever listens is called
