"""Read, compare, overwrite: the rank-1 rewrite of Deep Delta Learning, and what carries a state of several channels.

    X⁺ = X + β k (vᵀ − kᵀX) = (I − β k kᵀ) X + β k vᵀ        k ∈ Rᵈ with ‖k‖ ≤ 1, v ∈ Rᶜ, β ∈ (0, 2), X ∈ Rᵈˣᶜ per token

Along k the read-out kᵀX moves towards v (with ‖k‖ = 1 the error e = kᵀX − vᵀ becomes (1 − β) e: at β = 1 the read-out is v
exactly); every direction orthogonal to k is left as it was. Here X is kept as its c rows of d numbers, (…, c, d), so that a
channel lies together in memory; a vector state is c = 1.

A sublayer works at width d whatever c is: it compresses X to x, processes c̄ = norm(x) with a branch F, and rewrites X.

    channel compressor   x[t] = Σ_j w_j ⊙ X_j[t]                token compressor   x[t] = Σ_s Σ_j w_sj ⊙ X_j[t − s]
    input expansion      X_j[t] = Σ_s w_sj ⊙ e[t − s]           (starts as a repetition of the embedding e)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIRECTION_EPS = 1e-5  # in the length of a direction


def soft_unit(k: Tensor, eps: float = 1.0) -> Tensor:
    """k / √(‖k‖² + ε²): a unit vector for long k. With ε = 1 a zero k stays zero and has a gradient of order one,
    which a zero-initialised module needs (a tiny ε would multiply its first gradient by 1/ε)."""
    return k * torch.rsqrt(k.square().sum(-1, keepdim=True) + eps * eps)


def read(x: Tensor, k: Tensor) -> Tensor:
    """kᵀX: (…, c, d), (…, d) → (…, c)."""
    return (x * k.unsqueeze(-2)).sum(-1)


def rewrite_delta(x: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """What `rewrite` adds to X."""
    return (beta * (v - read(x, k))).unsqueeze(-1) * k.unsqueeze(-2)


def rewrite(x: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """X + β k (vᵀ − kᵀX). x: (…, c, d), k: (…, d), v: (…, c), beta: (…, 1)."""
    return x + rewrite_delta(x, k, v, beta)


def write_only(x: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """X + β k vᵀ: the same write without the erasure."""
    return x + (beta * v).unsqueeze(-1) * k.unsqueeze(-2)


# What a sublayer does with its branch's output ----------------------------------------------------------------------


class Write(NamedTuple):
    """What is written where: direction k (…, d), value v (…, c), gate β (…, 1), the last two in fp32."""

    direction: Tensor
    value: Tensor
    beta: Tensor


class DeltaResidual(nn.Module):
    """The branch gives the direction, the context the value and the gate.

    k = F(c̄) / √(‖F(c̄)‖² + ε²),   β = 2σ(w_β c̄ + b_β)
    published code:  v = 4σ(W_v x + b_v), from the raw compressed state          paper:  v = W_v c̄
    """

    def __init__(self, hidden_size: int, channels: int, variant: str, erase: bool):
        super().__init__()
        self.value = nn.Linear(hidden_size, channels, bias=variant == "code")
        self.gate = nn.Linear(hidden_size, 1)
        self.gate.role = "gate"  # type: ignore[assignment]  # its bias starts where β = β₀; for the model's initialiser
        self.variant, self.erase = variant, erase

    def write(self, branch: Tensor, x: Tensor, context: Tensor) -> Write:
        value = 4 * torch.sigmoid(self.value(x).float()) if self.variant == "code" else self.value(context).float()
        return Write(soft_unit(branch.float(), DIRECTION_EPS), value, 2 * torch.sigmoid(self.gate(context).float()))

    def forward(self, state: Tensor, branch: Tensor, x: Tensor, context: Tensor) -> Tensor:
        """The next state. `branch` is F(c̄), `x` the compressed state, `context` c̄."""
        rule = rewrite if self.erase else write_only
        return rule(state.float(), *self.write(branch, x, context)).to(state.dtype)


class AdditiveResidual(nn.Module):
    """X⁺ = X + F(c̄) wᵀ, with w = 1 for a vector state: the residual connection that everybody uses, and its counterpart for
    several channels, which separates what they hold from how they are written."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels)) if channels > 1 else None

    def forward(self, state: Tensor, branch: Tensor, x: Tensor, context: Tensor) -> Tensor:
        if self.weight is None:
            return state + branch.unsqueeze(-2)
        return state + self.weight[:, None].to(state.dtype) * branch.unsqueeze(-2)


