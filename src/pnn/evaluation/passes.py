"""A pass of one of our models over packed text, for everybody who wants its states and no gradients: filling, evaluating,
comparing, analysing, fine-tuning's dev sets, lm-eval's requests.

    states_at(model, batch, positions)      hᵀ at the positions that are asked for, or h⁰ … hᵀ there
    made_of(model, batch, positions, read)  what `read` makes of hᵀ there, such as its head's predictions

What nobody asks for is not computed: of the last step that is most. Everything that the host needs to know about a batch (where
its targets are, how many) it works out before the batch goes to the device, as one array of whole numbers. So nothing in a loop
over batches waits for the device: the host prepares the next batch while the device is busy with this one.

On a GPU in 16 bit the host would need longer to issue a pass kernel by kernel than the GPU to compute it. So a pass is recorded
as a CUDA graph and replayed with one call. A graph has fixed shapes; a batch is filled up to the next *bucket* with tokens that
nobody attends to or asks for, with empty sequences, and with positions that are asked for in vain. A bucket is recorded when it
comes a second time (`nn/recording`). Whatever cannot be recorded (a model with hooks, fp32, too little memory, too many
buckets) is computed as it is, with the same numbers. Where tokens halt see `halting_passes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from pnn.data.batches import PackedBatch
from pnn.evaluation.halting_passes import MOST as MOST_HALTING
from pnn.evaluation.halting_passes import replay_halting
from pnn.models.base import Halting
from pnn.models.registry import kind_of
from pnn.nn.fast import attention_waits, kernels_compute, products_in
from pnn.nn.halting import Halt
from pnn.nn.packing import bucket, only_at, round_up
from pnn.nn.recording import Recordings, where_weights_lie

T = TypeVar("T")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """From the host, without waiting for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def states_at(
    model: PreTrainedModel,
    batch: PackedBatch,
    positions: Tensor,
    num_steps: int | None = None,
    every_step: bool = False,
    halt: Halting = None,
) -> list[Tensor]:
    """The last state of a packed batch at these flat positions, (positions, d), alone or behind those before it, h⁰ … hᵀ
    (`every_step`, of encoders and of decoders with steps). Batch and positions are on the host. The model is in evaluation
    mode, and a decoder without its head: states are what its head reads. An encoder's tokens halt as `halt` says, or else its
    config, unless `num_steps` asks for so many."""
    return _pass(model, batch, positions, num_steps, every_step, halt, _kept)


def _kept(states: list[Tensor], borrowed: bool) -> list[Tensor]:
    """A recorded pass writes its states where it wrote them before."""
    return [h.clone() for h in states] if borrowed else states


def made_of(
    model: PreTrainedModel,
    batch: PackedBatch,
    positions: Tensor,
    read: Callable[[Tensor], Tensor],
    num_steps: int | None = None,
) -> Tensor:
    """What `read` makes of the last states. Where tokens halt on a GPU it is sooner done than with `states_at`: the device is
    asked whether a recorded pass counts when all its work has been issued."""
    return _pass(model, batch, positions, num_steps, False, None, lambda states, borrowed: read(states[-1]))


