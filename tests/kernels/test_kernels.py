"""Every kernel equals its plain twin in values and gradients, dropout included (the twin draws the same mask).

On a GPU the kernels run in 16 bit against double precision; without one Triton's interpreter runs them in fp32 (conftest.py
asks for it). Run both: the interpreter cannot see what the compiler does.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or with the dev extra")

from pnn.kernels import (
    attention,
    cross_entropy,
    diagonal_gate,
    divergence,
    gate,
    llama,
    norm,
    pointwise,
    random,
    recall,
    refinement,
)
from pnn.nn.rotary import rotation

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}

every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)
with_dropout = pytest.mark.parametrize("p", [0.0, 0.3])


def close(fast, plain, dtype):
    scale = max(plain.norm().item(), 1e-12)
    return (fast.double() - plain).norm().item() / scale < TOLERANCE[dtype]


def seed_drawn(p):
    """The seed that a kernel draws after the same manual_seed."""
    torch.manual_seed(7)
    return random.seed_for(torch.empty(0, device=DEVICE), p).item()


def keep_mask(rows, columns, seed, probability):
    """The kernels' mask in plain torch: `rows` and `columns` are places that broadcast."""
    low = random.LOW32

    def mixed(x):
        x = x & low
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & low
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & low
        return x ^ (x >> 16)

    x = mixed(mixed(rows) ^ seed) ^ mixed(columns + 0x9E3779B9)
    return ((x * 0x9E3779B1) & low) >= random.threshold(probability)


def mask(rows, columns, p):
    places = torch.arange(rows, device=DEVICE)[:, None], torch.arange(columns, device=DEVICE)[None]
    return keep_mask(*places, seed_drawn(p), p).double() / (1 - p)


def both(fast, plain, inputs, dtype):
    """Values and gradients of a kernel in `dtype` and of its twin in double precision."""
    torch.manual_seed(1)
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    expected = plain(*leaves)
    grad = torch.randn(expected.shape, device=DEVICE, dtype=dtype)
    expected_grads = torch.autograd.grad(expected, leaves, grad.double())
    torch.manual_seed(7)
    out = fast(*inputs)
    grads = torch.autograd.grad(out, inputs, grad.to(out.dtype))
    assert close(out, expected, dtype)
    for got, wanted, leaf in zip(grads, expected_grads, inputs, strict=True):
        assert got.dtype == leaf.dtype
        assert close(got, wanted, dtype)


def leaf(*shape, dtype):
    return torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_()


@every_type
@with_dropout
@pytest.mark.parametrize(("longest", "lengths"), [(32, [5, 32, 1, 17, 0, 16]), (128, [3, 128, 64, 65, 0, 100]), (9, [9, 2])])
def test_attention(dtype, p, longest, lengths):
    heads, width = (12, 64) if ON_GPU else (2, 16)
    torch.manual_seed(0)
    tokens = sum(lengths)
    borders = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    qkv = leaf(tokens, 3, heads, width, dtype=dtype)
    kept = mask(tokens * heads, longest, p).view(tokens, heads, longest)

    def plain(x):
        outs = []
        for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            q, k, v = x[start:stop].unbind(1)
            weights = torch.softmax(torch.einsum("qhd,khd->qhk", q, k) * width**-0.5, -1)
            outs.append(torch.einsum("qhk,khd->qhd", weights * kept[start:stop, :, : stop - start], v))
        return torch.cat(outs)

    both(lambda x: attention.short_attention(x, borders, longest, p), plain, [qkv], dtype)


def test_attention_reads_queries_keys_and_values_out_of_a_wider_row():
    """A projection may hold more than q, k and v side by side."""
    dtype = DTYPES[0]
    wide = torch.randn(20, 4, 2, 16, device=DEVICE, dtype=dtype)
    borders = torch.tensor([0, 9, 20], dtype=torch.int32, device=DEVICE)
    narrow = wide[:, :3].contiguous()
    assert torch.equal(attention.short_attention(wide[:, :3], borders, 16), attention.short_attention(narrow, borders, 16))


def test_attention_says_what_it_takes():
    assert attention.takes(64, 128)
    assert not attention.takes(64, 129)
    assert not attention.takes(48, 128)


