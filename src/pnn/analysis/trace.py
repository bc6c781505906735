"""One pass over held-out text, everything in sight: states, changes, gates and predictions of every step, batch by batch.

    for trace in trace_text(model, text): …

A trace holds one batch and is gone with the next, so memory does not grow with the text. Batches are packed: there is no
padding to count by mistake. Every token is masked, special or ordinary. Masks are those of evaluation, a function of the text
alone, so that all models and all interventions are asked for the same tokens. Everything is computed in fp32.

An `Edit` changes what one part of a block puts out, at all steps or at some: the interventions of the experiments. It is a
forward hook, before which our kernels step aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from pnn.data.batches import PackedBatch, evaluation_batches
from pnn.data.masking import Masked, SpecialTokens
from pnn.data.shards import TokenSet
from pnn.errors import UserError
from pnn.evaluation.passes import states_at, to_device
from pnn.models.base import MaskedLMBase, arrange
from pnn.models.precision import undisturbed
from pnn.models.registry import kind_of

KINDS = ("ordinary", "masked", "special")
ORDINARY, MASKED, SPECIAL = range(3)
PARTS = ("attention", "ffn", "delta", "gate")  # of a refiner; a BERT layer has the first two

Change = Callable[[Tensor, "Place"], Tensor]


@dataclass(frozen=True)
class Text:
    """Held-out sequences and how they are masked."""

    tokens: TokenSet
    sequences: NDArray[np.int64]
    special: SpecialTokens
    mask_probability: float = 0.15
    mask_seed: int = 0
    batch_tokens: int = 16384

    def __len__(self) -> int:
        return len(self.sequences)

    def batches(self) -> Iterator[Batch]:
        for packed, indices in evaluation_batches(self.tokens, self.sequences, self.batch_tokens):
            masked = packed.mask(self.special, self.mask_probability, self.mask_seed)
            yield Batch(packed, masked, torch.from_numpy(indices), self.special)


@dataclass(frozen=True)
class Batch:
    """Some sequences with their masks. `indices`: their numbers in the text."""

    packed: PackedBatch
    masked: Masked
    indices: Tensor
    special: SpecialTokens

    @cached_property
    def sequence(self) -> Tensor:
        """For every token, the number of its sequence."""
        return self.indices.repeat_interleave(self.packed.cu_seqlens.diff().long())

    @cached_property
    def kinds(self) -> Tensor:
        kinds = torch.full_like(self.packed.input_ids, ORDINARY)
        for token in self.special.never_masked:
            kinds[self.packed.input_ids == token] = SPECIAL
        kinds[self.masked.positions] = MASKED
        return kinds

    def revealing(self, positions: Tensor) -> Batch:
        """The same batch with these masked tokens shown. They stay targets."""
        shown = self.masked.input_ids.clone()
        shown[positions] = self.packed.input_ids[positions]
        return replace(self, masked=replace(self.masked, input_ids=shown))


@dataclass(frozen=True)
class Place:
    """Where an edit is asked for: the step (from 1), the batch, whose tokens are the rows, and what the part was given
    (attention: h; ffn: what is attended; gate: h and δ)."""

    step: int
    batch: Batch
    inputs: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Edit:
    part: str  # one of PARTS; "delta" is δ behind its norm, if it has one, where "ffn" is before it
    change: Change
    steps: frozenset[int] | None = None  # None: all


@dataclass(frozen=True)
class Step:
    """What one block did to all tokens: (tokens, d) each. A BERT layer has no δ and no gate."""

    change: Tensor  # hᵗ − hᵗ⁻¹
    attention: Tensor  # its output, before the norm
    ffn: Tensor  # its output, before any norm
    raw: Tensor | None  # δ
    gate: Tensor | None


@dataclass(frozen=True)
class Reading:
    """What the head makes of a state at the masked tokens, one entry a target."""

    prediction: Tensor
    correct: Tensor  # bool
    probability: Tensor  # of the right token
    confidence: Tensor  # probability of the likeliest token
    loss: Tensor


@dataclass(frozen=True)
class Predictions:
    """What a model makes of one batch's masked tokens, and nothing else of it."""

    labels: Tensor
    sequence: Tensor  # of each target, the number of its sequence
    readings: list[Reading]  # after every step 0 … T, or after the last alone

    @property
    def last(self) -> Reading:
        return self.readings[-1]


@dataclass(frozen=True)
class Trace:
    model: MaskedLMBase
    batch: Batch
    states: list[Tensor]  # h⁰ … hᵀ, (tokens, d)
    steps: list[Step]

    @cached_property
    def targets(self) -> Tensor:
        return self.batch.masked.positions.to(self.states[0].device)

    @cached_property
    def labels(self) -> Tensor:
        return self.batch.masked.labels.to(self.states[0].device)

    @cached_property
    def sequence(self) -> Tensor:
        return self.batch.sequence.to(self.states[0].device)

    @cached_property
    def kinds(self) -> Tensor:
        return self.batch.kinds.to(self.states[0].device)

    @cached_property
    def target_sequence(self) -> Tensor:
        return self.sequence[self.targets]

    @cached_property
    def readings(self) -> list[Reading]:
        """After every step 0 … T."""
        return [self.read(h) for h in self.states]

    @cached_property
    def last(self) -> Reading:
        return self.readings[-1] if "readings" in self.__dict__ else self.read(self.states[-1])

    def read(self, h: Tensor) -> Reading:
        return read(self.model, h[self.targets], self.labels)


