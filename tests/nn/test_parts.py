"""Each part against its equation, written out by hand or taken from torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pnn
from pnn.kernels import short_rows
from pnn.nn.attention import SelfAttention
from pnn.nn.causal import Past
from pnn.nn.decoder import SwiGLU
from pnn.nn.delta_rule import rewrite, rewrite_delta, soft_unit
from pnn.nn.embeddings import TokenPositionEmbeddings
from pnn.nn.feed_forward import FeedForward, GatedFeedForward
from pnn.nn.gating import DiagonalGate, QueryKeyGate, TokenGate
from pnn.nn.head import VocabularyHead
from pnn.nn.packing import Layout, Rows, packed_attention, padded_attention
from pnn.nn.rotary import rotation
from pnn.nn.transformer import TransformerLayer
from pnn.nn.updates import UPDATES, Gated

WIDTH, HEADS, INNER = 12, 3, 20
few = settings(deadline=None, max_examples=25)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def shaken(module):
    """In double precision, every parameter away from its start."""
    module = module.double()
    for seed, parameter in enumerate(module.parameters()):
        parameter.copy_(parameter.clamp(-1, 4) + 0.3 * random(*parameter.shape, seed=seed))
    return module


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def layer_norm(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def attention_by_hand(module, h):
    """One sequence (length, d): softmax(q kᵀ / √d_head) v in each head, token by token."""
    length, width = h.shape
    size = width // module.num_heads
    q, k, v = (h @ w.T + b for w, b in zip(module.qkv.weight.chunk(3), module.qkv.bias.chunk(3), strict=True))
    context = torch.zeros_like(h)
    for head in range(module.num_heads):
        part = slice(head * size, (head + 1) * size)
        for token in range(length):
            scores = torch.stack([q[token, part] @ k[other, part] for other in range(length)]) / math.sqrt(size)
            weights = scores.exp() / scores.exp().sum()
            context[token, part] = sum(weights[other] * v[other, part] for other in range(length))
    return context @ module.out.weight.T + module.out.bias


# Attention ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(5,), (1, 7, 4), (3, 3)])
def test_attention_equals_a_softmax_written_out(lengths):
    module = shaken(SelfAttention(WIDTH, HEADS))
    longest = max(lengths)
    padded = random(len(lengths), longest, WIDTH, seed=1)
    keep = torch.arange(longest) < torch.tensor(lengths)[:, None]
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    expected = torch.cat([attention_by_hand(module, row[:n]) for row, n in zip(padded, lengths, strict=True)])
    as_padded = module(padded, Layout(keep=keep))[keep]
    as_packed = module(padded[keep][None], Layout(cu_seqlens=borders, max_seqlen=longest))[0]
    assert torch.allclose(as_padded, expected, atol=1e-12)
    assert torch.allclose(as_packed, expected, atol=1e-12)


def test_attention_without_a_mask_takes_every_token():
    module = shaken(SelfAttention(WIDTH, HEADS))
    h = random(2, 4, WIDTH, seed=1)
    expected = torch.stack([attention_by_hand(module, row) for row in h])
    assert torch.allclose(module(h, Layout()), expected, atol=1e-12)


def test_attention_equals_torch_multi_head_attention():
    ours, theirs = shaken(SelfAttention(WIDTH, HEADS)), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    h = random(3, 5, WIDTH, seed=2)
    keep = torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    expected, _ = theirs(h, h, h, key_padding_mask=~keep)
    assert torch.allclose(ours(h, Layout(keep=keep))[keep], expected[keep], atol=1e-12)


@few
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 1000))
def test_packed_attention_is_attention_of_each_sequence_alone(lengths, seed):
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k, v = random(3, sum(lengths), HEADS, 4, seed=seed)
    packed = packed_attention(torch.stack((q, k, v), 1), Layout(cu_seqlens=borders, max_seqlen=9))
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        alone = padded_attention(*(x[None, start:stop] for x in (q, k, v)), keep=None)[0]
        assert torch.allclose(packed[start:stop], alone, atol=1e-12)


def test_packed_attention_has_gradients_of_each_sequence_alone():
    lengths, borders = (2, 5, 1), torch.tensor([0, 2, 7, 8], dtype=torch.int32)
    inputs = [random(8, HEADS, 4, seed=s).requires_grad_() for s in range(3)]
    weights = random(8, HEADS, 4, seed=9)
    packed = packed_attention(torch.stack(inputs, 1), Layout(cu_seqlens=borders))
    whole = torch.autograd.grad((packed * weights).sum(), inputs)
    assert sum(lengths) == 8
    for start, stop in ((0, 2), (2, 7), (7, 8)):
        parts = [x[None, start:stop].detach().requires_grad_() for x in inputs]
        alone = torch.autograd.grad((padded_attention(*parts, keep=None) * weights[None, start:stop]).sum(), parts)
        assert all(torch.allclose(w[start:stop], a[0], atol=1e-12) for w, a in zip(whole, alone, strict=True))


@few
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 2), st.integers(0, 1000))
def test_batched_products_over_short_rows_equal_packed_attention(lengths, empty, seed):
    borders = torch.tensor([0, *lengths, *[0] * empty]).cumsum(0).to(torch.int32)  # empty sequences at the end
    qkv = random(sum(lengths), 3, HEADS, 4, seed=seed)
    rows = Rows.of(borders, len(qkv), HEADS)
    assert short_rows.takes(qkv.requires_grad_(), qkv.dtype, len(lengths) * HEADS, rows.keep.shape[1])
    weights = random(len(qkv), HEADS, 4, seed=9)
    results = []
    for out in (
        short_rows.attention(qkv, rows.keep, rows.spread, rows.gather, rows.collect),
        packed_attention(qkv, Layout(cu_seqlens=borders)),
    ):
        results.append((out, *torch.autograd.grad((out * weights).sum(), qkv)))
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("seen", ["all", "those before", "real tokens"])
def test_attention_by_products_is_torchs_own(seen):
    q, k, v = (random(3, HEADS, 6, 4, seed=s).requires_grad_() for s in range(3))
    mask = (torch.arange(6) < torch.tensor([6, 2, 0])[:, None])[:, None, None] if seen == "real tokens" else None
    asked = {"attn_mask": mask, "is_causal": seen == "those before"}
    outs = [attend(q, k, v, **asked)[:2] for attend in (short_rows.by_products, F.scaled_dot_product_attention)]
    weights = random(2, HEADS, 6, 4, seed=9)
    results = [(out, *torch.autograd.grad((out * weights).sum(), (q, k, v))) for out in outs]
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one[:2], other[:2], atol=1e-12)
        assert one.isfinite().all()  # also of a row that sees nothing
    dropped = short_rows.by_products(q, k, v, dropout_p=0.5)
    assert not torch.equal(dropped, short_rows.by_products(q, k, v, dropout_p=0.5))


@pytest.mark.parametrize("layout", ["packed", "packed, dropout", "padded", "causal"])
def test_a_cpu_that_trains_in_bf16_attends_by_products(layout, monkeypatch):
    """In whatever way the tokens lie; in fp32 and without gradients by torch's function, but for short packed rows."""
    called = []
    for name in ("by_products", "attention"):
        real = getattr(short_rows, name)
        monkeypatch.setattr(short_rows, name, lambda *given, real=real, **more: called.append(1) or real(*given, **more))
    module = shaken(SelfAttention(WIDTH, HEADS, 0.1 if "dropout" in layout else 0.0)).float().train()
    h = random(1, 80, WIDTH).float()
    how = {
        "packed": Layout(cu_seqlens=torch.tensor([0, 70, 80], dtype=torch.int32)),
        "padded": Layout(keep=torch.ones(1, 80, dtype=torch.bool)),
        "causal": Layout(past=Past()),
    }[layout.partition(",")[0]]
    expected = module(h, how)
    assert not called
    with torch.autocast("cpu", torch.bfloat16):
        out = module(h, how)
        assert len(called) == 1
        if "dropout" not in layout:
            assert torch.allclose(out.float(), expected, atol=0.05, rtol=0.05)
        with torch.no_grad():
            module(h, how)
    assert len(called) == 1
    out.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    monkeypatch.setattr(short_rows, "MOST_BYTES", 2 * HEADS * 80**2 - 1)  # long rows of many sequences would fill the memory
    with torch.autocast("cpu", torch.bfloat16):
        module(h, how)
    assert len(called) == 1


