"""A pass over one micro-batch, forward and backward, recorded as a CUDA graph and replayed with one call.

Issuing the kernels of a PNN update one by one takes the host about 25 ms on an H200's machine: less than the GPU needs for the
paper's batch, but more than it needs for a small one. A replay takes the host almost nothing.

A graph repeats the very same kernels on the very same memory. So inputs are copied into the buffers it was recorded with,
every input must keep its shape, nothing inside may wait for the device, and gradients lie in buffers that stay. Dropout is
new at every replay: its seeds are drawn inside the graph from torch's generator, which the graph advances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pnn.errors import UserError, first_line
from pnn.models.registry import kind_of
from pnn.nn.fast import kernels_compute
from pnn.nn.recording import capture

PASSES_BEFORE_RECORDING = 3  # until everything is compiled and gradients exist
Inputs = dict[str, Tensor]
Pass = Callable[[Inputs], tuple[Tensor, ...]]


def can_record(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a pass of one of our models waits for nothing: in bf16 on a GPU, with rows of one length, or with attention that
    our kernel computes. (fp16 has a loss scale to look at, fp32 the plain attention, which asks for the longest sequence.)"""
    if dtype != torch.bfloat16 or not kernels_compute(device, dtype):
        return False
    if kind_of(model).causal:
        return True
    from pnn.kernels import attention

    config = model.config
    return attention.takes(config.hidden_size // config.num_attention_heads, config.max_position_embeddings)


class Recorder:
    """Computes passes: issues the first few, then records one and replays it for all inputs of its shapes."""

    def __init__(self, run: Pass, parameters: Iterable[Tensor], passes_per_update: int):
        self.run = run
        self.parameters = list(parameters)
        self.adds = passes_per_update > 1  # to the gradients of the passes before; a single pass writes them anew
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
        assert self.graph is not None
        if any(x.shape != self.inputs[name].shape for name, x in inputs.items()):
            # more short sequences than there was room for: too rare for a second recording
            if not self.adds:
                self._zero()
            return self.run(inputs)
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.graph.replay()
        return tuple(x.clone() for x in self.outputs)

    def end_update(self) -> None:
        """Make ready for the next update's gradients. The buffers that a recording writes to must stay."""
        if self.adds:
            self._zero()
        elif self.graph is None:
            for parameter in self.parameters:
                parameter.grad = None

    def _zero(self) -> None:
        torch._foreach_zero_([parameter.grad for parameter in self.parameters if parameter.grad is not None])

    def _record(self, inputs: Inputs) -> None:
        self.inputs = {name: x.clone() for name, x in inputs.items()}
        self.graph = torch.cuda.CUDAGraph()
        try:
            with capture(self.graph, stream=self.stream):
                self.outputs = self.run(self.inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UserError(
                f"an update could not be recorded as a CUDA graph ({first_line(error)}): set training.compile to false"
            ) from error
