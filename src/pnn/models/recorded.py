"""A decoder of transformers without a waiting host, called as its users call it: `model(ids)`, `model.generate(ids)`.

`quicken(model)` changes two things and no weight. Outputs are those of transformers, to rounding.

**GELU in one pass.** transformers writes GPT-2's activation, ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), as eight passes over the
widest states there are. torch computes the same in one, in training too.

**Recorded passes**, on a GPU in 16 bit, without gradients. A large GPU computes a pass of GPT-2's size about as fast as Python
issues it, so what was pruned away does not show. The layers are recorded as a CUDA graph (`nn/recording`) and replayed with one
call:

    reading    rows of one length: a shape is recorded when it comes a second time. Keys and values are copied into the cache
               that the caller gets, where transformers copies them too
    writing    one more token for each text: keys and values move from the caller's cache to buffers with room for more, which
               the cache then shows the filled part of. Attention sees places by a mask

The head is not recorded: its logits are large, and would be copied once more. Whatever is not exactly this (gradients,
training, padding in the rows, hooks, adapters, another attention or kind of cache, hidden states or attentions asked for, a
stream of one's own, a second thread, too little memory) takes transformers' own path.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.activations import ACT2FN, NewGELUActivation
from transformers.cache_utils import DynamicLayer

from pnn.models.decoder_steps import MOST, capacity_for
from pnn.models.registry import kind_of
from pnn.nn.fast import kernels_compute, products_in
from pnn.nn.recording import Recording, Recordings, room_to_record, where_weights_lie

MOST_TOKENS = 1 << 16  # of a pass that is recorded: a larger one keeps a GPU busy by itself, and its graph much memory
ASKED = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache"}  # all that a recorded pass knows of
WISHES = ("output_attentions", "output_hidden_states")


def quicken(model: PreTrainedModel) -> None:
    """From now on the model computes as this file says. Ours do so by themselves."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, ACT2FN["gelu_pytorch_tanh"])
    base, kind = recorded_part(model), kind_of(model)
    if kind.causal and not kind.ours and base is not model and not hasattr(base, "unrecorded_class"):
        base.__class__ = _recorded_class(type(base))


def recorded_part(model: PreTrainedModel) -> Any:
    """All but the head. OPT's head reads a decoder inside its base model."""
    base: Any = model.base_model
    return getattr(base, "decoder", base)


@contextmanager
def quickened(model: PreTrainedModel) -> Iterator[None]:
    """Meanwhile the model computes as a reorganised one does: so two can be compared."""
    base = recorded_part(model)
    kind = type(base)
    activations = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is NewGELUActivation
    ]
    quicken(model)
    try:
        yield
    finally:
        if base.__class__ is not kind:
            base.__class__ = kind
            _KNOWN.pop(base, None)
        for module, name, child in activations:
            setattr(module, name, child)


_MADE: dict[Any, type[PreTrainedModel]] = {}


def _recorded_class(original: Any) -> type[PreTrainedModel]:
    """A base model's class, with a `forward` that replays. transformers finds what a class can do by its name and module."""
    if original in _MADE:
        return _MADE[original]

    @functools.wraps(original.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        call = _call(self, args, kwargs)
        found = None if call is None else _replayed(self, call)
        return original.forward(self, *args, **kwargs) if found is None else found

    def reduce(self: PreTrainedModel) -> Any:  # made at run time: a pickle names the original
        return _of_recorded_class, (original,), self.__dict__

    body = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"forward": forward, "__reduce__": reduce, "unrecorded_class": original}
    _MADE[original] = type(original.__name__, (original,), body)
    return _MADE[original]


def _of_recorded_class(original: Any) -> PreTrainedModel:
    made: Any = _recorded_class(original)
    return made.__new__(made)


# What is asked for ----------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    ids: Tensor
    mask: Tensor | None
    positions: Tensor | None
    cache: DynamicCache | None
    keeps: bool  # whether the caller wants a cache


