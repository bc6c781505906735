"""The algebra of the rewrite: what the paper says about it holds for any numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pnn.nn import delta_rule

shapes = st.tuples(st.integers(1, 4), st.integers(2, 12), st.integers(0, 2**31 - 1))


def drawn(shape):
    channels, width, seed = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, channels, width, generator=generator, dtype=torch.float64)
    k = torch.nn.functional.normalize(torch.randn(3, width, generator=generator, dtype=torch.float64), dim=-1)
    return x, k, torch.randn(3, channels, generator=generator, dtype=torch.float64)


@given(shapes)
def test_a_closed_gate_is_the_identity_to_the_bit(shape):
    x, k, v = drawn(shape)
    assert torch.equal(delta_rule.rewrite(x, k, v, torch.zeros(3, 1, dtype=x.dtype)), x)
    assert torch.equal(delta_rule.write_only(x, k, v, torch.zeros(3, 1, dtype=x.dtype)), x)


@given(shapes)
def test_at_one_the_readout_is_the_target(shape):
    x, k, v = drawn(shape)
    after = delta_rule.rewrite(x, k, v, torch.ones(3, 1, dtype=x.dtype))
    assert torch.allclose(delta_rule.read(after, k), v, atol=1e-12)


@given(shapes, st.floats(0, 2))
def test_the_error_contracts_by_one_less_beta(shape, beta):
    x, k, v = drawn(shape)
    after = delta_rule.rewrite(x, k, v, torch.full((3, 1), beta, dtype=x.dtype))
    before_error, after_error = delta_rule.read(x, k) - v, delta_rule.read(after, k) - v
    assert torch.allclose(after_error, (1 - beta) * before_error, atol=1e-12)


@given(shapes, st.floats(0, 2))
def test_what_is_orthogonal_to_the_direction_does_not_move(shape, beta):
    x, k, v = drawn(shape)
    after = delta_rule.rewrite(x, k, v, torch.full((3, 1), beta, dtype=x.dtype))
    moved = after - x
    along = delta_rule.read(moved, k).unsqueeze(-1) * k.unsqueeze(-2)
    assert torch.allclose(moved, along, atol=1e-12)


@given(shapes, st.floats(0, 2))
def test_the_shortcut_has_one_eigenvalue_of_one_less_beta(shape, beta):
    """A = I − β k kᵀ: rewriting the columns of the identity with v = 0."""
    _, width, _ = shape
    _, k, _ = drawn(shape)
    identity = torch.eye(width, dtype=torch.float64).expand(3, -1, -1)  # its rows are channels
    shortcut = delta_rule.rewrite(
        identity, k, torch.zeros(3, width, dtype=torch.float64), torch.full((3, 1), beta, dtype=torch.float64)
    )
    eigenvalues = torch.linalg.eigvalsh(shortcut).sort().values
    wanted = torch.tensor([*([1 - beta] if beta >= 0 else []), *[1.0] * (width - 1)], dtype=torch.float64).sort().values
    assert torch.allclose(eigenvalues, wanted.expand(3, -1), atol=1e-10)
    assert torch.allclose(torch.linalg.det(shortcut), torch.full((3,), 1 - beta, dtype=torch.float64), atol=1e-10)


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(0, 1000))
def test_the_published_channel_compressor_is_a_correlation_and_a_weighted_sum(channels, seed):
    torch.manual_seed(seed)
    width = 6
    compressor = delta_rule.ChannelCompressor(width, channels, "code")
    torch.nn.init.normal_(compressor.kernel)
    torch.nn.init.normal_(compressor.read)
    x = torch.randn(2, 3, channels, width)
    left = (channels - 1) // 2
    padded = torch.nn.functional.pad(x.transpose(-1, -2), (left, channels - 1 - left))  # (2, 3, width, channels + …)
    same_length = torch.stack(
        [(padded[..., p : p + channels] * compressor.kernel.t()).sum(-1) for p in range(channels)], dim=-1
    )
    assert torch.allclose(compressor(x), same_length @ compressor.read, atol=1e-5)


def test_token_compressor_and_expansion_look_back_and_never_ahead():
    torch.manual_seed(0)
    compressor, expansion = delta_rule.TokenCompressor(5, 3, 4), delta_rule.InputExpansion(5, 3, 4)
    for module in (compressor, expansion):
        torch.nn.init.normal_(module.kernel)
    state, embeddings = torch.randn(2, 9, 3, 5), torch.randn(2, 9, 5)
    for module, x in ((compressor, state), (expansion, embeddings)):
        changed = x.clone()
        changed[:, 5] += 1
        moved = (module(changed) - module(x)).abs().flatten(2).amax((0, 2)) > 1e-6
        assert moved.tolist() == [t in range(5, 9) for t in range(9)]
    weights = compressor.kernel * compressor.read[:, None]
    by_hand = sum((weights[s] * state[:, 6 - s]).sum(-2) for s in range(4))
    assert torch.allclose(compressor(state)[:, 6], by_hand, atol=1e-6)


@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("variant", ["code", "paper"])
def test_generators_of_both_variants(variant, erase):
    torch.manual_seed(0)
    residual = delta_rule.DeltaResidual(8, 3, variant, erase)
    state, branch, x, c = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    write = residual.write(branch, x, c)
    assert torch.allclose(write.direction.norm(dim=-1), torch.ones(2, 5), atol=1e-5)
    assert torch.allclose(write.beta, 2 * torch.sigmoid(c @ residual.gate.weight.t() + residual.gate.bias))
    assert (write.beta > 1).any()  # it can turn a reading round, not only fade it
    if variant == "code":  # 4σ(W x + b) of the raw state
        assert torch.allclose(write.value, 4 * torch.sigmoid(x @ residual.value.weight.t() + residual.value.bias))
    else:  # W c, no bias
        assert residual.value.bias is None
        assert torch.allclose(write.value, c @ residual.value.weight.t())
    kept = 1 - write.beta.unsqueeze(-1) if erase else 1.0
    along = delta_rule.read(state, write.direction).unsqueeze(-1)
    after = delta_rule.read(residual(state, branch, x, c), write.direction).unsqueeze(-1)
    assert torch.allclose(after, kept * along + write.beta.unsqueeze(-1) * write.value.unsqueeze(-1), atol=1e-4)


def test_a_direction_as_short_as_its_eps_is_shortened_by_the_root_of_two():
    k = torch.tensor([3.0, 4.0]) * delta_rule.DIRECTION_EPS / 5
    assert torch.allclose(delta_rule.soft_unit(k, delta_rule.DIRECTION_EPS).norm(), torch.tensor(0.5).sqrt())


def test_channels_that_are_written_by_addition_have_a_weight_each():
    state, branch = torch.randn(2, 3, 8), torch.randn(2, 8)
    residual = delta_rule.AdditiveResidual(3)
    assert torch.equal(residual(state, branch, branch, branch), state + branch[:, None])  # it starts as plain addition
    with torch.no_grad():
        residual.weight.copy_(torch.tensor([0.0, 1.0, -2.0]))
    written = residual(state, branch, branch, branch) - state
    assert torch.allclose(written, torch.stack((0 * branch, branch, -2 * branch), dim=1), atol=1e-6)
