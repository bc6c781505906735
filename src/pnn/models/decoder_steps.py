"""Generating on a GPU, token by token: a decoder's step on buffers of a fixed size, recorded once and replayed.

Issuing the kernels of one step takes the host several times as long as computing them takes the GPU. A recorded step needs
fixed shapes: keys and values lie in buffers with room for more tokens, a new token is written at the place `at`, and attention
sees places by a mask. A cache hands its contents to the buffers at its first step of one token, and takes them back where
somebody reorders it or asks for anything but such a step. Buffers and recordings stay with the model for the next text.
"""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from pnn.models.decoder_cache import DecoderCache
from pnn.nn.causal import Past
from pnn.nn.fast import kernels_compute, products_in
from pnn.nn.recording import Recording, room_to_record, where_weights_lie

ROOM = 128  # tokens at least that buffers have room for beyond those that are there
MOST = 4  # sizes of buffers that stay with a model


class Steps:
    """Steps of one token for texts of one number (those of the cache, or `rows`), with room for `capacity` tokens each."""

    def __init__(self, cache: DecoderCache, capacity: int, rows: int | None = None):
        first = cache.layers[0].keys
        batch, device = rows or len(first), first.device

        def room(x: Tensor) -> Tensor:
            return x.new_zeros(batch, x.shape[1], capacity, x.shape[3])

        self.capacity, self.length = capacity, 0
        self.keys, self.values = ([room(getattr(one, kind)) for one in cache.layers] for kind in ("keys", "values"))
        self.histories = {name: one.new_zeros(batch, *one.shape[1:]) for name, one in cache.histories.items()}
        self.seen = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        self.ids, self.positions = (torch.zeros(batch, 1, dtype=torch.long, device=device) for _ in range(2))
        self.real = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.owner: ReferenceType[DecoderCache] | None = None
        self.recording: Recording | None = None

    # What a decoder asks of a cache ----------------------------------------------------------------------------------

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer].index_copy_(2, self.at, keys), self.values[layer].index_copy_(2, self.at, values)

    def swap_history(self, name: str, x: Tensor, size: int) -> Tensor:
        before = self.histories[name].clone()
        self.histories[name].copy_(torch.cat((before, x), dim=1)[:, 1:])
        return before

    def buffer(self, name: str) -> Tensor | None:
        return self.histories.get(name)

    # Contents ---------------------------------------------------------------------------------------------------------

    def take(self, cache: DecoderCache, keep: Tensor | None) -> None:
        """`keep`: (B, tokens so far), False at padding."""
        self.length = cache.layers[0].keys.shape[2]
        for mine, theirs in ((self.keys, "keys"), (self.values, "values")):
            for buffer, layer in zip(mine, cache.layers, strict=True):
                buffer[:, :, : self.length].copy_(getattr(layer, theirs))
        for name, history in cache.histories.items():
            self.histories[name].copy_(history)
        self.seen.zero_()
        self.seen[:, : self.length] = True if keep is None else keep
        self.owner = ref(cache)

    def put(self, rows: list[int], cache: DecoderCache, keep: Tensor, before: int) -> None:
        """The texts of a cache into these rows, in the places before this one, going round. Nothing else is seen there then."""
        length = keep.shape[1]
        places = (torch.arange(before - length, before, device=keep.device) % self.capacity).expand(len(rows), -1)
        into = torch.tensor(rows, device=keep.device)[:, None], places
        for mine, theirs in ((self.keys, "keys"), (self.values, "values")):
            for buffer, layer in zip(mine, cache.layers, strict=True):
                buffer.transpose(1, 2)[into] = getattr(layer, theirs).transpose(1, 2)
        for name, history in cache.histories.items():
            self.histories[name][into[0][:, 0]] = history
        self.seen[into[0][:, 0]] = False
        self.seen[into] = keep

    def give_back(self, cache: DecoderCache) -> None:
        for layer, keys, values in zip(cache.layers, self.keys, self.values, strict=True):
            layer.keys, layer.values = (x[:, :, : self.length].clone() for x in (keys, values))
        cache.histories = {name: history.clone() for name, history in self.histories.items()}
        self.owner = None

    # The step ---------------------------------------------------------------------------------------------------------

    def run(self, model: Any) -> Tensor:
        """Logits of the next token, (B, 1, vocabulary)."""
        self.seen.index_copy_(1, self.at, self.real)
        return model.next_logits(self.ids, self.positions, Past(self.seen[:, None, None], self), self.real)

    def feed(self, ids: Tensor, positions: Tensor | None, real: Tensor | None) -> None:
        """One more token for each text, behind the others."""
        if real is None:
            self.real.fill_(True)
        else:
            self.real.copy_(real)
        if positions is None:  # counts real tokens, as the model does
            positions = self.seen[:, : self.length].sum(-1, keepdim=True)
        self.write(self.length, ids, positions)
        self.length += 1

    def write(self, place: int, ids: Tensor, positions: Tensor) -> None:
        """What the next step reads, and where it remembers it."""
        self.at.fill_(place)
        self.ids.copy_(ids)
        self.positions.copy_(positions)