@every_type
@with_dropout
@pytest.mark.parametrize("shape", [(1, 50, 24), (7, 130)])
def test_dropout_and_gelu(dtype, p, shape):
    kept = mask(shape[-2] if len(shape) > 1 else 1, shape[-1], p).view(shape)
    x = leaf(*shape, dtype=dtype)
    bias = leaf(shape[-1], dtype=torch.float32)
    both(lambda x, bias: pointwise.gelu_dropout(x, bias, p), lambda x, bias: F.gelu(x + bias) * kept, [x, bias], dtype)
    both(lambda x: pointwise.dropout(x, p), lambda x: x * kept, [x], dtype)


# Triton's interpreter is slow: without a GPU each combination of three settings is tried, not each of four
NORMS = [
    (p, has_residual, has_bias, shape)
    for p, has_residual, has_bias in product([0.0, 0.3], [True, False], [True, False])
    for number, shape in enumerate([(50, 24), (1, 64)] + ([(5000, 768), (5000, 1536)] if ON_GPU else []))
    if ON_GPU or (p > 0) ^ has_residual ^ has_bias == number
]


@every_type
@pytest.mark.parametrize(("p", "has_residual", "has_bias", "shape"), NORMS)
def test_norm(dtype, p, has_residual, has_bias, shape):
    rows, width = shape
    kept = mask(rows, width, p)
    x, weight, bias = leaf(rows, width, dtype=dtype), leaf(width, dtype=torch.float32), leaf(width, dtype=torch.float32)
    residual = [leaf(rows, width, dtype=dtype)] if has_residual else []
    shift = [leaf(width, dtype=torch.float32)] if has_bias else []

    def parts(rest):
        rest = list(rest)
        return (rest.pop(0) if has_bias else None), (rest.pop(0) if has_residual else None)

    def fast(x, weight, bias, *rest):
        return norm.dropout_add_norm(x, *parts(rest), weight, bias, 1e-5, p, dtype)

    def plain(x, weight, bias, *rest):
        shift, residual = parts(rest)
        summed = (x if shift is None else x + shift) * kept
        return F.layer_norm(summed if residual is None else residual + summed, (width,), weight, bias, 1e-5)

    both(fast, plain, [x, weight, bias, *shift, *residual], dtype)


@every_type
@pytest.mark.parametrize("shape", [(1, 37, 24), (5, 768)])
def test_gated_update(dtype, shape):
    torch.manual_seed(0)
    inputs = [leaf(*shape, dtype=dtype) for _ in range(4)]
    temperature = torch.tensor([1.7], device=DEVICE, requires_grad=True)

    def plain(h, q, k, delta, temperature):
        return h + torch.sigmoid(q * k / temperature) * delta

    both(gate.gated_update, plain, [*inputs, temperature], dtype)


@every_type
@pytest.mark.parametrize("shape", [(1, 37, 24), (5, 768)])
def test_diagonal_gated_update(dtype, shape):
    """37 rows are more than one program of the backward pass adds up."""
    torch.manual_seed(0)
    assert shape[0] == 5 or shape[1] > diagonal_gate.ROWS
    inputs = [leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype), *(leaf(shape[-1], dtype=torch.float32) for _ in range(2))]

    def plain(h, delta, product, opening):
        return h + torch.sigmoid(product * h * delta + opening) * delta

    both(diagonal_gate.gated_update, plain, inputs, dtype)


@every_type
@pytest.mark.parametrize("shape", [(1, 37, 24), (5, 768)])
def test_recall(dtype, shape):
    torch.manual_seed(0)
    inputs = [leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype), leaf(shape[-1], dtype=torch.float32)]

    def plain(h, origin, share):
        return h + share * (origin - h)

    both(recall.recall, plain, inputs, dtype)