def test_what_is_not_a_number_stays_in_its_own_packed_sequence():
    module, borders = shaken(SelfAttention(WIDTH, HEADS)), torch.tensor([0, 3, 8, 8], dtype=torch.int32)
    h = random(1, 8, WIDTH)
    h[0, 0] = math.nan  # reaches its whole sequence, and nothing of the next one
    out = module(h.requires_grad_(), Layout(cu_seqlens=borders))
    (grad,) = torch.autograd.grad(out[0, 3:].sum(), h)
    assert out[0, :3].isnan().all()
    assert out[0, 3:].isfinite().all()
    assert grad[0, 3:].isfinite().all()


def test_rows_of_another_number_of_heads_are_worked_out_anew():
    module, borders = shaken(SelfAttention(WIDTH, HEADS)), torch.tensor([0, 2, 6], dtype=torch.int32)
    h = random(1, 6, WIDTH)
    others = Layout(cu_seqlens=borders, rows=Rows.of(borders, 6, HEADS + 1))
    assert torch.equal(module(h, others), module(h, Layout(cu_seqlens=borders)))


def test_attention_dropout_acts_in_training_only():
    module = shaken(SelfAttention(WIDTH, HEADS, attention_dropout=0.5))
    h, borders = random(1, 6, WIDTH), torch.tensor([0, 2, 6], dtype=torch.int32)
    for layout in (Layout(), Layout(cu_seqlens=borders)):
        module.train()
        assert not torch.equal(module(h, layout), module(h, layout))
        module.eval()
        assert torch.equal(module(h, layout), module(h, layout))