_STEPS: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], dict[Any, Steps]]] = WeakKeyDictionary()


def recorded_step(
    model: Any, cache: DecoderCache, ids: Tensor, attention_mask: Tensor | None, positions: Tensor | None
) -> Tensor | None:
    """The logits of a step of one token, if it can be recorded; else None, and the cache is as it was."""
    if cache.steps is not None and cache.steps.length == cache.steps.capacity:
        cache.leave_buffers()
    with torch.inference_mode():  # always: what is made in it can be written to only in it
        if cache.steps is None:
            steps = _steps_for(model, cache)
            if steps is None:
                return None
            steps.take(cache, None if attention_mask is None else attention_mask[:, :-1].bool())
            cache.forget()
            cache.steps = steps
        cache.steps.feed(ids, positions, None if attention_mask is None else attention_mask[:, -1:].bool())
        assert cache.steps.recording is not None
        logits: Tensor = cache.steps.recording.replay()
    return logits.clone()


def capacity_for(tokens: int, most: int) -> int:
    return min(most, 1 << (tokens + ROOM - 1).bit_length())


def may_record(model: Any) -> bool:
    """Whether a step of this model can be recorded here at all."""
    device = model.device
    computed = kernels_compute(device, products_in(device, model.dtype))
    return computed and not model.training and where_weights_lie(model) is not None and room_to_record()


def _steps_for(model: Any, cache: DecoderCache) -> Steps | None:
    """Buffers that fit this cache and that no other one is using, with their recording."""
    device, tokens = model.device, cache.get_seq_length()
    dtype = products_in(device, model.dtype)
    if model.training or not kernels_compute(device, dtype) or not cache.layers or not cache.may_record:
        return None
    weights = where_weights_lie(model)
    if weights is None or tokens >= model.config.max_position_embeddings:
        return None
    known = _STEPS.get(model)
    if known is None or known[0] != weights:
        known = _STEPS[model] = (weights, {})
    keys = cache.layers[0].keys
    key = (len(keys), capacity_for(tokens + 1, model.config.max_position_embeddings), keys.dtype, dtype)
    steps = known[1].get(key)
    if steps is None and room_to_record():
        try:
            steps = Steps(cache, key[1])
            with torch.cuda.device(device):
                made = steps
                steps.recording = Recording(lambda: made.run(model), torch.cuda.Stream(), torch.cuda.graph_pool_handle())
        except RuntimeError:  # out of memory among them
            return None
        if len(known[1]) == MOST:
            known[1].pop(next(iter(known[1])))
        known[1][key] = steps
    free = steps is not None and (steps.owner is None or steps.owner() in (None, cache))
    return steps if free else None
