"""What remains takes over from what went, in closed form, from calibration text.

Heads and neurons reach the state through one matrix, W_o or W_down: y = x W (+ b). Where some of the columns of x are gone,
what remains can often say what they said. The remaining rows of W move by

    Δ = argmin ‖X̃ (W_k + Δ) − X W‖² + λ ‖Δ‖²  =  (X̃ᵀX̃ + λ I)⁻¹ X̃ᵀ (X W − X̃ W_k)

X: what the matrix reads in the original model, X̃: what it reads in the smaller one; a bias takes part as a column of ones.
That is the update of the optimal brain surgeon, for all columns at once. The ridge pulls towards the weights as they were, so
the error on the calibration text is never larger than without repair; where the columns that went are linear combinations of
those that stayed it vanishes (to λ). Matrices are repaired from the first layer to the last, each on what the repaired layers
before it hand on, so errors do not add up. Where dimensions of the state are gone too, y is what it was in those that stayed.

    error of a matrix = ‖X̃ W' + b' − X W − b‖² / ‖X W + b‖²

Every matrix needs a pass up to it, so passes are most of the work. On a GPU they compute in 16 bit, as learning does; what they
read is multiplied and added up in fp32 and solved in fp64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pnn.errors import UserError
from pnn.models.fused import fused
from pnn.models.precision import undisturbed
from pnn.plasticity.architectures import HEAD, NEURON, WIDTH, architecture_of
from pnn.plasticity.matrices import Projection
from pnn.plasticity.measure import computing
from pnn.plasticity.scores import Batch, prepared
from pnn.plasticity.units import unit_map

M = TypeVar("M", bound=PreTrainedModel)
RIDGE = 1e-3  # λ, as a share of the mean square of a column
FREE = 1e-6  # how hard a bias is pulled, compared with weights: it may move as it likes
TINY = torch.finfo(torch.float64).tiny
SOLVED = (HEAD, NEURON)  # in the order in which a layer computes them


def outputs(model: PreTrainedModel) -> dict[tuple[str, int], Projection]:
    """The matrices by which heads and neurons reach the state, by kind and layer, first to last; those of layers that have
    lost all are left out."""
    architecture = architecture_of(model)
    parts = {
        (kind, layer): architecture.parts(kind, block)[-1]
        for layer, block in enumerate(architecture.blocks(model))
        for kind in SOLVED
    }
    return {at: part for at, part in parts.items() if part.count}


class _Enough(Exception):  # noqa: N818, nothing went wrong
    """All that a pass is made for has been read."""


def listen(part: Projection, mask: Tensor | None, see: Callable[[Tensor], None]) -> Any:
    """A hook: `see` gets what a projection reads, (tokens, columns), in every call of it, without padding. In fp32 at least,
    and so does it compute, whatever the pass computes in."""

    def hear(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach()
        padded = mask is not None and x.shape[:-1] == mask.shape
        x = x[mask.bool()] if mask is not None and padded else x.flatten(0, -2)
        with torch.autocast(x.device.type, enabled=False):
            see(x.float() if x.dtype.itemsize == 2 else x)

    return part.module.register_forward_pre_hook(hear)


@torch.no_grad()
def run(model: PreTrainedModel, batch: Mapping[str, Any]) -> None:
    """A pass for those who listen, as learning computes it: nobody asks for logits."""
    average = getattr(model, "average_token", None)
    guesses = {} if average is None else {"average_token": average}  # masked tokens may read them
    with fused(model), computing(model):
        model.base_model(**{key: value for key, value in batch.items() if key != "labels"}, **guesses)


def _read(model: PreTrainedModel, part: Projection, batch: Mapping[str, Any], calls: int) -> list[Tensor]:
    """What a projection reads of a batch, by call: a refiner runs several times. `calls`: so many are all that there are, and
    nothing behind them is computed."""
    seen: list[Tensor] = []

    def see(x: Tensor) -> None:
        seen.append(x)
        if len(seen) == calls:
            raise _Enough

    hook = listen(part, batch.get("attention_mask"), see)
    try:
        run(model, batch)
    except _Enough:
        pass
    finally:
        hook.remove()
    return seen


def input_major(part: Projection) -> Tensor:
    """The projection's matrix with its inputs as rows: y = x W."""
    return part.weight.detach() if part.transposed else part.weight.detach().T


def bias_of(part: Projection) -> nn.Parameter | None:
    """What an output matrix adds, which belongs to no unit."""
    bias = part.module.bias
    assert bias is None or isinstance(bias, nn.Parameter)
    return bias


