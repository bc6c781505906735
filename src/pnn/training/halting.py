"""A halting unit for a model that is trained already: everything else stays as it is.

    loss(w, b) = the model's own loss, with tokens halting as the unit draws + cost · steps that a token takes on average

A higher cost halts earlier. A model trained with `halt: {criterion: learned, cost: …}` in its config needs none of this: its
unit learns beside it, by the same loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from pnn.data.batches import TrainingStream, special_tokens
from pnn.data.shards import TokenSet
from pnn.errors import UserError
from pnn.models.halting import HaltingEncoder
from pnn.nn.halting import Halt


@dataclass(frozen=True)
class Fit:
    """What each update saw: the model's loss without the cost, and how many steps a token took on average."""

    losses: list[float]
    steps: list[float]


def fit_halting(
    model: PreTrainedModel,
    batches: Iterable[dict[str, Tensor]],
    *,
    cost: float,
    seed: int = 0,
    learning_rate: float = 0.03,
    min_steps: int = 1,
) -> Fit:
    """A new unit, in place of any that there was; a batch is an update. `batches`: what the model is called with, labels among
    it. Afterwards the model's config says that it halts where the unit is as sure as not (threshold 0.5)."""
    encoder = model.base_model
    if not isinstance(encoder, HaltingEncoder):
        raise UserError(f"a {type(model).__name__} has no refinement steps to halt after")
    if not cost > 0:
        raise UserError(f"cost={cost:g}: expected more than 0, or no token has a reason to halt")
    try:
        halt = Halt.of({"criterion": "learned", "threshold": 0.5, "min_steps": min_steps, "cost": cost})
        halt.check_steps(encoder.config.schedule, encoder.config.num_steps)
    except ValueError as error:
        raise UserError(str(error)) from None
    encoder.set_halt(None)  # a unit that is there would stay
    encoder.set_halt(halt)
    unit = encoder.criterion
    assert unit is not None
    seen: list[Tensor] = []
    on_gpu = [model.device] if model.device.type == "cuda" else []
    with _only_learns(model, unit), torch.random.fork_rng(on_gpu):
        torch.manual_seed(seed)
        optimizer = torch.optim.Adam(unit.parameters(), lr=learning_rate)
        for inputs in batches:
            out = model(**inputs)
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
            seen.append(torch.stack((out.loss.detach() - out.step_cost.detach(), out.step_cost.detach() / cost)))
    if not seen:
        raise UserError("there is no text to fit a halting unit on")
    losses, steps = torch.stack(seen).T.tolist()  # nothing before this waited for a GPU
    if not np.isfinite(losses).all():
        raise UserError("fitting the halting unit went wrong: the loss is no longer finite")
    return Fit(losses, steps)


@contextmanager
def _only_learns(model: PreTrainedModel, unit: torch.nn.Module) -> Iterator[None]:
    """The model as it is used, without dropout; the unit draws and gets gradients, nothing else does."""
    was_training, learning = model.training, [p for p in model.parameters() if p.requires_grad]
    model.eval()
    unit.train()
    for parameter in learning:
        parameter.requires_grad_(False)
    for parameter in unit.parameters():
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
        model.train(was_training)


def masked_batches(
    tokens: TokenSet,
    sequences: NDArray[np.int64],
    *,
    updates: int,
    batch_tokens: int = 4096,
    mask_probability: float = 0.15,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[dict[str, Any]]:
    """What a masked model is fitted on: text with masks as evaluation has them, in an order that follows from the seed."""
    tokenizer = tokens.tokenizer()
    special = special_tokens(tokenizer)
    size = max(batch_tokens, int(tokens.lengths[sequences].max()))
    stream = TrainingStream(tokens, sequences, size, seed, filler=tokenizer.pad_token_id or 0)
    for _ in range(updates):
        batch = next(stream).to(device)
        masked = batch.mask(special, mask_probability, seed)
        yield {
            "input_ids": masked.input_ids[None],
            "position_ids": batch.position_ids[None],
            "cu_seqlens": batch.cu_seqlens,
            "labels": masked.labels,
            "logit_positions": masked.positions,
            "output_logits": False,
        }
