"""Removing heads: the same outputs as masking them, in smaller matrices, whatever set of heads goes."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from beside import STORIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pnn
from pnn.errors import UserError
from pnn.plasticity import choose, grow, heads, masked, prune, score
from pnn.plasticity.heads import head_map, stretches

GENERATION = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def size(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def greedy(model, ids, **more):
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GENERATION, **more)


# Outputs --------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_removed_is_masked_for_any_heads(model, logits, data):
    everything = heads(model)
    gone = data.draw(st.sets(st.sampled_from(everything), min_size=1, max_size=len(everything) - 1))
    with masked(model, gone):
        expected = logits(model)
    pruned = prune(model, gone, whole_layers=True)
    assert heads(pruned) == [head for head in everything if head not in gone]
    assert (logits(pruned) - expected).abs().max() < 1e-5
    assert (expected - logits(model)).abs().max() > 1e-4  # the heads did something


def test_every_layer_but_one_may_go(model, logits):
    gone = [head for head in heads(model) if head[0] != 1]
    with masked(model, gone):
        expected = logits(model)
    assert (logits(prune(model, gone, whole_layers=True)) - expected).abs().max() < 1e-5


def test_matrices_shrink_by_what_the_heads_owned(model):
    gone = [(0, 1), (2, 0), (2, 2)]
    owned = sum(one.view().numel() for head in gone for one in stretches(model, head))
    assert size(prune(model, gone)) == size(model) - owned


def test_a_head_of_gpt2_owns_what_the_arithmetic_says():
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1))
    assert len(heads(model)) == 12
    assert sum(one.width * (768 if one.parameter.dim() == 2 else 1) for one in stretches(model, (0, 3))) == 196_800


def test_a_group_of_queries_goes_with_its_keys_and_values(built):
    model = built("llama")
    assert head_map(model) == [[0, 1, 2]] * 3
    attention = prune(model, [(1, 0)]).model.layers[1].self_attn
    shapes = [tuple(getattr(attention, f"{name}_proj").weight.shape) for name in "qkvo"]
    assert shapes == [(32, 48), (16, 48), (16, 48), (48, 32)]


def test_gradients_are_those_of_the_masked_model(model, texts):
    gone = [(0, 0), (2, 1)]
    batch = texts(model)[0]
    pruned, full = prune(model, gone), copy.deepcopy(model)
    pruned(**batch).loss.backward()
    with masked(full, gone):
        full(**batch).loss.backward()
    for head in heads(pruned):
        for one, other in zip(stretches(pruned, head), stretches(full, head), strict=True):
            assert (one.of(one.parameter.grad) - other.of(other.parameter.grad)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["pnn", "pnn bert"])
def test_packed_sequences_too(built, name):
    model = built(name)
    gone = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)]
    packed = {
        "input_ids": torch.randint(1, 50, (1, 20), generator=torch.Generator().manual_seed(0)),
        "cu_seqlens": torch.tensor([0, 7, 20], dtype=torch.int32),
    }
    with torch.no_grad():
        with masked(model, gone):
            expected = model(**packed).logits
        assert (prune(model, gone, whole_layers=True)(**packed).logits - expected).abs().max() < 1e-5


# Generation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [[(0, 0), (2, 1), (2, 2)], [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 1)]])
def test_greedy_text_is_the_same_cached_and_not_and_masked(decoder, gone):
    gone = [head for head in gone if head in heads(decoder)]
    ids = torch.randint(1, 50, (2, 5), generator=torch.Generator().manual_seed(3))
    pruned = prune(decoder, gone, whole_layers=True)
    text = greedy(pruned, ids)
    assert text.shape == (2, 13)
    assert torch.equal(text, greedy(pruned, ids, use_cache=False))
    with masked(decoder, gone):
        assert torch.equal(text, greedy(decoder, ids))


def test_beams_and_left_padding_with_a_layer_without_heads(decoder):
    pruned = prune(decoder, [head for head in heads(decoder) if head[0] == 0], whole_layers=True)
    ids = torch.randint(1, 50, (2, 6), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    both = [pruned.generate(ids, attention_mask=mask, num_beams=2, use_cache=cache, **GENERATION) for cache in (True, False)]
    assert torch.equal(*both)


# The input stays, and heads come and go -------------------------------------------------------------------------------


def test_the_input_stays_as_it_was(model, texts):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config, kind = model.config.to_dict(), type(model)
    smaller = prune(model, [(0, 1)])
    grown = grow(smaller, [(0, 1), (1, len(head_map(model)[1]))])
    for method in ("entropy", "magnitude", "contribution", "gradient", "combined"):
        score(model, texts(model), method)
    assert heads(grown) != heads(smaller)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.config.to_dict(), type(model)) == (config, kind)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_heads_go_and_come_and_go(precise, logits):
    once = prune(precise, [(0, 0), (0, 2)])
    grown = grow(once, [(0, 2)])
    assert (logits(grown) - logits(once)).abs().max() < 1e-6
    twice = prune(grown, [(0, 2)])
    assert head_map(twice) == head_map(once)
    assert torch.equal(logits(twice), logits(once))


def test_heads_keep_their_index_when_others_go(model):
    pruned = prune(prune(model, [(1, 0)]), [(1, 2)])
    assert (1, 1) in heads(pruned)
    for one, other in zip(stretches(pruned, (1, 1)), stretches(model, (1, 1)), strict=True):
        assert torch.equal(one.view(), other.view())


def test_an_empty_layer_can_grow_again(precise, logits):
    empty = prune(precise, [head for head in heads(precise) if head[0] == 0], whole_layers=True)
    grown = grow(empty, [(0, 1), (0, 2)])
    assert head_map(grown)[0] == [1, 2]
    assert (logits(grown) - logits(empty)).abs().max() < 1e-6
    assert (logits(grow(empty, [(0, 1)], init="random")) - logits(empty)).abs().max() > 1e-6


def test_a_frozen_matrix_stays_frozen(own):
    own.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in prune(own, [(0, 0)]).parameters())


def test_a_pruned_model_is_still_of_its_class(built):
    assert isinstance(prune(built("gpt2"), [(0, 0)]), hf.GPT2LMHeadModel)
    assert isinstance(prune(built("pnn"), [(0, 0)]), pnn.PNNForMaskedLM)


# Errors ---------------------------------------------------------------------------------------------------------------


def test_a_layer_keeps_one_head_unless_told(built):
    with pytest.raises(UserError, match=r"none in layer 2 \(whole_layers=True"):
        prune(built("gpt2"), [(2, index) for index in range(4)])


def test_everything_cannot_go(model):
    with pytest.raises(UserError, match="none in the whole model"):
        prune(model, heads(model), whole_layers=True)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([(0, 9)], "no head 9 in layer 0"),
        ([(7, 0)], "no head 0 in layer 7"),
        ([(0, -1)], "no head -1"),
        ([3], "a pair"),
        ([(1, 2, 3)], "a pair"),
    ],
)
def test_a_head_that_is_not_there(built, asked, message):
    for act in (prune, masked):
        with pytest.raises(UserError, match=message):
            act(built("gpt2"), asked)


def test_an_unknown_architecture_is_named_with_those_that_are_known():
    model = hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    for act in (heads, lambda m: prune(m, [(0, 0)]), lambda m: score(m, method="magnitude")):
        with pytest.raises(UserError, match=r'a "gpt_neox" model \(it knows bert, ddl, gpt2, llama'):
            act(model)


def test_a_model_cut_by_other_means_is_noticed(built):
    model = copy.deepcopy(built("gpt2"))
    pruned = prune(model, [(0, 0)])
    pruned.config.head_map = [[0, 1, 2, 3]] * 3
    with pytest.raises(UserError, match="something else changed it"):
        heads(pruned)


# A real model ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not STORIES.exists(), reason=f"no {STORIES}")
def test_stories15m_without_a_third_of_its_heads(tmp_path):
    model = hf.AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32).eval()
    assert len(heads(model)) == 36
    gone = choose(score(model, method="magnitude"), 0.3)
    assert len(gone) == 10
    pruned = prune(model, gone)
    ids = torch.tensor([[1, 9038, 2501, 263, 931]])
    with torch.no_grad(), masked(model, gone):
        assert (pruned(ids).logits - model(ids).logits).abs().max() < 1e-4  # of logits up to 20
        text = greedy(model, ids)
    assert torch.equal(greedy(pruned, ids), text)
    assert torch.equal(greedy(pruned, ids, use_cache=False), text)