@torch.no_grad()
def read(model: MaskedLMBase, rows: Tensor, labels: Tensor) -> Reading:
    logits = model.read_out(rows).float()
    loss = F.cross_entropy(logits, labels, reduction="none")
    top, prediction = logits.max(-1)
    return Reading(prediction, prediction == labels, torch.exp(-loss), torch.exp(top - logits.logsumexp(-1)), loss)


@torch.no_grad()
def predict(model: MaskedLMBase, batch: Batch, every_step: bool = False) -> Predictions:
    """For whoever needs no more than predictions: the last state at targets alone, unless `every_step` is asked for."""
    masked = replace(batch.packed, input_ids=batch.masked.input_ids)
    labels, sequence = (to_device(x, model.device) for x in (batch.masked.labels, batch.sequence[batch.masked.positions]))
    with undisturbed(model):
        states = states_at(model, masked, batch.masked.positions, every_step=every_step, halt=False)  # as a trace does
        return Predictions(labels, sequence, [read(model, h, labels) for h in states])


def trace_text(model: MaskedLMBase, text: Text) -> Iterator[Trace]:
    for batch in text.batches():
        yield trace_batch(model, batch)


@torch.no_grad()
def trace_batch(model: MaskedLMBase, batch: Batch, edits: Sequence[Edit] = (), num_steps: int | None = None) -> Trace:
    """Run the model on one batch and keep everything. In evaluation mode, whatever mode the model is in."""
    encoder, device = model.base_model, model.device
    blocks = blocks_of(model, num_steps)
    ids, position_ids, borders = (
        x.to(device) for x in (batch.masked.input_ids, batch.packed.position_ids, batch.packed.cu_seqlens)
    )
    with undisturbed(model):
        tokens = encoder.embeddings.token(ids[None])
        position_ids, layout = arrange(tokens, None, position_ids[None], borders, model.config)
        h = origin = encoder.embeddings(tokens, position_ids)
        gaps = encoder.gaps_in(ids[None], position_ids, None, model.average_token)
        states, steps = [h[0]], []
        for number, block in enumerate(blocks, 1):
            refiner: Any = block
            with listening(block, [e for e in edits if e.steps is None or number in e.steps], Place(number, batch)) as heard:
                if kind_of(model).has_steps:
                    h = encoder.begin(h, origin, number - 1, model.config.order(num_steps)[number - 1], gaps)
                    refinement = refiner.refine(h, layout)
                    change, raw, gate = refinement.delta, refinement.raw[0], refinement.gate
                    h = h + change
                else:
                    before, h = h, refiner(h, layout)
                    change, raw, gate = h - before, None, None
            steps.append(Step(change[0], heard["attention"][0], heard["ffn"][0], raw, None if gate is None else gate[0]))
            states.append(h[0])
    return Trace(model, batch, states, steps)


def blocks_of(model: MaskedLMBase, num_steps: int | None = None) -> list[nn.Module]:
    """What runs at each step."""
    encoder: Any = model.base_model
    if not kind_of(model).has_steps:
        return list(encoder.blocks)[:num_steps]
    return [encoder.refiners[number] for number in encoder.config.order(num_steps)]


def part_of(block: nn.Module, name: str) -> nn.Module:
    parts: dict[str, nn.Module | None] = {
        "attention": getattr(block, "attention", None),
        "ffn": getattr(block, "ffn", None),
        "delta": (getattr(block, "delta_norm", None) or block.ffn) if hasattr(block, "delta_norm") else None,  # type: ignore[dict-item]
        "gate": getattr(block, "gate", None),
    }
    found = parts[name]
    if found is None:
        raise UserError(f"this model has no {name} to intervene on")
    return found


def has_gates(model: MaskedLMBase) -> bool:
    return all(getattr(block, "gate", None) is not None for block in blocks_of(model))


@contextmanager
def listening(block: nn.Module, edits: Sequence[Edit], place: Place) -> Iterator[dict[str, Tensor]]:
    """Edits in force, and what attention and FFN put out (after them)."""
    heard: dict[str, Tensor] = {}

    def edited(change: Change) -> Callable[..., Tensor]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
            given = tuple(x[0] for x in inputs if isinstance(x, Tensor))
            return change(out[0], replace(place, inputs=given))[None]

        return hook

    def kept(name: str) -> Callable[..., None]:
        return lambda _module, _inputs, out: heard.__setitem__(name, out)

    with ExitStack() as stack:
        for edit in edits:
            stack.callback(part_of(block, edit.part).register_forward_hook(edited(edit.change)).remove)
        for name in ("attention", "ffn"):
            stack.callback(part_of(block, name).register_forward_hook(kept(name)).remove)
        yield heard