@every_type
@pytest.mark.parametrize("chunk", [16, 32, 1000])
@pytest.mark.parametrize("vocabulary", [301, 128])
def test_linear_cross_entropy(dtype, chunk, vocabulary, monkeypatch):
    torch.manual_seed(0)
    rows, width = 40, 32
    x, weight, bias = (leaf(*s, dtype=torch.float32) for s in ((rows, width), (vocabulary, width), (vocabulary,)))
    labels = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    labels[::9] = -100
    weights = torch.rand(rows, device=DEVICE)
    total, losses = cross_entropy._LinearCrossEntropy.apply(x, weight, bias, labels, weights, dtype, chunk)
    grads = torch.autograd.grad(3 * total, (x, weight, bias))
    leaves = [t.detach().to(dtype).double().requires_grad_() for t in (x, weight)] + [bias.detach().double().requires_grad_()]
    expected = F.cross_entropy(F.linear(*leaves), labels, reduction="none", ignore_index=-100)
    wanted = torch.autograd.grad(3 * (expected * weights).sum(), leaves)
    assert close(total, (expected * weights).sum(), dtype)
    assert torch.allclose(losses.double(), expected, atol=20 * TOLERANCE[dtype])
    for got, want in zip(grads, wanted, strict=True):
        assert close(got, want, dtype)
    assert torch.count_nonzero(grads[0][::9]) == 0


def test_rows_without_labels_alone_give_zero_loss_and_zero_gradients():
    x, weight, bias = (leaf(*s, dtype=torch.float32) for s in ((5, 16), (33, 16), (33,)))
    labels = torch.full((5,), -100, device=DEVICE)
    total, losses = cross_entropy.linear_cross_entropy(x, weight, bias, labels, torch.ones(5, device=DEVICE), DTYPES[0])
    assert total.item() == 0
    assert losses.tolist() == [0] * 5
    assert all(torch.count_nonzero(g) == 0 for g in torch.autograd.grad(total, (x, weight, bias)))


def test_the_mask_keeps_the_right_share_in_every_row_and_column_and_differs_between_seeds():
    places = torch.arange(2000)[:, None], torch.arange(768)[None]
    kept = keep_mask(*places, 12345, 0.1).double()
    assert abs(kept.mean() - 0.9) < 1e-3
    for dim, other in ((0, 2000), (1, 768)):
        z = (kept.mean(dim) - 0.9) / (0.09 / other) ** 0.5  # standard normal if entries are independent
        assert abs(z.mean()) < 0.2
        assert abs(z.std() - 1) < 0.1
    again = keep_mask(*places, 54321, 0.1).double()
    assert abs(torch.corrcoef(torch.stack((kept.flatten(), again.flatten())))[0, 1]) < 5e-3
    for shift in (1, 2, 64):  # neighbours in a row and in a column know nothing of each other
        assert abs(torch.corrcoef(torch.stack((kept[:, :-shift].flatten(), kept[:, shift:].flatten())))[0, 1]) < 5e-3
        assert abs(torch.corrcoef(torch.stack((kept[:-shift].flatten(), kept[shift:].flatten())))[0, 1]) < 5e-3


SOME = [3, 0, 7, 11, 3]
RULES = [
    "equations",
    "published",
    "rewrite",
    "rewrite, turned",
    "equations, diagonal",
    "rewrite, diagonal",
    "rewrite, gateless",
]
STEPS = [  # without a GPU any two of rule, dropout and tokens meet, not any three
    (rule, p, at)
    for number, rule in enumerate(RULES)
    for p, at in product([0.0, 0.3], [None, SOME])
    if ON_GPU or (p > 0) ^ (at is None) == number % 2
]


