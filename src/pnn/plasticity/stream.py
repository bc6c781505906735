"""The state that all layers read and write, and its dimensions as units: the width of a model.

Every write into the state (embeddings, attention, feed-forward parts) is multiplied by a gate for each dimension:

    h = Σ over writes of  g ⊙ write

A dimension that is *masked* (g = 0) is zero in every token and layer. A norm still divides by all d dimensions,

    y = w ⊙ h / √(Σ h² / d + ε)

so it gives the same for the k that are left when the others are *removed* and it has

    w' = √(d / k) · w        ε' = d / k · ε

A LayerNorm has no such form: its mean over k dimensions is d / k times that over d, and what this shifts y by is another number
in each token, which no weight or bias can take back. So the width of models with LayerNorm stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Stream:
    """What reads and writes the state of a model whose norms are RMSNorms."""

    embeddings: nn.Embedding
    readers: tuple[nn.Linear, ...]  # matrices whose inputs are the state's dimensions
    writers: tuple[nn.Linear, ...]  # and those whose outputs are
    norms: tuple[Any, ...]  # with `weight` and `variance_epsilon`
    epsilon: float  # ε of the norms of the model as its config builds it
    writes: tuple[nn.Module, ...]  # modules whose (first) output is added to the state

    @property
    def width(self) -> int:
        return self.embeddings.weight.shape[1]

    def parameters(self) -> Iterator[tuple[nn.Module, str, int]]:
        """Everything that has a dimension for each of the state's, and which dimension that is. What is tied comes twice."""
        yield self.embeddings, "weight", 1
        for module in self.readers:
            yield module, "weight", 1
        for module in self.writers:
            yield module, "weight", 0
            if module.bias is not None:
                yield module, "bias", 0
        for module in self.norms:
            yield module, "weight", 0

    def held_by(self, whole: nn.Module) -> int:
        """Parameters that each dimension of the state owns in a part of the model."""
        inside = {id(module) for module in whole.modules()}
        found = {id(one := getattr(module, name)): one for module, name, _ in self.parameters() if id(module) in inside}
        return sum(one.numel() for one in found.values()) // self.width

    @torch.no_grad()
    def keep(self, positions: Sequence[int], original: int) -> None:
        """Cut all but these dimensions out of every matrix; norms then do what they did with the others at zero. `original`:
        how many dimensions there were at first."""
        stretch = math.sqrt(self.width / len(positions))
        at = torch.tensor(positions, dtype=torch.long, device=self.embeddings.weight.device)
        made: dict[int, nn.Parameter] = {}  # what was tied stays tied
        for module, name, dim in list(self.parameters()):
            old = getattr(module, name)
            if id(old) not in made:
                made[id(old)] = nn.Parameter(old.index_select(dim, at).contiguous(), requires_grad=old.requires_grad)
            setattr(module, name, made[id(old)])
        self.embeddings.embedding_dim = len(positions)
        for module in self.readers:
            module.in_features = len(positions)
        for module in self.writers:
            module.out_features = len(positions)
        for norm in self.norms:
            norm.weight.mul_(stretch)
            norm.variance_epsilon = self.epsilon * original / len(positions)

    def gate(self, gate: Tensor) -> list[Any]:
        """Hooks that multiply every write: `gate` has a number for each dimension, or for each row of the batch and dimension.
        It may be changed in place while they stand."""

        def multiply(module: nn.Module, args: Any, output: Any) -> Any:
            write = output[0] if isinstance(output, tuple) else output
            factors = gate.to(write.dtype)
            if gate.dim() == 2:
                write = (write.reshape(len(gate), -1, write.shape[-1]) * factors[:, None]).view_as(write)
            else:
                write = write * factors
            return (write, *output[1:]) if isinstance(output, tuple) else write

        return [module.register_forward_hook(multiply) for module in self.writes]