def _call(base: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """None for a call that cannot be recorded as it is."""
    if torch.is_grad_enabled() or base.training or torch.compiler.is_compiling() or not can_record(base):
        return None
    config = base.config
    given = {name: value for name, value in kwargs.items() if value is not None and (value is not False or name not in WISHES)}
    given |= {"input_ids": args[0]} if args else {}
    if len(args) > 1 or not given.keys() <= ASKED or any(getattr(config, name, False) for name in WISHES):
        return None
    ids, cache = given.get("input_ids"), given.get("past_key_values")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.long or config._attn_implementation != "sdpa":
        return None
    if not (cache is None or _is_simple(cache)) or getattr(config, "return_dict", True) is False:
        return None
    keeps = given.get("use_cache", getattr(config, "use_cache", False))
    return Call(ids, given.get("attention_mask"), given.get("position_ids"), cache, bool(keeps))


def keeps_everything(config: Any) -> bool:
    """Whether the caches of such models do: sliding windows do not."""
    return _is_simple(DynamicCache(config=config))


def _is_simple(cache: Any) -> bool:
    """A cache that keeps all it was given, as `generate` makes it."""
    return type(cache) is DynamicCache and not cache.offloading and all(type(layer) is DynamicLayer for layer in cache.layers)


def can_record(base: PreTrainedModel) -> bool:
    """Whether anything can be recorded here at all: on a GPU in 16 bit, on the stream that everybody uses."""
    device = base.device
    if device.type != "cuda" or not kernels_compute(device, products_in(device, base.dtype)):
        return False
    return torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


# Replaying ------------------------------------------------------------------------------------------------------------


class Known:
    """What is recorded of one base model whose weights lie where they did."""

    def __init__(self, weights: tuple[int, ...], base: PreTrainedModel):
        self.weights = weights
        self.simple = keeps_everything(base.config)
        self.readings = Recordings(weights, base.device)
        self.slots: dict[Any, Slots] = {}
        self.cannot_write = False
        self.lock = Lock()


_KNOWN: WeakKeyDictionary[nn.Module, Known] = WeakKeyDictionary()


def _replayed(base: PreTrainedModel, call: Call) -> Any:
    """What the base model returns; None where this call is not recorded."""
    weights = where_weights_lie(base)
    if weights is None:
        return None
    known = _KNOWN.get(base)
    if known is None or known.weights != weights:  # moved, replaced or pruned since: what was recorded reads the old ones
        known = _KNOWN[base] = Known(weights, base)
    if not known.simple or not known.lock.acquire(blocking=False):
        return None
    try:
        # buffers are tensors like others: a caller may be in inference mode today and take gradients tomorrow
        with torch.inference_mode(False), torch.no_grad():
            found = _read(base, known, call) if call.cache is None else _written(base, known, call)
        if found is None:
            return None
        made, h, cache = found
        if call.cache is None and call.keeps:
            cache = DynamicCache(config=base.config)
            for layer, (keys, values) in enumerate(found[2]):
                cache.update(keys, values, layer)  # copies
        return made(last_hidden_state=h.clone(), past_key_values=cache)
    finally:
        known.lock.release()


class Kept(DynamicCache):
    """Takes what the layers give it and copies nothing."""

    def __init__(self, config: Any):
        super().__init__(config=config)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.kept.append((keys, values))
        return keys, values


def without_asking(config: Any) -> dict[str, Any]:
    """What else to hand a decoder with whole rows, in a pass that is recorded: a cache that keeps nothing for long. Without
    any, transformers would ask the device whether rows are packed, and mask them while it is recorded."""
    return {"past_key_values": Kept(config), "use_cache": True}


def _read(base: Any, known: Known, call: Call) -> tuple[Any, Tensor, Any] | None:
    """Whole rows: the kind of output, the last states, and each layer's keys and values if they are kept."""
    ids = call.ids
    if call.positions is not None or not 0 < ids.numel() <= MOST_TOKENS:
        return None
    if call.mask is not None and (call.mask.shape != ids.shape or not bool(call.mask.all())):  # transformers asks the same
        return None

    def run(flat: Tensor) -> tuple[Any, Tensor, Any]:
        unasked = without_asking(base.config)
        out = base.unrecorded_class.forward(base, input_ids=flat, **unasked)
        return type(out), out.last_hidden_state, unasked["past_key_values"].kept if call.keeps else None

    key = (tuple(ids.shape), call.keeps, products_in(ids.device, base.dtype))
    found: tuple[Any, Tensor, Any] | None = known.readings.replay(key, ids, run)
    return found


class Slots(DynamicCache):
    """Keys and values of texts that are being written, with room for `capacity` tokens. One cache at a time is served: its
    tensors are then views of these, and good as long as it lives."""

    def __init__(self, cache: DynamicCache, capacity: int, products: torch.dtype):
        super().__init__()

        def room(x: Tensor) -> Tensor:
            return x.new_zeros(*x.shape[:2], capacity, x.shape[3])

        keys = _tensors(cache)[0]
        rows, device = len(keys), keys.device
        self.capacity, self.products = capacity, products
        self.room = [room(x) for x in _tensors(cache)]
        self.shown: list[Tensor] = []
        self.owner: ReferenceType[DynamicCache] | None = None
        self.ids, self.positions = (torch.zeros(rows, 1, dtype=torch.long, device=device) for _ in range(2))
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.seen = torch.zeros(rows, capacity, dtype=torch.bool, device=device)
        self.seen[:, 0] = True  # a step that sees nothing has no answer, not even while it is recorded
        self.recording: Recording | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # nobody may ask for it: a recording would keep the answer

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        # under autocast rotated keys are in fp32 and values in 16 bit: a cache of transformers then holds both in fp32
        room = self.room[2 * layer_idx : 2 * layer_idx + 2]
        k, v = (into.index_copy_(2, self.at, new.to(into.dtype)) for into, new in zip(room, (keys, values), strict=True))
        return k, v

    def run(self, base: Any) -> tuple[Any, Tensor]:
        """The next token's last state."""
        out = base.unrecorded_class.forward(
            base,
            input_ids=self.ids,
            attention_mask=self.seen[:, None, None],
            position_ids=self.positions,
            past_key_values=self,
            use_cache=True,
        )
        return type(out), out.last_hidden_state

    def serves(self, cache: DynamicCache) -> bool:
        """Whether all that the cache holds is here: nobody reordered it, cut it or added to it elsewhere."""
        if self.owner is None or self.owner() is not cache:
            return False
        now = _tensors(cache)
        return len(now) == len(self.shown) and all(one is other for one, other in zip(now, self.shown, strict=True))

    def is_free_for(self, cache: DynamicCache) -> bool:
        """Whether no other cache has anything left here, a part that it cut out among it."""
        owner = None if self.owner is None else self.owner()
        places = {x.untyped_storage().data_ptr() for x in self.room}
        return owner in (None, cache) or not any(x.untyped_storage().data_ptr() in places for x in _tensors(owner))

    def take(self, cache: DynamicCache, length: int) -> None:
        for mine, theirs in zip(self.room, _tensors(cache), strict=True):
            mine[:, :, :length].copy_(theirs)
            mine[:, :, length:].zero_()  # what an earlier text left there may not be finite
        self.seen.zero_()
        self.owner, self.shown = ref(cache), []

    def feed(self, call: Call, length: int) -> None:
        """The next token, and what it sees."""
        self.ids.copy_(call.ids)
        self.at.fill_(length)
        self.positions.fill_(length) if call.positions is None else self.positions.copy_(call.positions)
        seen = self.seen[:, : length + 1]
        seen.fill_(True) if call.mask is None else seen.copy_(call.mask)

    def show(self, cache: DynamicCache, length: int) -> None:
        self.shown = [x[:, :, :length] for x in self.room]
        for layer, keys, values in zip(cache.layers, self.shown[::2], self.shown[1::2], strict=True):
            layer.keys, layer.values = keys, values


def _tensors(cache: DynamicCache) -> list[Tensor]:
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def _written(base: PreTrainedModel, known: Known, call: Call) -> tuple[Any, Tensor, DynamicCache] | None:
    """One more token for each text of the caller's cache."""
    cache, (rows, tokens) = call.cache, call.ids.shape
    assert cache is not None
    if tokens != 1 or not call.keeps or not all(layer.is_initialized for layer in cache.layers) or not cache.layers:
        return None
    length = cache.get_seq_length()
    if any(x.ndim != 4 or len(x) != rows or x.shape[2] != length for x in _tensors(cache)):
        return None
    if call.mask is not None and (call.mask.shape != (rows, length + 1) or call.positions is None):
        return None  # where nobody says positions, models count them differently under a mask
    if call.positions is not None and call.positions.shape not in ((rows, 1), (1, 1)):
        return None
    slots = _slots_for(base, known, cache, length)
    if slots is None:
        return None
    assert slots.recording is not None
    slots.feed(call, length)
    made, h = slots.recording.replay()
    slots.show(cache, length + 1)
    return made, h, cache


def _slots_for(base: PreTrainedModel, known: Known, cache: DynamicCache, length: int) -> Slots | None:
    """Slots with the contents of this cache, and their recording; None where there is no room or others use them."""
    products, first = products_in(base.device, base.dtype), _tensors(cache)[0]
    for slots in known.slots.values():
        if slots.serves(cache) and length < slots.capacity and slots.products == products:
            return slots
    most = base.config.max_position_embeddings
    if length >= most or known.cannot_write:
        return None
    shapes = tuple((x.shape[1], x.shape[3], x.dtype) for x in _tensors(cache))
    key = (len(first), capacity_for(length + 1, most), shapes, products)
    found = known.slots.get(key)
    if found is None:
        known.cannot_write = not room_to_record()
        if known.cannot_write:
            return None
        try:
            found = Slots(cache, key[1], products)
            with torch.cuda.device(base.device):
                step = functools.partial(found.run, base)
                found.recording = Recording(step, torch.cuda.Stream(), torch.cuda.graph_pool_handle())
        except RuntimeError:  # out of memory among them
            known.cannot_write = True
            return None
        if len(known.slots) == MOST:
            known.slots.pop(next(iter(known.slots)))
        known.slots[key] = found
    elif not found.is_free_for(cache):
        return None
    found.take(cache, length)
    return found