@every_type
@pytest.mark.parametrize(("rule", "p", "at"), STEPS)
def test_a_whole_refinement_step(dtype, rule, p, at):
    """The step that is written out against its equations, with the four dropout masks that it draws from its seeds; for every
    token, and for a few (one of them asked for twice)."""
    at = None if at is None else torch.tensor(at, device=DEVICE)
    torch.manual_seed(0)
    normed, published, rewrites = not rule.startswith("equations"), rule == "published", rule.startswith("rewrite")
    heads, width, inner = (4, 64, 96) if ON_GPU else (2, 32, 40)
    lengths, longest = [2, 9, 1, 0], 16
    tokens = sum(lengths)
    borders = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    seeds = torch.randint(0, 2**31 - 1, (4,), device=DEVICE)

    def matrix(*shape):
        return (0.3 * torch.randn(*shape, device=DEVICE)).to(dtype).float().requires_grad_()  # exact in 16 bit

    if "diagonal" in rule:
        gate_weights = {"product": matrix(width), "opening": matrix(width)}
    elif "gateless" in rule:
        gate_weights = {}
    else:
        gate_weights = {"query": matrix(width, width), "query_bias": matrix(width) if published else None}
        gate_weights |= {"key": matrix(width, width), "key_bias": matrix(width) if published else None}
        gate_weights |= {"temperature": torch.tensor([3.0], device=DEVICE, requires_grad=True)}
        gate_weights |= {"opening": torch.tensor([1.5], device=DEVICE, requires_grad=True) if rewrites else None}
    given = refinement.Weights(
        *(matrix(3 * width, width), matrix(3 * width), matrix(width, width), matrix(width), matrix(width), matrix(width)),
        *(matrix(inner, width), matrix(inner), matrix(width, inner), matrix(width)),
        *((matrix(width), matrix(width)) if normed else (None, None)),
        **gate_weights,
    )
    settings = refinement.Settings(heads, longest, p, p, 1e-5, rewrites)
    h = leaf(1, tokens, width, dtype=dtype)
    places = torch.cat([torch.arange(length, device=DEVICE) for length in lengths])[None]
    turns = rotation(places, width // heads, 100.0) if "turned" in rule else None

    def kept(rows, columns, index):
        places = torch.arange(rows, device=DEVICE)[:, None], torch.arange(columns, device=DEVICE)[None]
        return keep_mask(*places, seeds[index].item(), p).double() / (1 - p)

    def plain(h, w):
        x = h[0]
        qkv = F.linear(x, w.qkv, w.qkv_bias).view(tokens, 3, heads, -1)
        if turns is not None:
            cos, sin = (part.double()[0, :, None, None] for part in turns)
            a, b = qkv[:, :2].chunk(2, dim=-1)
            qkv = torch.cat((torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1), qkv[:, 2:]), dim=1)
        attention_mask, outs = kept(tokens * heads, longest, 0).view(tokens, heads, longest), []
        for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            q, k, v = qkv[start:stop].unbind(1)
            weights = torch.softmax(torch.einsum("qhd,khd->qhk", q, k) * (width // heads) ** -0.5, -1)
            outs.append(torch.einsum("qhk,khd->qhd", weights * attention_mask[start:stop, :, : stop - start], v))
        context = torch.cat(outs).flatten(1)
        if at is not None:
            context, x = context[at], x[at]
        rows = len(x)
        attended = F.linear(context, w.out, w.out_bias) * kept(rows, width, 1)
        a = F.layer_norm(x + attended, (width,), w.norm, w.norm_bias, 1e-5)
        active = F.gelu(F.linear(a, w.up, w.up_bias)) * kept(rows, inner, 2)
        delta = F.linear(active, w.down, w.down_bias) * kept(rows, width, 3)
        if normed:
            delta = F.layer_norm(delta + a if rewrites else delta, (width,), w.delta, w.delta_bias, 1e-5)
        if rewrites:
            delta = delta - x
        if "gateless" in rule:
            return (x + delta)[None]
        if "diagonal" in rule:
            return (x + torch.sigmoid(w.product * x * delta + w.opening) * delta)[None]
        logits = F.linear(x, w.query, w.query_bias) * F.linear(delta, w.key, w.key_bias) / w.temperature
        return (x + torch.sigmoid(logits if w.opening is None else logits + w.opening) * delta)[None]

    doubles = refinement.Weights(*(None if t is None else t.detach().double().requires_grad_() for t in given))
    # τ and b for every number, so that their gradients' terms are seen: the sum may be small by chance, its error is not
    rows = tokens if at is None else len(at)
    scalars = {name: t for name in ("temperature", "opening") if (t := getattr(doubles, name)) is not None and len(t) == 1}
    doubles = doubles._replace(**{name: t.detach().expand(rows, width).clone().requires_grad_() for name, t in scalars.items()})
    double_h = h.detach().double().requires_grad_()
    expected = plain(double_h, doubles)
    grad = torch.randn(expected.shape, device=DEVICE, dtype=dtype)
    wanted = torch.autograd.grad(expected, [double_h, *(t for t in doubles if t is not None)], grad.double())
    out = refinement._Step.apply(h, at, borders, seeds, settings, turns, *given)
    got = torch.autograd.grad(out, [h, *(t for t in given if t is not None)], grad)
    tolerance = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 1e-5}[dtype]  # a dozen roundings in a row
    for one, other in zip((out, *got), (expected, *wanted), strict=True):
        found = other if one.shape == other.shape else other.sum()
        assert (one.double() - found).norm() <= tolerance * other.norm()


# Llama's blocks ---------------------------------------------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_rms_norm(dtype, rows):
    """From fp32 to 16 bit, as in training, and from what it is given."""
    width, eps = (576, 1e-5) if ON_GPU else (24, 1e-5)

    def plain(x, weight):
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    for given in {torch.float32, dtype}:
        torch.manual_seed(0)
        inputs = [leaf(rows, 2, width, dtype=given), leaf(width, dtype=torch.float32)]
        both(lambda x, weight: llama.rms_norm(x, weight, eps, dtype), plain, inputs, dtype)


@every_type
@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (2, 5, 1024)])
def test_swiglu(dtype, shape):
    torch.manual_seed(0)
    both(llama.swiglu, lambda gate, up: F.silu(gate) * up, [leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype)], dtype)


