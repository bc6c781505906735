"""Muon: each matrix of a block moves by the orthogonal matrix nearest to its momentum.

    B ← μ B + (1 − μ) G,   M = (1 − μ) G + μ B  (Nesterov),   O = orthogonal(M)
    W ← (1 − η λ) W − η · 0.2 √max(rows, columns) · O

The factor makes an update as large as AdamW's, so that its learning rates carry over. What is no matrix of a block (embeddings,
vocabulary, norms, biases, single numbers) is AdamW's, at the same rate.

`orthogonal` is five Newton–Schulz iterations in bf16, as in torch's own Muon, which works matrix by matrix. Here all matrices
of one shape are iterated together, and a matrix that holds several (attention's q, k and v) is taken apart first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
EPS = 1e-7


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices: Iterable[tuple[Tensor, int]], rest: torch.optim.AdamW, lr: float, weight_decay: float):
        """`matrices`: parameters with the number of matrices that lie in each, one below the other. `rest` has the others."""
        matrices = list(matrices)
        super().__init__([p for p, _ in matrices], {"lr": lr, "weight_decay": weight_decay})
        self.parts = dict(matrices)
        self.rest = rest
        self.param_groups.extend(rest.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        parameters = [p for p in group["params"] if p.grad is not None]
        if parameters:
            moves = self._directions(parameters)
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            for p, move in zip(parameters, moves, strict=True):
                rows, columns = p.shape[0] // self.parts[p], p.shape[1]
                p.add_(move.reshape(p.shape), alpha=-group["lr"] * 0.2 * math.sqrt(max(rows, columns)))
        # whoever saves, loads or sets a rate sees one optimiser: the rest has no state and no groups of its own
        self.rest.state, self.rest.param_groups = self.state, self.param_groups[1:]
        self.rest.step()
        return loss

    def _directions(self, parameters: list[Tensor]) -> list[Tensor]:
        """O of each parameter, its parts one below the other."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)
        moves: list[Tensor] = [torch.empty(0)] * len(parameters)
        for indices in self._of_one_shape(parameters):
            stacked = torch.cat([ahead[i].view(self.parts[parameters[i]], -1, ahead[i].shape[1]) for i in indices])
            together = orthogonal(stacked)
            for i, move in zip(indices, together.split([self.parts[parameters[i]] for i in indices]), strict=True):
                moves[i] = move
        return moves

    def _of_one_shape(self, parameters: list[Tensor]) -> list[list[int]]:
        groups: dict[tuple[int, int], list[int]] = {}
        for index, p in enumerate(parameters):
            groups.setdefault((p.shape[0] // self.parts[p], p.shape[1]), []).append(index)
        return list(groups.values())


def orthogonal(matrices: Tensor) -> Tensor:
    """(count, rows, columns) → in bf16, each with all its singular values near one."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