@torch.inference_mode()
def _pass(
    model: PreTrainedModel,
    batch: PackedBatch,
    positions: Tensor,
    num_steps: int | None,
    every_step: bool,
    halt: Halting,
    then: Callable[[list[Tensor], bool], T],
) -> T:
    """`then` gets the states, and whether they are good until the next pass only."""
    causal = kind_of(model).causal
    longest = model.config.max_position_embeddings
    layout: type[PackedShape | RowsShape] = RowsShape if causal else PackedShape
    gaps = gaps_in(batch, model.config)

    def run(flat: Tensor, shape: PackedShape | RowsShape) -> list[Tensor]:
        inputs = shape.inputs(flat)
        if causal and not kind_of(model).has_steps:
            at = inputs.pop("last_at")
            return [only_at(model.base_model(**inputs, use_cache=False, return_dict=True).last_hidden_state, at)[0]]
        heads = {name: getattr(model, name, None) for name in ("read_out", "average_token")}
        more = {"use_cache": False} if causal else {"halt": halt, **heads}
        out = model.base_model(**inputs, **more, num_steps=num_steps, output_states=every_step, return_dict=True)
        before = out.states[:-1] if every_step else ()
        return [*(only_at(h, inputs["last_at"])[0] for h in before), out.last_hidden_state[0]]

    rule = None if causal else halting_in_force(model, num_steps, halt)
    recordings = _recordings_of(model, rule is not None)
    if recordings is not None:
        shape = layout.bucket(batch, positions, longest, gaps)
        steps = getattr(model.config, "num_steps", None) if num_steps is None else num_steps
        key = (shape, steps, every_step, products_in(model.device, model.dtype), rule)
        flat = shape.flat(batch, positions, longest, gaps)

        def compute(flat: Tensor) -> list[Tensor]:
            return _cast_once(run, flat, shape)

        def asked_for(states: list[Tensor]) -> T:
            return then([h[: len(positions)] for h in states], True)

        if rule is None:
            states = recordings.replay(key, flat, compute)
            made = None if states is None else asked_for(states)
        else:
            assert isinstance(shape, PackedShape)  # a decoder's tokens do not halt
            room = (shape.tokens, shape.positions)
            made = replay_halting(recordings, key, rule, *room, flat, compute, asked_for, every_step)
        if made is not None:
            return made
    shape = layout.exact(batch, positions, gaps)
    return then(run(to_device(shape.flat(batch, positions, longest, gaps), model.device), shape), False)


def gaps_in(batch: PackedBatch, config: Any) -> Tensor | None:
    """Where masked tokens read their own guess; None in a model that does not guess or does not know which are masked."""
    if not getattr(config, "guess_after", None) or config.mask_token_id is None:
        return None
    return (batch.input_ids == config.mask_token_id).nonzero().squeeze(1)


def _cast_once(run: Callable[..., list[Tensor]], *given: Any) -> list[Tensor]:
    """In inference mode autocast would cast a weight to 16 bit at every use: a refiner's at every step."""
    with torch.inference_mode(False), torch.no_grad():
        return run(*given)


def halting_in_force(model: PreTrainedModel, num_steps: int | None = None, halt: Halting = None) -> Halt | None:
    """How tokens of the model halt, if they do."""
    stored = getattr(model.config, "halt", None) if num_steps is None else None
    given = stored if halt is None else halt
    return Halt.of(given) if given else None


# Shapes ---------------------------------------------------------------------------------------------------------------


