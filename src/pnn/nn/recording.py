"""A computation without gradients, recorded as a CUDA graph and replayed with one call.

A graph repeats the very same kernels on the very same memory: inputs are written where they were when it was recorded, results
are found where they were, and nothing inside may wait for the device. Training's passes, with gradients and dropout, have a
recorder of their own (`training/recording`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MOST = 32  # shapes that are recorded of one model
# Whose modules do the same again with the same weights. Others' may not: an adapter can be switched off
KNOWN = {"torch", "transformers", __name__.partition(".")[0]}
WITHOUT_UNITS = "pnn.plasticity.architectures"  # what computes in a module of transformers whose heads or layer are gone


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, **how: Any) -> Iterator[None]:
    """`torch.cuda.graph`, without garbage collection: an older graph that only the collector still knows would be destroyed
    in the middle of the capture, and that ends it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **how):
            yield
    finally:
        if collects:
            gc.enable()


class Recording:
    """Of `run`, on this stream, with memory from this pool. `result` is what it returned; good until the next replay of a
    recording from the same pool."""

    def __init__(self, run: Callable[[], Any], stream: torch.cuda.Stream, pool: Any):
        self.graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # gives the old stream back, also where a capture fails
            run()  # what is compiled, chosen or allocated once must not be recorded
            # autocast keeps weights in 16 bit until its block ends: those made before would be gone when the graph is replayed,
            # and those made inside hold nothing until then
            torch.clear_autocast_cache()
            try:
                # other threads, which read the next batches, may allocate meanwhile
                with capture(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self.result = run()
            finally:
                torch.clear_autocast_cache()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> Any:
        self.graph.replay()
        return self.result


def reading(x: Tensor) -> Callable[[], Any]:
    """Gives these numbers, as Python's, as soon as they are there. On a GPU nobody waits for what is issued in the meantime."""
    if x.device.type != "cuda":
        return x.tolist
    on_host = x.to("cpu", non_blocking=True)
    there = torch.cuda.current_stream(x.device).record_event()

    def read() -> Any:
        there.synchronize()
        return on_host.tolist()

    return read


def room_to_record() -> bool:
    """What is recorded keeps its memory: only while a quarter of the GPU's is free."""
    free, total = torch.cuda.mem_get_info()
    return free >= total // 4


class Recordings:
    """The recorded passes of one model, whose weights lie where `weights` says. They share their memory: one runs at a time,
    and what it gives is copied before the next."""

    def __init__(self, weights: tuple[int, ...], device: torch.device, most: int | None = None):
        self.weights, self.device, self.most = weights, device, most
        self.seen: set[Any] = set()
        self.recorded: dict[Any, tuple[Tensor, Recording]] = {}  # where inputs go, and what reads them
        self.room: dict[Any, Any] = {}  # of passes whose tokens halt: for how many there is (`evaluation/halting_passes`)
        self.full, self.failed = False, ""  # and why nothing more is recorded
        with torch.cuda.device(device):
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def replay(self, key: Any, flat: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """What `run` gives for these inputs, which lie on the host or on the device; None where nothing is recorded for them: a
        shape is recorded when it comes a second time. Good until the next replay."""
        with torch.cuda.device(self.device):
            if key not in self.recorded:
                first = key not in self.seen
                self.seen.add(key)
                if first or self.full or not self._record(key, flat, run):
                    return None
            buffer, recording = self.recorded[key]
            self._fill(buffer, flat)
            return recording.replay()

    def forget(self, key: Any) -> None:
        """What is recorded for it serves nobody any more."""
        self.recorded.pop(key, None)

    def _fill(self, buffer: Tensor, flat: Tensor) -> None:
        buffer.copy_(flat if flat.device == buffer.device else flat.pin_memory(), non_blocking=True)

    def _record(self, key: Any, flat: Tensor, run: Callable[[Tensor], Any]) -> bool:
        if len(self.recorded) >= (self.most or MOST):
            self.full, self.failed = True, f"{len(self.recorded)} passes are recorded already"
        elif not room_to_record():
            self.full, self.failed = True, "less than a quarter of the GPU's memory is free"
        else:
            buffer = torch.empty_like(flat, device=self.device)
            self._fill(buffer, flat)
            try:
                self.recorded[key] = buffer, Recording(lambda: run(buffer), self.stream, self.pool)
            except RuntimeError as error:  # out of memory among them
                self.full, self.failed = True, str(error) or type(error).__name__
        return not self.full


def where_weights_lie(model: nn.Module) -> tuple[int, ...] | None:
    """A recording reads weights there, whatever they are by then. None for a model that somebody listens to, has compiled,
    adapted or quantised: its modules are called. It is asked before every pass, so it walks the modules by itself: a third of
    the time."""
    places: list[int] = []
    modules = [model]
    while modules:
        module = modules.pop()
        inside = module.__dict__
        if inside["_forward_hooks"] or inside["_forward_pre_hooks"] or inside["_backward_hooks"]:
            return None
        if inside["_backward_pre_hooks"] or inside.get("_compiled_call_impl") is not None:
            return None
        whose = type(module).__module__.partition(".")[0]
        if whose not in KNOWN:
            return None
        forward = inside.get("forward")
        if forward is not None and not (whose == "transformers" and forward.__module__ == WITHOUT_UNITS):
            return None
        for weight in inside["_parameters"].values():
            if weight is not None:
                if type(weight) is not nn.Parameter and type(weight) is not Tensor:
                    return None
                places.append(weight.data_ptr())
        modules += [child for child in inside["_modules"].values() if child is not None]
    return tuple(places)
