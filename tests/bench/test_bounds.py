"""Bytes of rewriting against arithmetic done by hand."""

import pytest

import pnn
from pnn.bench.bounds import bound_by_bytes, rewriting_bytes
from pnn.config import load_config
from pnn.models.sections import model_config

pytest.importorskip("triton")  # the count asks the kernels how often states are kept
TINY = {"vocab_size": 60, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("changes", "units"),
    [
        # two passes of 4 + 6 units against 4 + 4; the second's state made again: 1, 1 → 1
        ({"value_channels": 1}, 2 * (10 - 8) + 3),
        # two passes of (4 + 1 + 4 + 1) + (4 + 1 + 4 + 1 + 4 + 1); made again 4, 1 → 4; first pass 4 → 1 and 4, 4, 1 → 4 against
        # 1 → 1 and 1, 1, 1 → 1; ∂X⁺ of the last pass 4, against 1, is not there; expansion 1 → 4 and 4, 1 → 1
        ({}, 2 * (25 - 8) + 9 + (18 - 6) - 3 + 11),
        ({"expand_input": False}, 2 * (25 - 8) + 9 + (18 - 6) - 3 + 10),
        ({"residual": "write_only"}, 2 * (25 - 8) + 9 + (18 - 6) - 3 + 11),
        # x written and read, ∂x written; then X, ∂x and, but for the first, b read once more
        ({"compressor": "token"}, 2 * (25 + 9 - 8) + 9 + (18 + 8 - 6) - 3 + 11),
        # six passes: four states, of which the first is kept, then two
        ({"value_channels": 1, "num_hidden_layers": 3}, 6 * 2 + (1 + 3 * 2) + (1 + 2)),
    ],
)
def test_units_of_a_tiny_decoder(changes, units):
    config = pnn.DDLConfig(**TINY | changes)
    assert rewriting_bytes(config) == units * 8 * 2
    assert rewriting_bytes(config, bytes_per_number=4) == units * 8 * 4


def test_the_small_size_on_an_h200():
    """4.3 TB/s, and an additive decoder of 507K tokens/s."""

    def bound(name):
        return bound_by_bytes(rewriting_bytes(model_config(load_config(name).model)), 4.3e12, 507_292)

    assert [round(bound(name), 3) for name in ("ddl_small_scalar", "ddl_small", "ddl_small_token")] == [0.984, 0.911, 0.878]
    assert bound_by_bytes(0, 4.3e12, 507_292) == 1
    assert bound_by_bytes(1000, 1e9, 1e6) == 0.5  # a microsecond of work, a microsecond of moving