# In and out of several channels -------------------------------------------------------------------------------------


class Squeeze(nn.Module):
    """A vector state needs no compressor: x = X."""

    def forward(self, state: Tensor, history: Tensor | None = None) -> Tensor:
        return state.squeeze(-2)


class ChannelCompressor(nn.Module):
    """x = Σ_j w_j ⊙ X_j. The paper has w itself; the published code has a correlation along the channels, one kernel of c taps
    a feature (zeros beyond the edges), and then a weighted sum of its c outputs by `read`. Together they are a w too."""

    def __init__(self, hidden_size: int, channels: int, variant: str):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(channels, hidden_size))
        self.read = nn.Parameter(torch.full((channels,), 1 / channels)) if variant == "code" else None

    def weights(self) -> Tensor:
        """w, (c, d)."""
        if self.read is None:
            return self.kernel
        size = len(self.kernel)
        left = (size - 1) // 2  # zeros before the first channel: output p reads channel j through tap j − p + left
        padded = F.pad(self.kernel, (0, 0, size - 1 - left, left))
        windows = padded.unfold(0, size, 1).transpose(1, 2)  # (p from the last to the first, j, d)
        return (windows * self.read.flip(0)[:, None, None]).sum(0)

    def forward(self, state: Tensor, history: Tensor | None = None) -> Tensor:
        return (state * self.weights().to(state.dtype)).sum(-2)


def with_history(x: Tensor, size: int, history: Tensor | None) -> Tensor:
    """x (B, T, …) with the `size` − 1 steps before it: `history`, or zeros at the start of a text."""
    if history is None:
        history = x.new_zeros(x.shape[0], size - 1, *x.shape[2:])  # len(x) would fix the batch in an exported graph
    return torch.cat((history.to(x.dtype), x), dim=1)


def over_tokens(x: Tensor, weights: Tensor, history: Tensor | None) -> Tensor:
    """Σ_s weights[s] ⊙ x[t − s]: a causal convolution over tokens, each feature by itself. x: (B, T, …)."""
    size, length = len(weights), x.shape[1]
    padded = with_history(x, size, history)
    weights = weights.to(x.dtype)
    total = weights[0] * x
    for s in range(1, size):
        total = total + weights[s] * padded[:, size - 1 - s :][:, :length]
    return total


class TokenCompressor(nn.Module):
    """x[t] = Σ_j read_j Σ_s kernel_sj ⊙ X_j[t − s]."""

    def __init__(self, hidden_size: int, channels: int, kernel_size: int):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(kernel_size, channels, hidden_size))
        self.read = nn.Parameter(torch.full((channels,), 1 / channels))

    def weights(self) -> Tensor:
        """w, (s, c, d)."""
        return self.kernel * self.read[:, None]

    def forward(self, state: Tensor, history: Tensor | None = None) -> Tensor:
        return over_tokens(state, self.weights(), history).sum(-2)


class InputExpansion(nn.Module):
    """X_j[t] = Σ_s kernel_sj ⊙ e[t − s]."""

    def __init__(self, hidden_size: int, channels: int, kernel_size: int):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(kernel_size, channels, hidden_size))

    def identity(self) -> Tensor:
        """Where it starts: the embedding, repeated."""
        kernel = torch.zeros_like(self.kernel)
        kernel[0] = 1.0
        return kernel

    def forward(self, embeddings: Tensor, history: Tensor | None = None) -> Tensor:
        return over_tokens(embeddings.unsqueeze(-2), self.kernel, None if history is None else history.unsqueeze(-2))


class Repetition(nn.Module):
    """X_j = e for every channel."""

    def __init__(self, channels: int):
        super().__init__()
        self.channels = channels

    def forward(self, embeddings: Tensor, history: Tensor | None = None) -> Tensor:
        return embeddings.unsqueeze(-2).expand(*embeddings.shape[:-1], self.channels, -1)
