"""A pass over one micro-batch, forward and backward, recorded as a CUDA graph and replayed with one call.

Issuing the kernels of a PNN update one by one takes the host about 25 ms on an H200's machine: longer than the GPU needs for a
small batch, and on a large one the GPU still waits a few microseconds between kernels. A replay has neither.

A graph repeats the very same kernels on the very same memory. So inputs are copied into the buffers it was recorded with,
every input must keep its shape, and gradients are added to buffers that stay (`zero_grad(set_to_none=False)`). Dropout is
new at every replay: its seeds are drawn inside the graph from torch's generator, which the graph advances.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Inputs = dict[str, Tensor]


class RecordedPass:
    def __init__(self, run: Callable[[Inputs], tuple[Tensor, ...]], inputs: Inputs, stream: torch.cuda.Stream):
        """`run` must have been called a few times on `stream`, so that everything is compiled and gradients exist."""
        self.inputs = {name: x.clone() for name, x in inputs.items()}
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.outputs = run(self.inputs)

    def takes(self, inputs: Inputs) -> bool:
        return all(x.shape == self.inputs[name].shape for name, x in inputs.items())

    def __call__(self, inputs: Inputs) -> tuple[Tensor, ...]:
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.graph.replay()
        return tuple(x.clone() for x in self.outputs)