def test_heads_that_do_not_divide_the_width_raise_with_both_numbers():
    with pytest.raises(ValueError, match="num_attention_heads=5 does not divide hidden_size=12"):
        SelfAttention(12, 5)


@few
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_sequence_starts_is_the_border_before_each_token(lengths):
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    expected = [start for start, n in zip(borders.tolist(), lengths, strict=False) for _ in range(n)]
    assert Layout(cu_seqlens=borders).sequence_starts(sum(lengths)).tolist() == expected


def test_rotary_positions_see_distances_only():
    module = shaken(SelfAttention(WIDTH, HEADS))
    h, positions = random(1, 5, WIDTH, seed=2), torch.arange(5)[None]
    near, far = (module(h, Layout(rotation=rotation(positions + shift, WIDTH // HEADS, 100.0))) for shift in (0, 7))
    assert torch.allclose(near, far, atol=1e-5)
    assert not torch.allclose(near, module(h, Layout()), atol=1e-2)


# The delta rule -------------------------------------------------------------------------------------------------------

dimensions, seeds, betas = st.integers(2, 12), st.integers(0, 10_000), st.floats(0, 2)


def unit(d, seed):
    k = random(d, seed=seed)
    return k / k.norm()


def test_a_rewrite_adds_its_delta_for_every_token():
    x, k, v, beta = random(2, 3, 4, 5), random(2, 3, 5, seed=1), random(2, 3, 4, seed=2), random(2, 3, 1, seed=3)
    delta = rewrite_delta(x, k, v, beta)
    for i in range(2):
        for j in range(3):
            for channel in range(4):
                expected = beta[i, j] * (v[i, j, channel] - x[i, j, channel] @ k[i, j]) * k[i, j]
                assert torch.allclose(delta[i, j, channel], expected, atol=1e-12)
    assert torch.equal(rewrite(x, k, v, beta), x + delta)


@few
@given(dimensions, seeds, st.floats(1e-3, 1e3))
def test_soft_unit_keeps_the_direction_and_is_never_longer_than_one(d, seed, length):
    k = length * unit(d, seed)
    out = soft_unit(k)
    assert torch.allclose(out, k / math.sqrt(length**2 + 1), atol=1e-9)
    assert out.norm() < 1


def test_soft_unit_of_zero_is_zero_with_a_gradient_of_one():
    k = torch.zeros(2, 5, requires_grad=True)
    out = soft_unit(k)
    assert torch.count_nonzero(out) == 0
    out.sum().backward()
    assert torch.equal(k.grad, torch.ones(2, 5))


# Gate, refiner, layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_the_gate_is_the_sigmoid_of_query_times_key_over_temperature(bias):
    gate = QueryKeyGate(WIDTH, bias)
    assert gate.temperature.tolist() == pytest.approx([math.sqrt(WIDTH)])
    assert (gate.query.bias is None) == (not bias)
    gate = shaken(gate)
    h, delta = random(2, 4, WIDTH), random(2, 4, WIDTH, seed=1)
    query, key = h @ gate.query.weight.T, delta @ gate.key.weight.T
    if bias:
        query, key = query + gate.query.bias, key + gate.key.bias
    expected = 1 / (1 + torch.exp(-query * key / gate.temperature))
    assert torch.allclose(gate(h, delta), expected, atol=1e-12)


def test_the_feed_forward_net_is_two_matrices_and_an_exact_gelu():
    ffn = shaken(FeedForward(WIDTH, INNER, dropout=0.0))
    h = random(4, WIDTH)
    expected = gelu(h @ ffn.up.weight.T + ffn.up.bias) @ ffn.down.weight.T + ffn.down.bias
    assert torch.allclose(ffn(h), expected, atol=1e-12)


def test_the_first_half_of_swiglu_is_the_gate():
    """Saved weights rely on the order."""
    mlp = shaken(SwiGLU(WIDTH, INNER))
    c = random(4, WIDTH)
    gate, value = c @ mlp.up.weight[:INNER].T, c @ mlp.up.weight[INNER:].T
    assert torch.allclose(mlp(c), (gate / (1 + torch.exp(-gate)) * value) @ mlp.down.weight.T, atol=1e-12)


def test_a_gate_that_starts_open_has_one_more_number():
    h, delta = random(2, 4, WIDTH), random(2, 4, WIDTH, seed=1)
    gate = QueryKeyGate(WIDTH, start=0.9)
    assert torch.sigmoid(gate.opening).item() == pytest.approx(0.9)
    gate = shaken(gate)
    logits = (h @ gate.query.weight.T) * (delta @ gate.key.weight.T) / gate.temperature + gate.opening
    assert torch.allclose(gate(h, delta), torch.sigmoid(logits), atol=1e-12)


def test_a_gate_of_the_token_is_one_number_for_all_its_dimensions():
    gate = shaken(TokenGate(WIDTH, start=0.5))
    h, delta = random(2, 4, WIDTH), random(2, 4, WIDTH, seed=1)
    logits = h @ gate.query.weight[0] + delta @ gate.key.weight[0] + gate.opening
    assert torch.allclose(gate(h, delta)[..., 0], torch.sigmoid(logits), atol=1e-12)
    assert gate(h, delta).shape == (2, 4, 1)


def test_a_diagonal_gate_is_a_query_key_gate_whose_matrices_are_diagonal():
    h, delta = random(2, 4, WIDTH), random(2, 4, WIDTH, seed=1)
    assert torch.allclose(DiagonalGate(WIDTH, start=0.9)(h, delta), torch.full_like(h, 0.9))
    diagonal, full = shaken(DiagonalGate(WIDTH)), QueryKeyGate(WIDTH, start=0.9).double()
    with torch.no_grad():
        full.query.weight.copy_(torch.diag(diagonal.product))
        full.key.weight.copy_(torch.eye(WIDTH))
        full.temperature.fill_(1)
        diagonal.opening.fill_(0.7)
        full.opening.fill_(0.7)
    assert torch.allclose(diagonal(h, delta), full(h, delta), atol=1e-12)
    with torch.no_grad():  # a b for each dimension
        diagonal.opening.copy_(random(WIDTH, seed=2))
    logits = diagonal.product * h * delta + random(WIDTH, seed=2)
    assert torch.allclose(diagonal(h, delta), torch.sigmoid(logits), atol=1e-12)


def test_a_narrow_table_of_tokens_is_widened_before_the_first_step_and_narrowed_for_the_head():
    embeddings = shaken(TokenPositionEmbeddings(9, None, WIDTH, dropout=0.0, eps=1e-5, token_size=4))
    ids = torch.tensor([[1, 5, 8]])
    wide = embeddings.token.weight[ids] @ embeddings.widen.weight.T
    assert torch.allclose(embeddings(embeddings.token(ids), ids), layer_norm(wide, embeddings.norm), atol=1e-12)
    head = shaken(VocabularyHead(WIDTH, 9, transform=True, eps=1e-5, token_size=4))
    h = random(5, WIDTH)
    narrow = layer_norm(gelu(h @ head.transform.weight.T + head.transform.bias), head.norm)
    assert narrow.shape == (5, 4)
    assert torch.allclose(head(h), narrow @ head.decoder.weight.T + head.decoder.bias, atol=1e-12)


def test_the_gated_feed_forward_net_multiplies_half_of_its_inner_states_with_the_other():
    ffn = shaken(GatedFeedForward(WIDTH, INNER, dropout=0.0))
    h = random(4, WIDTH)
    up = h @ ffn.up.weight.T + ffn.up.bias
    expected = gelu(up[:, :INNER]) * up[:, INNER:] @ ffn.down.weight.T + ffn.down.bias
    assert torch.allclose(ffn(h), expected, atol=1e-12)


SETTINGS = {"vocab_size": 9, "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": INNER, "dropout": 0.0}


def refiner_of(kind=None, **settings):
    config = pnn.PNNConfig(**SETTINGS, **settings)
    return (kind or UPDATES[config.update])(config)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"delta_norm": True, "gate_bias": True},
        {"gate": "none"},
        {"gate": "none", "delta_norm": True},
        {"gate": "token"},
        {"update": "delta"},
        {"update": "delta", "delta_norm": True},
        {"update": "rewrite"},
        {"update": "rewrite", "gate_start": 0.9, "gate_bias": True},
        {"update": "rewrite", "gate": "none"},
        {"update": "rewrite", "gate": "token"},
        {"update": "rewrite", "gate": "diagonal"},
        {"gate": "diagonal"},
    ],
)
def test_a_refiner_is_its_equations(settings):
    refiner = shaken(refiner_of(**settings))
    update, gate = settings.get("update", "gated"), refiner.gate
    h = random(5, WIDTH, seed=3)
    attended = layer_norm(h + attention_by_hand(refiner.attention, h), refiner.attention_norm)
    ffn = refiner.ffn
    delta = gelu(attended @ ffn.up.weight.T + ffn.up.bias) @ ffn.down.weight.T + ffn.down.bias
    if update == "rewrite":
        delta = layer_norm(attended + delta, refiner.delta_norm) - h
    elif settings.get("delta_norm"):
        delta = layer_norm(delta, refiner.delta_norm)
    result = refiner.refine(h[None], Layout())
    assert torch.allclose(result.raw[0], delta, atol=1e-10)
    if update == "delta":
        written = attended @ refiner.write.weight.T + refiner.write.bias
        v, beta = written[:, :1], 2 / (1 + torch.exp(-written[:, 1:]))
        k = delta / (delta.square().sum(-1, keepdim=True) + 1).sqrt()
        expected = beta * k * (v - (k * h).sum(-1, keepdim=True))
    else:
        expected = delta if gate is None else gate(h, delta) * delta
    assert (result.gate is None) == (gate is None)
    if gate is not None:
        assert torch.allclose(result.gate[0], gate(h, delta), atol=1e-10)
    assert torch.allclose(result.delta[0], expected, atol=1e-10)
    assert torch.allclose(refiner(h[None], Layout())[0], h + expected, atol=1e-10)  # by its fast form
    assert expected.abs().max() > 0.1


def test_rewriting_without_a_gate_is_a_bert_layer():
    refiner = shaken(refiner_of(update="rewrite", gate="none"))
    layer = TransformerLayer(pnn.BertBaselineConfig(**SETTINGS)).double()
    layer.load_state_dict({name.replace("delta_norm", "ffn_norm"): value for name, value in refiner.state_dict().items()})
    h = random(2, 5, WIDTH, seed=3)
    assert torch.equal(refiner(h, Layout()), layer(h, Layout()))


def test_a_rule_of_ones_own_never_takes_anothers_fast_form():
    class Halved(Gated):
        def change(self, h, raw, a):
            delta, gate = super().change(h, raw, a)
            return delta / 2, gate

    whole, half = (shaken(refiner_of(kind)) for kind in (Gated, Halved))
    half.load_state_dict(whole.state_dict())
    h = random(1, 5, WIDTH, seed=3)
    assert torch.allclose(half(h, Layout()) - h, (whole(h, Layout()) - h) / 2, atol=1e-12)


def test_only_the_last_ffn_matrix_is_marked_to_start_at_zero():
    for zero_init in (True, False):
        refiner = refiner_of(delta_norm=True, gate_bias=True, zero_init=zero_init)
        marked = [name for name, module in refiner.named_modules() if getattr(module, "zero_start", False)]
        assert marked == (["ffn.down"] if zero_init else [])
    assert not any(getattr(module, "zero_start", False) for module in refiner_of(update="rewrite").modules())


@pytest.mark.parametrize("lengths", [None, (6, 2, 4)])
def test_a_transformer_layer_equals_torchs(lengths):
    ours = shaken(TransformerLayer(pnn.BertBaselineConfig(**SETTINGS)))
    theirs = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.0, activation="gelu", batch_first=True).double()
    theirs.self_attn.in_proj_weight.data.copy_(ours.attention.qkv.weight.data)
    theirs.self_attn.in_proj_bias.data.copy_(ours.attention.qkv.bias.data)
    for mine, other in (
        (ours.attention.out, theirs.self_attn.out_proj),
        (ours.attention_norm, theirs.norm1),
        (ours.ffn.up, theirs.linear1),
        (ours.ffn.down, theirs.linear2),
        (ours.ffn_norm, theirs.norm2),
    ):
        other.load_state_dict(mine.state_dict())
    h = random(3, 6, WIDTH, seed=4)
    keep = torch.ones(3, 6, dtype=torch.bool) if lengths is None else torch.arange(6) < torch.tensor(lengths)[:, None]
    mask = None if lengths is None else ~keep
    expected = theirs(h, src_key_padding_mask=mask)[keep]
    assert torch.allclose(ours(h, Layout(keep=None if lengths is None else keep))[keep], expected, atol=1e-10)
    borders = torch.tensor([0, *(lengths or (6, 6, 6))]).cumsum(0).to(torch.int32)
    assert torch.allclose(ours(h[keep][None], Layout(cu_seqlens=borders))[0], expected, atol=1e-10)


def test_embeddings_add_positions_and_normalise():
    module = shaken(TokenPositionEmbeddings(9, 7, WIDTH, dropout=0.0, eps=1e-5))
    tokens, positions = random(2, 4, WIDTH), torch.tensor([[0, 1, 2, 3], [0, 1, 0, 6]])
    expected = layer_norm(tokens + module.position.weight[positions], module.norm)
    assert torch.allclose(module(tokens, positions), expected, atol=1e-12)


@pytest.mark.parametrize("transform", [False, True])
def test_the_vocabulary_head_is_a_matrix_behind_an_optional_transform(transform):
    head = shaken(VocabularyHead(WIDTH, 9, transform=transform, eps=1e-5))
    h = random(4, WIDTH)
    x = layer_norm(gelu(h @ head.transform.weight.T + head.transform.bias), head.norm) if transform else h
    assert torch.allclose(head(h), x @ head.decoder.weight.T + head.decoder.bias, atol=1e-12)
