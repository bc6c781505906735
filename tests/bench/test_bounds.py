"""Bytes of rewriting, FLOPs and bytes of reading, against arithmetic done by hand."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import pnn
from pnn.bench.bounds import bound_by_bytes, reading_seconds, reading_work, rewriting_bytes
from pnn.config import load_config
from pnn.models.sections import model_config
from pnn.plasticity import heads, prune
from pnn.plasticity.measure import flops_per_token

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


def test_the_small_size_on_an_h200():
    """4.3 TB/s, and an additive decoder of 507K tokens/s."""

    def bound(name):
        return bound_by_bytes(rewriting_bytes(model_config(load_config(name).model)), 4.3e12, 507_292)

    assert [round(bound(name), 3) for name in ("ddl_small_scalar", "ddl_small", "ddl_small_token")] == [0.984, 0.911, 0.878]
    assert bound_by_bytes(0, 4.3e12, 507_292) == 1
    assert bound_by_bytes(1000, 1e9, 1e6) == 0.5  # a microsecond of work, a microsecond of moving


def test_the_work_of_reading_with_a_small_gpt2():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=8, n_head=2, n_layer=2, n_positions=16))
    small = prune(model, [(0, 1), ("layer", 1, 0)])
    layer = [
        (0, 16, 16),  # a norm reads 8 and writes 8, and has a weight and a bias
        (2 * 8 * 12, 8 + 12, 8 * 12 + 12),  # one head of 4: queries, keys, values
        (4 * 5 * 4, 16, 0),  # attention to half of ten tokens; four times 4 numbers are read or written
        (0, 16, 0),  # keys and values into the cache
        (2 * 4 * 8, 4 + 8, 4 * 8 + 8),
        (0, 24, 0),  # the sum
        (0, 16, 16),
        (2 * 8 * 32, 40, 8 * 32 + 32),
        (0, 64, 0),  # GELU, one pass
        (2 * 8 * 32, 40, 8 * 32 + 8),
        (0, 24, 0),
    ]
    around = [(0, 16, 0), (0, 16, 0), (0, 16, 16), (2 * 8 * 40, 48, 8 * 40)]  # words, positions, last norm, head
    assert sorted(map(tuple, reading_work(small, 10))) == sorted(layer + around)
    assert sum(work.flops for work in reading_work(model, 10)) == flops_per_token(model, 10)
    # at 1 FLOP a second each product lasts longer than its bytes, everything else takes 4 bytes a number
    slow = 20 * (flops_per_token(small, 10))
    assert reading_seconds(small, 2, 10, 1, 1e30) == pytest.approx(slow)
    bytes_ = 4 * sum(20 * moved + once for _, moved, once in layer + around)
    assert reading_seconds(small, 2, 10, 1e30, 1) == pytest.approx(bytes_)
    assert reading_seconds(small, 2, 10, 1, 1) > max(slow, bytes_)


def test_a_llamas_gate_and_shared_keys_count():
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 6, "vocab_size": 40}
    work = reading_work(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)), 10)
    assert {(4 * 5 * 8, 8 + 4 + 4 + 8, 0), (0, 2 * (4 + 4), 0), (0, 3 * 6, 0)} <= {tuple(one) for one in work}


def test_half_the_heads_of_gpt2_by_count():
    """H200: 700 TFLOP/s, 4.3 TB/s."""
    with torch.device("meta"):
        whole = GPT2LMHeadModel(GPT2Config()).bfloat16()
        small = prune(whole, [head for head in heads(whole) if head[1] % 2])
    least = [reading_seconds(model, 64, 256, 7e14, 4.3e12) for model in (whole, small)]
    assert [round(1000 * one, 1) for one in least] == [7.6, 6.7]
    assert round(least[0] / least[1], 2) == 1.14