@torch.no_grad()
def repair(smaller: M, original: PreTrainedModel, batches: Iterable[Batch], *, ridge: float = RIDGE) -> M:
    """A copy of a pruned model whose output matrices make up for what the original had, on this text."""
    if not ridge > 0:
        raise UserError(f"ridge={ridge}: expected a number above 0")
    repaired = copy.deepcopy(smaller)
    ready = [prepared(original, batch) for batch in batches]
    if not ready:
        raise UserError("repairing a model needs batches of text")
    theirs, kept = outputs(original), kept_dimensions(smaller, original)
    touched = kept is not None  # the first matrix already reads other states
    with undisturbed(original), undisturbed(repaired):
        wanted = given(original, ready)
        for at, whole in theirs.items():
            part = outputs(repaired).get(at)
            touched = touched or part is None or part.count < whole.count
            if touched and part is not None:  # what lies in front of the first that was pruned reads what it always read
                _move(part, *_moments(_side_by_side(repaired, part, ready, wanted[at], kept), part), ridge)
    return repaired


def given(model: PreTrainedModel, batches: Iterable[dict[str, Any]]) -> dict[tuple[str, int], list[list[Tensor]]]:
    """What each output matrix gives, by batch and call: one pass over the text, and as many numbers as two states of every
    token and layer have."""
    parts = outputs(model)
    found: dict[tuple[str, int], list[list[Tensor]]] = {at: [] for at in parts}
    for batch in batches:
        with ExitStack() as stack:
            for at, part in parts.items():
                calls: list[Tensor] = []
                found[at].append(calls)
                stack.callback(listen(part, batch.get("attention_mask"), partial(_apply_to, part, calls)).remove)
            run(model, batch)
    return found


def _apply_to(part: Projection, calls: list[Tensor], x: Tensor) -> None:
    calls.append(applied(part, x))


def _side_by_side(
    model: PreTrainedModel,
    part: Projection,
    batches: Iterable[dict[str, Any]],
    wanted: Iterable[list[Tensor]],
    kept: Tensor | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """What a matrix reads in the smaller model, and what it gave in the original, batch by batch and call by call."""
    for batch, answers in zip(batches, wanted, strict=True):
        for x, y in zip(_read(model, part, batch, len(answers)), answers, strict=True):
            yield x, y if kept is None else y[:, kept]


def kept_dimensions(smaller: PreTrainedModel, original: PreTrainedModel) -> Tensor | None:
    """Where the dimensions of the smaller model's state are in the original's; None where it has all of them."""
    left = getattr(smaller.config, "width_map", None)
    if left is None or left == getattr(original.config, "width_map", None):
        return None
    place = {index: position for position, index in enumerate(unit_map(original, WIDTH)[0])}
    return torch.tensor([place[index] for index in left], device=original.device)


def _moments(pairs: Iterable[tuple[Tensor, Tensor]], part: Projection) -> tuple[Tensor, Tensor]:
    """X̃ᵀX̃ and X̃ᵀ(Y − X̃ W_k − b), with a column of ones in X̃ where there is a bias."""
    gram, cross = torch.zeros(()), torch.zeros(())
    for x, y in pairs:
        inputs = x if bias_of(part) is None else torch.cat((x, x.new_ones(len(x), 1)), dim=1)
        gram = gram.to(x.device) + (inputs.T @ inputs).double()
        cross = cross.to(x.device) + (inputs.T @ (y - applied(part, x))).double()
    return gram, cross


def applied(part: Projection, x: Tensor) -> Tensor:
    y, bias = x @ input_major(part).to(x.dtype), bias_of(part)
    return y if bias is None else y + bias.detach()


def _move(part: Projection, gram: Tensor, cross: Tensor, ridge: float) -> None:
    columns = part.weight.shape[part.dim]
    pull = torch.full_like(gram.diagonal(), float(ridge * gram.diagonal()[:columns].mean()))
    pull[columns:] *= FREE
    change = torch.linalg.solve(gram + torch.diag(pull + TINY), cross).to(part.weight.dtype)
    part.weight.add_(change[:columns] if part.transposed else change[:columns].T)
    bias = bias_of(part)
    if bias is not None:
        bias.add_(change[columns])


@torch.no_grad()
def output_errors(
    smaller: PreTrainedModel, original: PreTrainedModel, batches: Iterable[Batch]
) -> dict[tuple[str, int], float]:
    """How far what each matrix gives is from what it gave in the original, as a share of the square of that."""
    ready = [prepared(original, batch) for batch in batches]
    with undisturbed(original), undisturbed(smaller):
        wanted, now, kept = given(original, ready), given(smaller, ready), kept_dimensions(smaller, original)
    errors = {}
    for at, answers in now.items():
        before, after = (
            torch.cat([y if kept is None else y[:, kept] for batch in wanted[at] for y in batch]),
            torch.cat([y for batch in answers for y in batch]),
        )
        wrong, whole = (float(one.double().square().sum()) for one in (after - before, before))
        errors[at] = wrong / max(whole, TINY)
    return errors
