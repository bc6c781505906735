"""Heads, neurons and layers: removed is masked in every architecture, and a model without some of each loads again."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pnn.errors import UserError
from pnn.models.plastic import as_ranges, of_ranges
from pnn.plasticity import Unit, UnitScores, grow, load, masked, prune, save, unit_map, units
from pnn.plasticity.architectures import KINDS
from pnn.plasticity.growth import candidates
from pnn.plasticity.heads import heads, stretches
from pnn.plasticity.measure import size
from pnn.plasticity.units import parameters_of

GENERATION = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
SOME = [Unit("layer", 0, 0), Unit("neuron", 1, 0), Unit("neuron", 1, 7), Unit("neuron", 2, 3), Unit("head", 2, 1)]


def numbers(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_model_has_all_kinds(model):
    for kind, in_layer in (("head", None), ("neuron", None), ("layer", 1)):
        rows = unit_map(model, kind)
        assert len(rows) == 3
        assert all(row == list(range(in_layer or len(rows[0]))) for row in rows)
    assert len(units(model, ["head"])) == len(heads(model))


@pytest.mark.parametrize("kind", ["neuron", "layer"])
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_removed_is_masked_for_any_units(model, logits, kind, data):
    everything = units(model, [kind])
    most = 2 if kind == "layer" else 12
    gone = data.draw(st.sets(st.sampled_from(everything), min_size=1, max_size=most))
    with masked(model, gone):
        expected = logits(model)
    assert (logits(prune(model, gone)) - expected).abs().max() < 1e-5


def test_kinds_together_and_once_more(model, logits):
    with masked(model, SOME):
        expected = logits(model)
    pruned = prune(prune(model, SOME[2:]), SOME[:2])
    assert (logits(pruned) - expected).abs().max() < 1e-5
    assert all((logits(model) - logits(prune(model, units(model, [kind])[:2]))).abs().max() > 1e-6 for kind in KINDS)
    assert unit_map(pruned, "layer") == [[], [0], [0]]
    assert unit_map(pruned, "head")[0] == unit_map(pruned, "neuron")[0] == []
    assert unit_map(pruned, "neuron")[1] == [at for at in unit_map(model, "neuron")[1] if at not in (0, 7)]


def test_the_model_shrinks_by_what_the_units_own(model):
    expected = numbers(model) - sum(parameters_of(model, unit.kind, unit.layer) for unit in SOME)
    assert numbers(prune(model, SOME)) == expected
    assert parameters_of(model, "head", 1) == sum(one.view().numel() for one in stretches(model, (1, 0)))


def test_gradients_are_those_of_the_masked_model(model, texts):
    batch = texts(model)[0]
    pruned, full = prune(model, SOME), copy.deepcopy(model)
    pruned(**batch).loss.backward()
    with masked(full, SOME):
        full(**batch).loss.backward()
    whole = dict(full.named_parameters())
    same = [(one, whole[name]) for name, one in pruned.named_parameters() if one.numel() and one.shape == whole[name].shape]
    assert len(same) > 5
    assert all((one.grad - other.grad).abs().max() < 1e-4 for one, other in same if other.grad is not None)


def test_a_saved_model_comes_back_the_same(model, logits, tmp_path):
    changed = prune(model, SOME)
    save(changed, tmp_path / "model")
    back = load(tmp_path / "model")
    assert torch.equal(logits(back), logits(changed))
    assert [unit_map(back, kind) for kind in KINDS] == [unit_map(changed, kind) for kind in KINDS]
    assert type(back) is type(changed)
    again = prune(back, [Unit("neuron", 1, 5)])
    assert (1, 5) not in [(unit.layer, unit.index) for unit in units(again, ["neuron"])]
    assert size(back, 8)["flops_per_token"] < size(model, 8)["flops_per_token"]


def test_greedy_text_is_the_same_cached_and_not_and_masked(decoder):
    ids = torch.randint(1, 50, (2, 5), generator=torch.Generator().manual_seed(3))
    pruned = prune(decoder, SOME)
    mask = torch.ones_like(ids)
    text = pruned.generate(ids, attention_mask=mask, **GENERATION)
    assert torch.equal(text, pruned.generate(ids, attention_mask=mask, use_cache=False, **GENERATION))
    with torch.no_grad():  # the first layer is gone, and a cache counts tokens there
        assert pruned(ids, use_cache=True).past_key_values.get_seq_length() == ids.shape[1]
    with masked(decoder, SOME):
        assert torch.equal(text, decoder.generate(ids, attention_mask=mask, **GENERATION))


def test_the_input_stays_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    prune(model, SOME)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.to_dict() == config


def test_no_head_grows_in_a_layer_that_is_gone(model):
    pruned = prune(model, [Unit("layer", 0, 0), (1, 0)])
    assert candidates(pruned) == [(1, 0)]
    with pytest.raises(UserError, match="no head 0 can grow in layer 0"):
        grow(pruned, [(0, 0)])
    assert heads(grow(pruned, [(1, 0)])) == [head for head in heads(model) if head[0] > 0]


@pytest.mark.parametrize("name", ["pnn", "pnn causal"])
def test_a_refiners_steps_can_still_be_looked_at(built, texts, name):
    pruned = prune(built(name), [Unit("layer", 1, 0)])
    out = pruned(**texts(pruned)[0], output_gates=True)
    assert out.deltas[1].abs().max() == 0
    assert out.deltas[0].abs().max() > 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([("neuron", 1, index) for index in range(128)], "none in layer 1 .prune the whole layer instead"),
        ([("layer", layer, 0) for layer in range(3)], "these layers would leave none in the whole model"),
        ([("neuron", 0, 999)], "no neuron 999 in layer 0"),
        ([("layer", 7, 0)], "no layer 0 in layer 7"),
        ([("channel", 0, 0)], "unknown kind of unit 'channel'"),
        (["head"], "any unit .kind, layer, index."),
    ],
)
def test_what_cannot_go(built, asked, message):
    with pytest.raises(UserError, match=message):
        prune(built("gpt2"), asked)


def test_scores_that_do_not_fit_are_noticed(built):
    model = built("gpt2")
    UnitScores({"head": [torch.ones(4)] * 3}).check(model)
    with pytest.raises(UserError, match="one score for each head"):
        UnitScores({"head": [torch.ones(4)] * 2}).check(model)
    with pytest.raises(UserError, match="layer 0 has a score that is not a number"):
        UnitScores({"layer": [torch.tensor([float("nan")])] * 3}).check(model)


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([4], "4"), ([0, 1, 2, 5, 7, 8], "0-2 5 7-8")])
def test_ranges(numbers, text):
    assert as_ranges(numbers) == text
    assert of_ranges(text) == numbers
