"""A decoder's state on its way through all sublayers, by kernels: what lies between two branches is one pass over the state.

Computes what the blocks compute one by one (`nn/delta_rule`, `models/ddl`), for whole rows of text without cache and
padding, or for the next token of each text, in 16 bit on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from pnn.nn.decoder import RMSNorm
from pnn.nn.delta_rule import ChannelCompressor, DeltaResidual, Squeeze, TokenCompressor
from pnn.nn.fast import for_kernels, untouched

if TYPE_CHECKING:
    from pnn.kernels import rewriting  # needs Triton: imported where it runs


class Sublayer(NamedTuple):
    """Compress, normalise, process, rewrite. At the end of a model there is nothing to process and to rewrite."""

    compress: nn.Module
    norm: nn.Module
    branch: Callable[[Tensor], Tensor] | None = None
    residual: nn.Module | None = None
    history: Tensor | None = None  # (B, taps − 1, c, d): the states before the next token, moved on in place


def takes(state: Tensor, sublayers: Iterable[Sublayer]) -> bool:
    """Whether kernels compute this: nothing in between is hooked or replaced, and it has a shape that they know. state:
    (B, T, c, d)."""
    if not for_kernels(state):
        return False
    from pnn.kernels import rewriting

    plain = (RMSNorm, DeltaResidual, Squeeze, ChannelCompressor, TokenCompressor, nn.Linear)
    modules = [part for one in sublayers for part in (one.compress, one.norm, one.residual) if part is not None]
    inner = [module for part in modules for module in part.modules()]
    if not all(type(module) in plain and untouched(module) for module in inner):
        return False
    taps = {len(module.kernel) for module in inner if isinstance(module, TokenCompressor)} or {1}
    return all(rewriting.takes(state.shape[-1], state.shape[-2], count) for count in taps)


def run(state: Tensor, sublayers: list[Sublayer], keep: Tensor | None = None) -> Tensor:
    """state: (B, T, c, d) → what the last norm gives, (B, T, d). `keep`: (B, T), False at padding; read with histories."""
    from pnn.kernels import rewriting

    batch, length, channels, width = state.shape
    erase = any(isinstance(one.residual, DeltaResidual) and one.residual.erase for one in sublayers)
    tape = rewriting.Tape(erase, length, keeps=torch.is_grad_enabled())
    states = state.reshape(batch * length, channels, width)
    write = None
    compressors = dict.fromkeys(one.compress for one in sublayers)  # a block's two sublayers share theirs
    mixes = {compress: _mix(compress) for compress in compressors}
    if sublayers[0].history is not None:
        kept = states.new_ones(batch, dtype=torch.float32) if keep is None else keep.flatten().float()
    for one in sublayers:
        reader = _reader(one, mixes[one.compress])
        if one.history is None:
            states, read = rewriting.sublayer(tape, states, write, reader)
        else:
            states, read = rewriting.step(erase, states, write, reader, rewriting.Past(one.history, kept))
        if one.branch is None:
            break
        branch = one.branch(read.context.view(batch, length, width)).view(-1, width)
        assert read.values is not None
        assert read.betas is not None
        write = rewriting.Write(branch.to(states.dtype), read.values, read.betas)
    return read.context.view(batch, length, width)


def _mix(compress: nn.Module) -> Tensor | None:
    """A compressor's weights, (c, d) or (taps, c, d)."""
    return None if isinstance(compress, Squeeze) else compress.weights()  # type: ignore[operator]


def _reader(one: Sublayer, mix: Tensor | None) -> rewriting.Reader:
    from pnn.kernels import rewriting

    assert isinstance(one.norm, RMSNorm)
    weight, eps = one.norm.weight, one.norm.eps
    if not isinstance(one.residual, DeltaResidual):
        return rewriting.Reader(mix, weight, None, None, None, None, eps, from_state=False)
    value, gate = one.residual.value, one.residual.gate
    from_state = one.residual.variant == "code"
    return rewriting.Reader(mix, weight, value.weight, value.bias, gate.weight[0], gate.bias, eps, from_state)