@every_type
@pytest.mark.parametrize("heads", [1, 3, 9])
@pytest.mark.parametrize("angles", [1, 2])
def test_rotate(dtype, heads, angles):
    """Of heads that lie token by token, as projections leave them; each row may have angles of its own."""
    rows, tokens, width = 2, 5, 16
    torch.manual_seed(0)
    cos, sin = (torch.randn(angles, tokens, width, device=DEVICE) for _ in range(2))  # any numbers: both halves are read

    def turned(x):
        return torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)

    def plain(x):
        x = x.transpose(1, 2)
        return x * cos.double()[:, None] + turned(x) * sin.double()[:, None]

    x = leaf(rows, tokens, heads, width, dtype=dtype)
    both(lambda x: llama.rotate(x.transpose(1, 2), cos, sin), plain, [x], dtype)
    assert llama.takes_heads(64)
    assert not llama.takes_heads(48)


@every_type
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("vocabulary", [40, 256, 300])
@pytest.mark.parametrize("has_told", [False, True])
def test_linear_divergence(dtype, has_bias, vocabulary, has_told, monkeypatch):
    """In several chunks, of models of different widths. In 16 bit logits are rounded, the more the larger they are."""
    monkeypatch.setattr(divergence, "CHUNK_BYTES", 5 * vocabulary * dtype.itemsize)
    rows, width, wider = 13, 16, 24
    torch.manual_seed(0)
    size, most = (0.25, 1) if ON_GPU else (1, 10)
    shapes = ((rows, width), (vocabulary, width), (rows, wider), (vocabulary, wider))
    h, weight, wanted, matrix = (size * torch.randn(*shape, device=DEVICE, dtype=dtype) for shape in shapes)
    h.requires_grad_()
    weight.requires_grad_()
    bias = (most * torch.rand(vocabulary, device=DEVICE, dtype=dtype)).requires_grad_() if has_bias else None
    offsets = None if bias is None else bias.detach()
    labels = torch.arange(rows, device=DEVICE) * (vocabulary - 1) // (rows - 1)  # the first column, the last, some between
    told = labels.masked_fill(labels % 2 == 1, -1) if has_told else None

    def plain(h, weight, *bias):
        q = F.log_softmax(h @ weight.T + sum(bias), -1)
        p = F.log_softmax(wanted.double() @ matrix.double().T + (0 if offsets is None else offsets.double()), -1)
        losses = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        return (losses if told is None else torch.where(told < 0, losses, F.nll_loss(q, labels, reduction="none"))).mean()

    def fast(h, weight, *bias):
        return divergence.linear_divergence(h, weight, bias[0] if bias else None, wanted, matrix, offsets, dtype, told)

    both(fast, plain, [h, weight, *([] if bias is None else [bias])], dtype)


@pytest.mark.parametrize("size", [1, 1000])
def test_a_model_does_not_diverge_from_itself(size):
    """However large its logits are: sums of exponentials must not overflow."""
    dtype = DTYPES[0]
    h, weight = (size * torch.randn(7, 16, device=DEVICE, dtype=dtype)).requires_grad_(), leaf(300, 16, dtype=dtype)
    loss = divergence.linear_divergence(h, weight, None, h.detach(), weight.detach(), None, dtype)
    loss.backward()
    assert loss.item() == 0
    assert h.grad.abs().max() == weight.grad.abs().max() == 0
