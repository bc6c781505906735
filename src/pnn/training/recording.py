"""A pass over one micro-batch, forward and backward, recorded as a CUDA graph and replayed with one call.

Issuing the kernels of a PNN update one by one takes the host about 25 ms on an H200's machine: less than the GPU needs for the
paper's batch, but more than it needs for a small one. A replay takes the host almost nothing.

A graph repeats the very same kernels on the very same memory. So inputs are copied into the buffers it was recorded with,
every input must keep its shape, nothing inside may wait for the device, and gradients are added to buffers that stay
(`zero_grad(set_to_none=False)`). Dropout is new at every replay: its seeds are drawn inside the graph from torch's generator,
which the graph advances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pnn import kernels
from pnn.errors import UserError

PASSES_BEFORE_RECORDING = 3  # until everything is compiled and gradients exist
Inputs = dict[str, Tensor]
Pass = Callable[[Inputs], tuple[Tensor, ...]]


def can_record(model_config: Any, mixed_precision: str, device: torch.device) -> bool:
    """Whether a pass of this model waits for nothing: in bf16 on a GPU, with attention that our kernel computes. (fp16 has a
    loss scale to look at, fp32 the plain attention, which asks for the longest sequence.)"""
    if device.type != "cuda" or mixed_precision != "bf16" or not kernels.HAS_TRITON:
        return False
    from pnn.kernels import attention

    head_width = model_config.hidden_size // model_config.num_attention_heads
    new_enough = torch.cuda.get_device_capability(device)[0] >= 8
    return new_enough and attention.takes(head_width, model_config.max_position_embeddings)


class Recorder:
    """Computes passes: issues the first few, then records one and replays it for all inputs of its shapes."""

    def __init__(self, run: Pass):
        self.run = run
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.passes = 0

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """A pass can only be recorded on a stream that its warm-up ran on, and not on the default one."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def __call__(self, inputs: Inputs) -> tuple[Tensor, ...]:
        self.passes += 1
        if self.passes <= PASSES_BEFORE_RECORDING:
            return self.run(inputs)
        if self.graph is None:
            self._record(inputs)
        if any(x.shape != self.inputs[name].shape for name, x in inputs.items()):
            return self.run(inputs)  # more short sequences than there was room for: too rare for a second recording
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        assert self.graph is not None
        self.graph.replay()
        return tuple(x.clone() for x in self.outputs)

    def _record(self, inputs: Inputs) -> None:
        self.inputs = {name: x.clone() for name, x in inputs.items()}
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.outputs = self.run(self.inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UserError(
                f"an update could not be recorded as a CUDA graph ({str(error).splitlines()[0]}): set training.compile to false"
            ) from error
