"""A computation without gradients, recorded as a CUDA graph and replayed with one call.

A graph repeats the very same kernels on the very same memory: inputs are written where they were when it was recorded, results
are found where they were, and nothing inside may wait for the device. Training's passes, with gradients and dropout, have a
recorder of their own (`training/recording`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pnn.nn.fast import untouched


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
                with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self.result = run()
            finally:
                torch.clear_autocast_cache()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> Any:
        self.graph.replay()
        return self.result


def room_to_record() -> bool:
    """What is recorded keeps its memory: only while a quarter of the GPU's is free."""
    free, total = torch.cuda.mem_get_info()
    return free >= total // 4


def where_weights_lie(model: nn.Module) -> tuple[int, ...] | None:
    """A recording reads weights there, whatever they are by then. None for a model that somebody listens to or has compiled:
    its modules are called."""
    places: list[int] = []
    for module in model.modules():
        if not untouched(module) or module._compiled_call_impl is not None:
            return None
        places += [weight.data_ptr() for weight in module._parameters.values() if weight is not None]
    return tuple(places)
