"""One projection of attention or of a feed-forward part, and where its heads or neurons lie in it.

A projection's weight holds its heads one after the other along one dimension, `width` numbers each; a fused projection does so
once for every role (all queries, then all keys, then all values). So head i of a layer with n heads owns, in role r,

    weight.narrow(dim, (r · n + i) · width, width)

and the same stretch of the bias where the bias runs along the heads: in queries, keys and values, not in the output
projection, whose bias belongs to no head. A neuron is one number wide; its roles are what gates it and what goes up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Stretch:
    """The part of one parameter that one head owns in one role."""

    role: str  # "q", "k", "v" or "o"; of a neuron "g", "u" or "o"
    parameter: nn.Parameter
    dim: int
    start: int
    width: int

    def view(self) -> Tensor:
        return self.of(self.parameter)

    def of(self, like: Tensor) -> Tensor:
        """The same part of something else of the parameter's shape, its gradient for one."""
        return like.narrow(self.dim, self.start, self.width)


@dataclass(frozen=True)
class Projection:
    """`module` is a Linear, whose weight is (out, in), or a GPT-2 Conv1D, whose weight is (in, out)."""

    module: nn.Module
    roles: str  # "qkv" for a fused projection, else one letter
    width: int  # numbers of one head in one role
    transposed: bool = False  # a Conv1D

    @property
    def is_output(self) -> bool:
        return self.roles == "o"

    @property
    def dim(self) -> int:
        """The dimension of the weight along which heads lie: what goes in for W_o, what comes out for the others."""
        return int(self.is_output != self.transposed)

    @property
    def weight(self) -> nn.Parameter:
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, if it runs along the heads."""
        bias = None if self.is_output else self.module.bias
        assert bias is None or isinstance(bias, nn.Parameter)
        return bias

    @property
    def count(self) -> int:
        return self.weight.shape[self.dim] // (len(self.roles) * self.width)

    def stretches(self, position: int) -> list[Stretch]:
        """What the head at this position owns: weights first, then biases."""
        starts = [(role, (at * self.count + position) * self.width) for at, role in enumerate(self.roles)]
        owned = [Stretch(role, self.weight, self.dim, start, self.width) for role, start in starts]
        if self.bias is not None:
            owned += [Stretch(role, self.bias, 0, start, self.width) for role, start in starts]
        return owned

    def rearrange(self, positions: Sequence[int | None]) -> None:
        """New parameters that hold the heads of these positions, in this order; None is a new head of zeros."""
        weight, bias = self.weight, self.bias
        if bias is not None:  # first: how many heads there are is read from the weight
            self.module.bias = nn.Parameter(self.rearranged(bias, positions), requires_grad=bias.requires_grad)
        self.module.weight = nn.Parameter(self.rearranged(weight, positions), requires_grad=weight.requires_grad)
        size = len(self.roles) * self.width * len(positions)
        names = ("nx", "nf") if self.transposed else ("in_features", "out_features")
        setattr(self.module, names[0 if self.is_output else 1], size)

    def rearranged(self, like: Tensor, positions: Sequence[int | None], *, mean: bool = False) -> Tensor:
        """Of something of the weight's shape, or of the bias's: the heads of these positions, in this order. None is a new one,
        of zeros or of the mean of all heads that are there."""
        dim, count = self.dim if like.dim() > 1 else 0, self.count
        before, shape, after = like.shape[:dim], (len(self.roles), count, self.width), like.shape[dim + 1 :]
        heads = like.detach().unflatten(dim, shape) if count else like.new_zeros(*before, *shape, *after)
        zeros = like.new_zeros(*before, len(self.roles), 1, self.width, *after)
        new = heads.mean(dim + 1, keepdim=True) if mean and count else zeros
        # behind the others, where a None picks it
        index = torch.tensor([count if at is None else at for at in positions], dtype=torch.long, device=like.device)
        return torch.cat((heads, new), dim=dim + 1).index_select(dim + 1, index).flatten(dim, dim + 2).contiguous()

    def spreads(self) -> dict[str, float]:
        """The standard deviation of the weights of each role."""
        roles = self.weight.detach().unflatten(self.dim, (len(self.roles), -1)).unbind(self.dim)
        return {role: float(one.float().std()) for role, one in zip(self.roles, roles, strict=True)}
