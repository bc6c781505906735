"""What every sublayer of a Deep Delta decoder does to the state, token by token, as sums: memory does not grow with the text
beyond a few numbers a row.

With the state X before and X⁺ after, the direction k, the target v and the gate β of a sublayer, at every token:

    error              |kᵀX − v| before and |kᵀX⁺ − v| after; the rule says that the second is |1 − β| times the first
    along              ‖kᵀX‖² / ‖X‖², the share of the state that lies along k, before and after (1/d by chance)
    update             erasure ‖β k kᵀX‖ and writing ‖β k vᵀ‖
    frozen shortcut    Π (I − β k kᵀ) over sublayers, k and β held as they are: what is left of the embedding. Its determinant
                       is Π (1 − β). All factors leave alone what is orthogonal to every k, so its singular values are those
                       of a small matrix, written in a basis of the k, and ones
    reuse              |cos| between the directions of two sublayers at the same token, and at two tokens half a row apart
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pnn.analysis.token_kinds import TOKEN_KINDS
from pnn.analysis.totals import Totals
from pnn.errors import UserError
from pnn.models.ddl import DDLForCausalLM
from pnn.nn.delta_rule import DeltaResidual, read

PARTS = ("attention", "mlp")
BINS = 40  # of β's histogram, from 0 to 2
REGIMES = {"skip": 0.1, "partial": 0.9, "match": 1.1, "over-relax": 1.9, "reflect": 2.0}  # each up to this β
SAMPLED = 256  # tokens, evenly spread over the text, whose singular values are computed
SMALLEST = 1e-7  # |1 − β| that fp32 can tell from zero


def residuals_of(model: DDLForCausalLM) -> list[DeltaResidual]:
    """In the order in which they rewrite: attention and MLP of the first layer, of the second …"""
    found = [getattr(block, f"{part}_residual") for block in model.model.blocks for part in PARTS]
    if not all(isinstance(residual, DeltaResidual) for residual in found):
        raise UserError("this model adds to its state (residual additive): it has no gates whose rewrites could be analysed")
    if model.config.num_rounds > 1:
        raise UserError(
            f"this model applies its layers {model.config.num_rounds} times: rewrites can be analysed only for one round"
        )
    return found


class Seen(NamedTuple):
    """What one sublayer did, (rows, length); the direction (rows, length, d)."""

    direction: Tensor
    beta: Tensor
    error_before: Tensor
    error_after: Tensor
    along_before: Tensor
    along_after: Tensor
    erasure: Tensor
    writing: Tensor


def see(residual: DeltaResidual, inputs: tuple[Tensor, ...], out: Tensor) -> Seen:
    state, branch, x, context = inputs
    k, v, beta = residual.write(branch, x, context)
    state, out, beta = state.float(), out.float(), beta.squeeze(-1)
    before, after = read(state, k), read(out, k)
    size = beta * k.norm(dim=-1)
    return Seen(
        k,
        beta,
        (before - v).norm(dim=-1),
        (after - v).norm(dim=-1),
        _share(before, state),
        _share(after, out),
        size * before.norm(dim=-1) if residual.erase else torch.zeros_like(size),
        size * v.norm(dim=-1),
    )


def _share(reading: Tensor, state: Tensor) -> Tensor:
    return reading.square().sum(-1) / state.square().sum((-2, -1)).clamp_min(1e-30)


@contextmanager
def watching(model: DDLForCausalLM) -> Iterator[list[Seen]]:
    """One entry a sublayer, after a forward pass."""
    seen: list[Seen] = []

    def look(residual: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        assert isinstance(residual, DeltaResidual)
        seen.append(see(residual, inputs, out))

    with ExitStack() as stack:
        for residual in residuals_of(model):
            stack.callback(residual.register_forward_hook(look).remove)
        yield seen


def token_losses(model: DDLForCausalLM, rows: Tensor) -> Tensor:
    """−log p of each next token, (rows, length − 1). Logits of one row at a time: a vocabulary is wide."""
    h = model.model(input_ids=rows).last_hidden_state[:, :-1]
    return torch.stack(
        [F.cross_entropy(model.head(one).float(), row[1:], reduction="none") for one, row in zip(h, rows, strict=True)]
    )


class Rewrites:
    """Everything that is summed up about one model. `totals` has a row for each row of text, and S numbers by name, one a
    sublayer; the rest are sums over the whole text."""

    def __init__(self, model: DDLForCausalLM, rows: int, length: int):
        self.model, self.length, self.totals = model, length, Totals(rows)
        self.size, kinds = len(residuals_of(model)), len(TOKEN_KINDS)
        self.histogram = torch.zeros(kinds, self.size, BINS, dtype=torch.long)
        self.regimes = torch.zeros(self.size, len(REGIMES), dtype=torch.long)
        self.kind_beta = torch.zeros(kinds, self.size, dtype=torch.float64)
        self.same_token, self.other_token = torch.zeros(2, self.size, self.size, dtype=torch.float64)
        self.singular: list[Tensor] = []
        self.log_determinants: list[Tensor] = []
        self._sampled = torch.linspace(0, rows * length - 1, min(SAMPLED, rows * length), dtype=torch.float64).round().long()

    def add(self, first: int, rows: Tensor, kinds: Tensor) -> None:
        """Run the model on rows `first`, `first` + 1, … of the text and add what it does."""
        with watching(self.model) as seen:
            losses = token_losses(self.model, rows)
        row_of = torch.arange(first, first + len(rows), device=rows.device)
        row_of_token = row_of.repeat_interleave(self.length)
        self.totals.add("loss", row_of, losses.double().sum(1))
        self.totals.add("targets", row_of, torch.full((len(rows),), self.length - 1, device=rows.device))
        self.totals.count("tokens", row_of_token)
        self.totals.add("kinds", row_of_token, F.one_hot(kinds.flatten(), len(TOKEN_KINDS)))
        for name in Seen._fields[1:]:
            self.totals.add(name, row_of_token, torch.stack([getattr(one, name) for one in seen], -1).flatten(0, 1))
        beta = torch.stack([one.beta for one in seen], -1).double().flatten(0, 1)  # (tokens, sublayers)
        before = torch.stack([one.error_before for one in seen], -1).double().flatten(0, 1)
        self.totals.add("beta squared", row_of_token, beta.square())
        self.totals.add("distance from one", row_of_token, (1 - beta).abs())
        self.totals.add("error by the rule", row_of_token, (1 - beta).abs() * before)
        determinant = (1 - beta).abs().clamp_min(SMALLEST).log().sum(1)
        self.totals.add("log determinant", row_of_token, determinant)
        self.totals.add("negative determinant", row_of_token, (beta > 1).sum(1) % 2)
        self._count(beta, kinds.flatten())
        for place, row in enumerate(row_of):
            self._add_directions(row, F.normalize(torch.stack([one.direction[place] for one in seen], 1), dim=-1))
        here = self._sampled[(self._sampled >= first * self.length) & (self._sampled < (first + len(rows)) * self.length)]
        here = here.to(rows.device) - first * self.length
        directions = torch.stack([one.direction.flatten(0, 1)[here] for one in seen], 1)
        self.singular.append(singular_values(directions.double(), beta[here]).cpu())
        self.log_determinants.append(determinant[here].cpu())

    def _count(self, beta: Tensor, kinds: Tensor) -> None:
        sublayers = torch.arange(self.size, device=beta.device)
        bins = (beta * BINS / 2).long().clamp(0, BINS - 1)
        place = (kinds[:, None] * self.size + sublayers) * BINS + bins
        self.histogram += torch.bincount(place.flatten(), minlength=self.histogram.numel()).view_as(self.histogram).cpu()
        borders = torch.tensor(list(REGIMES.values())[:-1], dtype=beta.dtype, device=beta.device)
        place = sublayers * len(REGIMES) + torch.bucketize(beta, borders, right=True)
        self.regimes += torch.bincount(place.flatten(), minlength=self.regimes.numel()).view_as(self.regimes).cpu()
        self.kind_beta += (F.one_hot(kinds, len(TOKEN_KINDS)).double().T @ beta).cpu()

    def _add_directions(self, row: Tensor, k: Tensor) -> None:
        """k: (length, sublayers, d), of one row of text."""
        others = k.roll(self.length // 2, 0)
        pairs = self.size * (self.size - 1)
        for name, sums, other in (("same token", self.same_token, k), ("other token", self.other_token, others)):
            cosines = (k @ other.mT).abs().double().sum(0)
            sums += cosines.cpu()
            self.totals.add(name, row[None], (cosines.sum() - cosines.trace())[None] / pairs)


def singular_values(directions: Tensor, betas: Tensor) -> Tensor:
    """Of Π (I − β k kᵀ), the last sublayer leftmost; (n, S, d) and (n, S) → (n, d), none above 1."""
    n, sublayers, width = directions.shape
    basis = torch.linalg.qr(directions.mT).Q  # (n, d, r)
    inside = directions @ basis
    product = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device).repeat(n, 1, 1)
    for s in range(sublayers):
        k = inside[:, s, :, None]
        product = product - betas[:, s, None, None] * k @ (k.mT @ product)
    outside = product.new_ones(n, width - basis.shape[-1])
    return torch.cat((outside, torch.linalg.svdvals(product)), 1)
