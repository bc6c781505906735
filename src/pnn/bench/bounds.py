"""How fast something can be, by counting FLOPs and bytes.

**A decoder that rewrites its state**, by bytes: what its passes move in training beyond an additive decoder. Counted in units,
a row of the width for one token, as the kernels move them (`kernels/rewrite_passes`), for c channels:

    forward       X, b → X⁺, c̄                                2c + 2     additive: X, b → X⁺, c̄                  4
    backward      X, b, ∂X⁺, ∂c̄ → ∂X, ∂b                      3c + 3     additive: X⁺, ∂X⁺, ∂c̄ → ∂X (it is ∂b)    4
    made again    X, n × b → n × X, before backward        c + n(c + 1)  n: states between two that are kept
    over tokens   x kept and read, ∂x → ; X, b, ∂x →          c + 5      the gradient of such a compressor is a pass of its own

Before the first branch nothing is written, beyond the last no gradient comes back, and several channels are made from one. The
few numbers a token that are kept as well (gates, values, lengths) are some per cent of a unit and left out. The additive
decoder is taken as measured, and its own passes as ideal: where they are not, rewriting can come out above its bound.

**A decoder of transformers that reads rows** (`reading_seconds`), operation by operation: the longer of its FLOPs at the rate
of a large product and its bytes at the rate of a long copy. Operations are products, attention (one kernel), norms,
activations, the two sums of each layer and the copy of keys and values into a cache. What a faster form would not need to do is
left out: masks, rotations, splitting heads.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pnn.models.ddl import DDLConfig
from pnn.models.precision import undisturbed
from pnn.plasticity.architectures import HEAD, LAYER, NEURON, architecture_of
from pnn.plasticity.units import unit_map

ADDITIVE = 8  # units of a sublayer, forward and backward
ADDITIVE_FIRST = 6  # where only the norm is between the embedding and the first branch


def rewriting_bytes(config: DDLConfig) -> int:
    """That rewriting moves beyond an additive decoder, for every token of training in 16 bit."""
    from pnn.kernels.rewriting import STATES_KEPT_EVERY  # needs Triton

    assert config.residual != "additive"
    channels, sublayers = config.value_channels, 2 * config.depth
    over_tokens = channels > 1 and config.compressor == "token"
    units = sublayers * (_pass(channels, over_tokens) - ADDITIVE)
    units += _first_pass(channels, over_tokens) - ADDITIVE_FIRST
    units -= channels - 1  # ∂X⁺ of the last pass is nothing
    for first in range(0, sublayers, STATES_KEPT_EVERY):
        between = min(STATES_KEPT_EVERY, sublayers - first) - 1
        units += channels + between * (channels + 1) if between else 0
    if channels > 1:  # e → X, ∂X → ∂e; a convolution's gradient reads e as well
        units += 2 * (channels + 1) + config.expand_input
    return units * config.hidden_size * 2  # bytes a number


def _pass(channels: int, over_tokens: bool) -> int:
    forward, backward = 2 * channels + 2, 3 * channels + 3
    return forward + backward + (channels + 5 if over_tokens else 0)


def _first_pass(channels: int, over_tokens: bool) -> int:
    """No branch, and X⁺ is X."""
    forward, backward = channels + 1, 3 * channels + 1
    return forward + backward + (channels + 4 if over_tokens else 0)


def bound_by_bytes(bytes_per_token: float, bytes_per_second: float, additive_tokens_per_second: float) -> float:
    """The share of the additive decoder's speed that is left if these bytes are moved at this rate, nothing else."""
    return 1 / (1 + additive_tokens_per_second * bytes_per_token / bytes_per_second)


# Reading --------------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """Of one operation."""

    flops: float  # for every token
    moved: float  # numbers read and written for every token
    once: int = 0  # numbers read once: weights


def reading_seconds(model: PreTrainedModel, rows: int, length: int, flops_per_second: float, bytes_per_second: float) -> float:
    """The least that reading so many rows of so many tokens takes, with all logits and with a cache."""
    tokens, size = rows * length, model.dtype.itemsize
    return sum(
        max(tokens * work.flops / flops_per_second, (tokens * work.moved + work.once) * size / bytes_per_second)
        for work in reading_work(model, length)
    )


def reading_work(model: PreTrainedModel, length: int) -> list[Work]:
    return [*_of_modules(model), *_of_layers(model, length)]


@torch.no_grad()
def _of_modules(model: PreTrainedModel) -> list[Work]:
    """Products, norms, activations and embeddings, as one forward pass meets them."""
    found: list[Work] = []

    def count(module: Any, args: Any, output: Any) -> None:
        weights = sum(parameter.numel() for parameter in module.parameters())
        if isinstance(module, nn.Linear | Conv1D):
            found.append(Work(2 * module.weight.numel(), args[0].shape[-1] + output.shape[-1], weights))
        elif isinstance(module, nn.Embedding):
            found.append(Work(0, 2 * output.shape[-1]))
        elif isinstance(output, Tensor) and not isinstance(module, nn.Dropout | nn.Identity):
            found.append(Work(0, 2 * output.shape[-1], weights))

    with undisturbed(model), ExitStack() as stack:
        for module in model.modules():
            if next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(count).remove)
        model(torch.ones(1, 2, dtype=torch.long, device=model.device), use_cache=True)
    return found


def _of_layers(model: PreTrainedModel, length: int) -> list[Work]:
    """What lies between modules: attention, its cache, sums, and a gate's product."""
    architecture, found = architecture_of(model), []
    there = unit_map(model, LAYER)
    for layer, block in enumerate(architecture.blocks(model)):
        if not there[layer]:
            continue
        parts = {role: part for part in architecture.parts(HEAD, block) for role in part.roles}
        inner = {role: part for part in architecture.parts(NEURON, block) for role in part.roles}
        widths = {role: part.count * part.width for role, part in parts.items()}
        found.append(Work(4 * length / 2 * widths["o"], sum(widths.values())))
        found.append(Work(0, 2 * (widths["k"] + widths["v"])))
        found += [Work(0, 3 * model.config.hidden_size)] * 2
        if "g" in inner:
            found.append(Work(0, 3 * inner["g"].count))
    return found