class PackedShape(NamedTuple):
    """Sequences end to end, as encoders read them."""

    tokens: int
    borders: int
    positions: int
    gaps: int | None = None  # where masked tokens read their own guess

    @staticmethod
    def exact(batch: PackedBatch, positions: Tensor, gaps: Tensor | None = None) -> PackedShape:
        return PackedShape(len(batch.input_ids), len(batch.cu_seqlens), len(positions), None if gaps is None else len(gaps))

    @staticmethod
    def bucket(batch: PackedBatch, positions: Tensor, longest: int, gaps: Tensor | None = None) -> PackedShape:
        """Positions are counted in sixteenths of the tokens, sequences in half of that: each costs a program per head."""
        tokens = bucket(len(batch.input_ids))
        filler = math.ceil((tokens - len(batch.input_ids)) / longest)
        return PackedShape(
            tokens,
            round_up(len(batch.cu_seqlens) + filler, tokens // 32),
            round_up(len(positions), tokens // 16),
            None if gaps is None else round_up(len(gaps), tokens // 16),
        )

    def flat(self, batch: PackedBatch, positions: Tensor, longest: int, gaps: Tensor | None = None) -> Tensor:
        """All that a pass needs, in one array. Filler lies in sequences of its own, none longer than `longest`."""
        count = len(batch.input_ids)
        borders = torch.cat((batch.cu_seqlens.long(), torch.arange(count, self.tokens, longest)[1:]))
        return torch.cat(
            (
                F.pad(batch.input_ids, (0, self.tokens - count)),
                F.pad(batch.position_ids, (0, self.tokens - count)),
                F.pad(borders, (0, self.borders - len(borders)), value=self.tokens),
                # a token that is asked for already: another would go on where others halt
                F.pad(positions, (0, self.positions - len(positions)), value=int(positions[0]) if len(positions) else 0),
                *(() if gaps is None else (F.pad(gaps, (0, (self.gaps or 0) - len(gaps))),)),
            )
        )

    def inputs(self, flat: Tensor) -> dict[str, Tensor]:
        ids, places, borders, at, gaps = flat.split((self.tokens, self.tokens, self.borders, self.positions, self.gaps or 0))
        inputs = {"input_ids": ids[None], "position_ids": places[None], "cu_seqlens": borders.int(), "last_at": at}
        return inputs if self.gaps is None else inputs | {"gaps_at": gaps}


class RowsShape(NamedTuple):
    """Rows filled up at their end, as decoders read them: no token sees what comes after it."""

    rows: int
    length: int
    positions: int

    @staticmethod
    def exact(batch: PackedBatch, positions: Tensor, gaps: Tensor | None = None) -> RowsShape:
        return RowsShape(len(batch.cu_seqlens) - 1, int(batch.cu_seqlens.diff().max()), len(positions))

    @staticmethod
    def bucket(batch: PackedBatch, positions: Tensor, longest: int, gaps: Tensor | None = None) -> RowsShape:
        rows, length, count = RowsShape.exact(batch, positions)
        length = min(bucket(length), longest)
        return RowsShape(rows, length, round_up(count, max(1, rows * length // 16)))

    def flat(self, batch: PackedBatch, positions: Tensor, longest: int, gaps: Tensor | None = None) -> Tensor:
        lengths = batch.cu_seqlens.diff().long()
        place = torch.arange(self.rows).repeat_interleave(lengths) * self.length + batch.position_ids
        ids = torch.zeros(self.rows * self.length, dtype=torch.long).index_copy_(0, place, batch.input_ids)
        return torch.cat((ids, F.pad(place[positions], (0, self.positions - len(positions)))))

    def inputs(self, flat: Tensor) -> dict[str, Tensor]:
        ids, at = flat.split((self.rows * self.length, self.positions))
        return {"input_ids": ids.view(self.rows, self.length), "last_at": at}


# Recorded passes ------------------------------------------------------------------------------------------------------


_RECORDINGS: WeakKeyDictionary[PreTrainedModel, Recordings] = WeakKeyDictionary()
_HALTING: WeakKeyDictionary[PreTrainedModel, Recordings] = WeakKeyDictionary()  # apart: a failure of one spares the other


def not_recorded(model: PreTrainedModel) -> str:
    """Why some passes of this model are issued kernel by kernel; empty where that did not happen."""
    known = [every[model] for every in (_RECORDINGS, _HALTING) if model in every]
    return next((one.failed for one in known if one.full), "")


def _recordings_of(model: PreTrainedModel, halting: bool = False) -> Recordings | None:
    """None for a model whose passes cannot be recorded as it is now."""
    config, device = model.config, model.device
    if model.training or not kernels_compute(device, products_in(device, model.dtype)):
        return None
    width = config.hidden_size // config.num_attention_heads
    if not kind_of(model).causal and attention_waits(width, config.max_position_embeddings):
        return None
    asks_head = halting or bool(getattr(config, "guess_after", None))  # a criterion may, and a guess does
    weights = where_weights_lie(model if asks_head else model.base_model)
    if weights is None:
        return None
    every = _HALTING if halting else _RECORDINGS
    known = every.get(model)
    if known is None or known.weights != weights:  # moved, replaced or pruned since: what was recorded reads the old ones
        known = every[model] = Recordings(weights, device, MOST_HALTING if halting else None)
    return known
