"""Deep Delta decoders: published sizes, generation with and without cache, padding, and what a closed gate leaves."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from small_decoders import DEEP_DELTA, build, config_of, tokens
from transformers import DynamicCache

import pnn
from pnn.config import load_config, shipped_configs
from pnn.models.sections import build_model, model_config
from pnn.nn.delta_rule import DeltaResidual

PUBLISHED = {  # row → parameters of the small and the medium size, from the paper's architecture
    "additive": (123_590_400, 353_508_352),
    "scalar": (123_627_312, 353_606_752),
    "token_repeated": (123_842_476, 354_164_052),
    "token": (123_854_764, 354_180_436),
    "channel_repeated": (123_722_668, 353_856_852),
    "": (123_734_956, 353_873_236),
}


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "counts"), PUBLISHED.items())
@pytest.mark.parametrize("size", ["small", "medium"])
def test_the_published_rows_have_their_published_sizes(row, counts, size):
    config = load_config(f"ddl_{size}" + (f"_{row}" if row else ""))
    with torch.device("meta"):
        model = build_model(model_config(config.model))
    assert sum(p.numel() for p in model.parameters()) == counts[size == "medium"]


def test_the_default_config_is_the_papers_ddl():
    with torch.device("meta"):
        assert sum(p.numel() for p in pnn.DDLForCausalLM(pnn.DDLConfig()).parameters()) == 123_734_956


@pytest.mark.parametrize("size", ["small", "medium", "mini"])
def test_rows_of_a_size_differ_in_their_residual_stream_alone(size):
    base = load_config(f"ddl_{size}")
    for name in shipped_configs():
        if name.startswith(f"ddl_{size}_"):
            config = load_config(name)
            assert (config.data, config.training, config.evaluation) == (base.data, base.training, base.evaluation)
            changed = {key for key, value in config.model.items() if base.model[key] != value}
            assert changed <= {"residual", "value_channels", "compressor", "expand_input"}


# Generation -----------------------------------------------------------------------------------------------------------


def test_a_cache_can_be_chosen_from_repeated_and_reset():
    model, ids = build("token"), tokens(3, 5)
    cache = model(ids).past_key_values
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 5]))  # rows 0, 1, 2 again
    again = model(tokens(3, 6)[:, 5:], past_key_values=cache).logits
    assert torch.allclose(again, model(torch.cat((ids, tokens(3, 6)[:, 5:]), 1)).logits[:, -1:], atol=1e-5)
    with pytest.raises(NotImplementedError, match="cannot be cut back"):
        cache.crop(-1)


def test_histories_keep_a_few_tokens_and_not_the_whole_prompt():
    cache = build("token")(tokens(2, 30)).past_key_values
    assert len(cache.histories) == 2 * 2 + 2  # two a block, the input's and the readout's
    for history in cache.histories.values():
        assert history.shape[1] == 3
        assert history.untyped_storage().nbytes() == history.nbytes


def test_a_cache_without_histories_is_refused():
    with pytest.raises(ValueError, match="give them a DecoderCache, not a DynamicCache"):
        build("token")(tokens(1, 3), past_key_values=DynamicCache())


# What the model computes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, changes in DEEP_DELTA.items() if changes.get("residual") != "additive"])
def test_shut_gates_leave_the_embeddings_read_out(name):
    """To the bit: the network is embed, expand, compress, normalise, head, whatever its branches say."""
    model, ids = build(name), tokens(2, 9)
    inner = model.model
    read_out = model.head(inner.norm(inner.readout(inner.expand(inner.embeddings(ids)))))
    assert (model(ids).logits - read_out).abs().max() > 0.1  # gates as they are
    for module in model.modules():
        if isinstance(module, DeltaResidual):
            module.gate.bias.data.fill_(-1000.0)
    out = model(ids, output_gates=True)
    assert not any(gate.any() for gate in out.gates)
    assert torch.equal(out.logits, read_out)


def test_rounds_apply_the_same_blocks_again():
    """Two rounds of two blocks are four blocks with the same weights."""
    looped, ids = build("channel", num_rounds=2), tokens(2, 9)
    unrolled = build("channel", num_hidden_layers=4)
    weights = looped.state_dict()
    again = {key.replace("blocks.0", "blocks.2").replace("blocks.1", "blocks.3"): value for key, value in weights.items()}
    unrolled.load_state_dict(again | weights)
    assert torch.allclose(looped(ids).logits, unrolled(ids).logits, atol=1e-6)
    out = looped(ids, output_states=True, output_gates=True)
    assert (len(out.states), len(out.gates), len(out.past_key_values.layers)) == (5, 8, 4)
    ends = [pnn.DDLForCausalLM(config_of("channel", num_rounds=n)).model.blocks[0].mlp.down for n in (1, 4)]
    assert ends[0].weight.std().item() == pytest.approx(2 * ends[1].weight.std().item(), rel=0.15)


def test_states_and_gates_come_on_request():
    model, ids = build("channel"), tokens(2, 5)
    assert model(ids).states is None
    out = model(ids, output_states=True, output_gates=True)
    assert [tuple(state.shape) for state in out.states] == [(2, 5, 4, 16)] * 3
    assert [tuple(gate.shape) for gate in out.gates] == [(2, 5)] * 4
    assert all(((gate > 0) & (gate < 2)).all() for gate in out.gates)
    assert len(model.model.blocks[0].attention_residual._forward_hooks) == 0


def test_the_loss_is_the_next_tokens_cross_entropy():
    model, ids = build("channel"), tokens(3, 8)
    labels = ids.clone()
    labels[0, :4] = -100
    logits = model(ids).logits
    wanted = F.cross_entropy(logits[:, :-1].reshape(-1, 60), labels[:, 1:].reshape(-1), ignore_index=-100)
    assert model(ids, labels=labels).loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    assert model(ids, labels=ids, num_items_in_batch=7).loss.item() == pytest.approx(
        F.cross_entropy(logits[:, :-1].reshape(-1, 60), ids[:, 1:].reshape(-1), reduction="sum").item() / 7, abs=1e-5
    )
    assert model(ids, labels=ids, output_logits=False).logits is None


def test_initial_values_are_those_of_the_published_code():
    torch.manual_seed(0)
    model = pnn.DDLForCausalLM(config_of("channel", hidden_size=256, num_hidden_layers=4))
    block = model.model.blocks[0]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.5 / 16, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.5 / 16 / 2, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.5 / 16 / 2, rel=0.05)
    assert block.compress.kernel.std().item() == pytest.approx(0.5 / 16, rel=0.15)
    assert torch.equal(block.compress.read, torch.full((4,), 0.25))
    assert model.model.embeddings.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention_residual.gate.bias.item() == 0.0
    assert 0 < block.attention_residual.value.bias.abs().max().item() <= 1 / 16
    e = torch.randn(2, 5, 256)
    assert torch.equal(model.model.expand(e), e.unsqueeze(2).expand(-1, -1, 4, -1))  # starts as a repetition
    low = pnn.DDLForCausalLM(config_of("channel", beta_init=0.1))
    assert 2 * torch.sigmoid(low.model.blocks[0].mlp_residual.gate.bias).item() == pytest.approx(0.1)


def test_attention_is_what_its_equation_says():
    model = build("additive")
    attention, c = model.model.blocks[0].attention, torch.randn(1, 6, 16)
    heads, width = 2, 8
    q, k, v = attention.qkv(c).view(1, 6, 3, heads, width).unbind(2)
    angle = torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)

    def rotated(x):
        out = torch.empty_like(x)
        out[..., :4] = x[..., :4] * angle.cos()[:, None] - x[..., 4:] * angle.sin()[:, None]
        out[..., 4:] = x[..., 4:] * angle.cos()[:, None] + x[..., :4] * angle.sin()[:, None]
        return out

    def normed(x, weight):
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    q, k = normed(rotated(q), attention.query_norm.weight), normed(rotated(k), attention.key_norm.weight)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(width)
    scores = scores.masked_fill(~torch.ones(6, 6).tril().bool(), -math.inf)
    wanted = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(1, 6, 16)
    context = None

    def keep(module, args):
        nonlocal context
        context = args[1]

    handle = attention.register_forward_pre_hook(keep)
    model(tokens(1, 6), use_cache=False)
    handle.remove()
    assert torch.allclose(attention(c, context), attention.out(wanted), atol=1e-5)


# Around the model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_rounds": 0}, "num_rounds=0, but at least one is needed"),
        ({"value_channels": 0}, "value_channels=0, but at least one is needed"),
        ({"residual": "rewrite"}, "residual='rewrite' is none of delta, write_only, additive"),
        ({"compressor": "tokens"}, "compressor='tokens' is none of channel, token"),
        ({"reading": "text"}, "reading='text' is none of code, paper"),
        ({"compressor_kernel_size": 41}, "compressor_kernel_size=41 is longer than the context of 40 tokens"),
        ({"expansion_kernel_size": 0}, "expansion_kernel_size=0, but at least one is needed"),
        ({"beta_init": 2.5}, "beta_init=2.5 does not lie between 0 and 2"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=16"),
        ({"num_attention_heads": 16}, "heads of 1 numbers cannot be rotated"),
    ],
)
def test_impossible_configs_raise(wrong, message):
    with pytest.raises(StrictDataclassError) as error:
        config_of("channel", **wrong)
    assert message in str(error.value.__cause__ or error.value)
