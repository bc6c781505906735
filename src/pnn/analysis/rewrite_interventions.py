"""What does it cost to take rewrites away? Gates held shut, erasure switched off, β fixed: the loss with a model changed so.

A shut gate leaves the state as it was, to the bit: a forward hook hands back the state that came in. With all of them shut
the model reads its own embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pnn.analysis.rewrite_trace import PARTS, residuals_of
from pnn.analysis.token_kinds import TOKEN_KINDS
from pnn.models.ddl import DDLForCausalLM
from pnn.nn.delta_rule import DeltaResidual, rewrite, write_only


class Place(NamedTuple):
    """Where a hook is: which sublayer, what came in and went out, the kinds of the batch's tokens (rows, length)."""

    sublayer: int
    residual: DeltaResidual
    inputs: tuple[Tensor, ...]
    out: Tensor
    kinds: Tensor

    @property
    def state(self) -> Tensor:
        return self.inputs[0]


Change = Callable[[Place], Tensor]  # the state that goes on instead


class Intervention(NamedTuple):
    name: str
    change: Change
    sublayers: Sequence[int]


def shut(place: Place) -> Tensor:
    return place.state


def shut_at(kind: int) -> Change:
    """Gates of tokens of this kind."""
    return lambda place: torch.where((place.kinds == kind)[..., None, None], place.state, place.out)


def without_erasure(place: Place) -> Tensor:
    return write_only(place.state.float(), *place.residual.write(*place.inputs[1:])).to(place.state.dtype)


def with_beta(values: Tensor) -> Change:
    """β of a sublayer at every token."""

    def change(place: Place) -> Tensor:
        k, v, beta = place.residual.write(*place.inputs[1:])
        rule = rewrite if place.residual.erase else write_only
        return rule(place.state.float(), k, v, values[place.sublayer].to(beta).expand_as(beta)).to(place.state.dtype)

    return change


def interventions(model: DDLForCausalLM, mean_beta: Tensor, kinds: Sequence[int]) -> list[Intervention]:
    """All that are done to this model; `kinds` are those that the text has."""
    residuals = residuals_of(model)
    every = range(len(residuals))
    found = [Intervention("all", shut, every)]
    found += [Intervention(f"layer {layer + 1}", shut, (2 * layer, 2 * layer + 1)) for layer in range(len(residuals) // 2)]
    found += [Intervention(part, shut, every[place::2]) for place, part in enumerate(PARTS)]
    found += [Intervention(TOKEN_KINDS[kind], shut_at(kind), every) for kind in kinds]
    found += [
        Intervention("mean beta", with_beta(mean_beta), every),
        Intervention("beta one", with_beta(torch.ones(len(every))), every),
    ]
    return found + ([Intervention("no erasure", without_erasure, every)] if residuals[0].erase else [])


@contextmanager
def intervening(model: DDLForCausalLM, intervention: Intervention, kinds: Tensor) -> Iterator[None]:
    def hook(sublayer: int) -> Callable[..., Tensor]:
        def changed(residual: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
            assert isinstance(residual, DeltaResidual)
            return intervention.change(Place(sublayer, residual, inputs, out, kinds))

        return changed

    residuals = residuals_of(model)
    with ExitStack() as stack:
        for sublayer in intervention.sublayers:
            stack.callback(residuals[sublayer].register_forward_hook(hook(sublayer)).remove)
        yield
