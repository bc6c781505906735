"""How fast a decoder that rewrites its state can be, by bytes: what its passes move in training beyond an additive decoder.

Counted in units, a row of the width for one token, as the kernels move them (`kernels/rewrite_passes`), for c channels:

    forward       X, b → X⁺, c̄                                2c + 2     additive: X, b → X⁺, c̄                  4
    backward      X, b, ∂X⁺, ∂c̄ → ∂X, ∂b                      3c + 3     additive: X⁺, ∂X⁺, ∂c̄ → ∂X (it is ∂b)    4
    made again    X, n × b → n × X, before backward        c + n(c + 1)  n: states between two that are kept
    over tokens   x kept and read, ∂x → ; X, b, ∂x →          c + 5      the gradient of such a compressor is a pass of its own

Before the first branch nothing is written, beyond the last no gradient comes back, and several channels are made from one. The
few numbers a token that are kept as well (gates, values, lengths) are some per cent of a unit and left out. The additive
decoder is taken as measured, and its own passes as ideal: where they are not, rewriting can come out above its bound.
"""

from __future__ import annotations

from pnn.models.ddl import DDLConfig

ADDITIVE = 8  # units of a sublayer, forward and backward
ADDITIVE_FIRST = 6  # where only the norm is between the embedding and the first branch


def rewriting_bytes(config: DDLConfig, bytes_per_number: int = 2) -> int:
    """That rewriting moves beyond an additive decoder, for every token of training."""
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
    return units * config.hidden_size * bytes_per_number


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
