"""Growing heads and neurons: where they go, and what they leave unchanged."""

from __future__ import annotations

import copy

import pytest
import torch

from pnn.errors import UserError
from pnn.plasticity import Scores, Unit, candidates, grow, growth, heads, load, propose, prune, save, score, unit_map
from pnn.plasticity.growth import STRATEGIES, count_to_grow, pick
from pnn.plasticity.heads import head_map, stretches
from pnn.plasticity.units import stretches_of


def first_new(model, layer=1):
    """The first place beyond the original number of heads."""
    return layer, len(head_map(model)[layer])


# What they start as ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["zero", "clone"])
def test_growth_leaves_the_logits_as_they_were(precise, logits, init):
    pruned = prune(precise, [(0, 0), (2, 1), (2, 2)])
    grown = grow(pruned, [(0, 0), (2, 2), first_new(precise)], init=init)
    assert len(heads(grown)) == len(heads(pruned)) + 3
    assert (logits(grown) - logits(pruned)).abs().max() < 1e-6


def test_two_clones_of_one_head_share_its_output(precise, logits):
    pruned = prune(precise, [(0, index) for index in range(1, len(head_map(precise)[0]))])
    grown = grow(pruned, [(0, 1), (0, 2)], init="clone")
    assert (logits(grown) - logits(pruned)).abs().max() < 1e-6
    outputs = [next(one.view() for one in stretches(grown, (0, at)) if one.role == "o") for at in range(3)]
    assert not torch.equal(outputs[0], outputs[1])  # so that they part in training
    old = next(one.view() for one in stretches(pruned, (0, 0)) if one.role == "o")
    assert (sum(outputs) - old).abs().max() < 1e-6


def test_a_small_random_start_changes_a_little(model, logits):
    pruned = prune(model, [(0, 0)])
    change = (logits(grow(pruned, [(0, 0)], init="random")) - logits(pruned)).abs().max()
    whole = (logits(model) - logits(pruned)).abs().max()
    assert 1e-5 < change < whole


def test_a_new_head_is_as_spread_out_as_its_neighbours_and_writes_nothing(model):
    grown = grow(model, [first_new(model)])
    for one in stretches(grown, first_new(model)):
        if one.role == "o" or one.parameter.dim() == 1:
            assert not one.view().any()
        else:
            old = torch.cat([o.view().flatten() for h in heads(model) for o in stretches(model, h) if o.role == one.role])
            assert 0.6 < one.view().std() / old.std() < 1.7


def test_a_head_that_writes_nothing_learns(model, texts):
    grown = grow(prune(model, [(1, 1)]), [(1, 1)])
    grown(**texts(model)[0]).loss.backward()
    written = next(one for one in stretches(grown, (1, 1)) if one.role == "o")
    assert written.of(written.parameter.grad).abs().max() > 0


def test_a_revived_head_is_the_one_that_went(precise, logits):
    gone = [(0, 1), (2, 0)]
    small = prune(precise, gone)
    back = grow(small, gone, init="revive", original=precise)
    assert (logits(back) - logits(precise)).abs().max() < 1e-9
    with pytest.raises(UserError, match="only a whole cycle has"):
        grow(small, gone, init="revive")


def test_starts_come_from_their_seed(built):
    one, same, other = (grow(built("gpt2"), [(0, 4)], seed=seed) for seed in (1, 1, 2))
    values = [next(iter(stretches(model, (0, 4)))).view() for model in (one, same, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


# Neurons --------------------------------------------------------------------------------------------------------------

GONE = [Unit("neuron", 0, 5), Unit("neuron", 2, 0), Unit("neuron", 2, 1), Unit("head", 1, 1)]


def places(model):
    """A removed neuron, one beyond the original number, and a head."""
    return [Unit("neuron", 0, 5), Unit("neuron", 1, len(unit_map(model, "neuron")[1])), Unit("head", 1, 1)]


@pytest.mark.parametrize("init", ["zero", "clone"])
def test_new_neurons_leave_the_logits_as_they_were(precise, logits, init):
    pruned, new = prune(precise, GONE), places(precise)
    grown = grow(pruned, new, init=init)
    whole = unit_map(precise, "neuron")
    assert unit_map(grown, "neuron") == [whole[0], [*whole[1], len(whole[1])], whole[2][2:]]
    assert head_map(grown) == head_map(precise)
    assert (logits(grown) - logits(pruned)).abs().max() < 1e-6


@pytest.mark.parametrize("layer", [0, 2])
def test_what_new_neurons_write_is_read(model, logits, layer):
    """So that neurons that leave the logits alone do so because they are silent, not because they are nowhere."""
    count = len(unit_map(model, "neuron")[layer])
    new = [Unit("neuron", layer, count + more) for more in range(8)]  # a ReLU may pass nothing of one on these tokens
    grown = grow(model, new)
    with torch.no_grad():
        for owned in stretches_of(grown, new).values():
            written = owned[-1].view()  # not the same in every feature, which a norm would take out again
            written.copy_(torch.linspace(-1, 1, written.numel()).view_as(written))
    assert (logits(grown) - logits(model)).abs().max() > 1e-3


def test_a_neuron_that_writes_nothing_learns(model, texts):
    new = places(model)[:2]
    grown = grow(prune(model, GONE), new)
    grown(**texts(model)[0]).loss.backward()
    for owned in stretches_of(grown, new).values():
        for one in owned:
            slope = one.of(one.parameter.grad)
            if one.role == "o":
                assert not one.view().any()
                assert slope.abs().max() > 0
            else:
                assert bool(one.view().any()) == (one.parameter.dim() > 1)
                assert slope.abs().max() == 0  # nobody hears it yet


def test_grown_neurons_survive_saving(model, logits, tmp_path):
    grown = grow(prune(model, GONE), places(model), init="random")
    save(grown, tmp_path / "model")
    back = load(tmp_path / "model")
    assert torch.equal(logits(back), logits(grown))
    assert unit_map(back, "neuron") == unit_map(grown, "neuron")
    assert type(back) is type(grown)
    again = prune(back, places(model))
    assert unit_map(again, "neuron") == unit_map(prune(model, GONE), "neuron")


def test_a_small_random_start_of_a_neuron_changes_a_little(model, logits):
    pruned = prune(model, GONE)
    change = (logits(grow(pruned, GONE[:3], init="random")) - logits(pruned)).abs().max()
    assert 1e-6 < change < 0.5


def test_revived_neurons_are_those_that_went(precise, logits):
    back = grow(prune(precise, GONE), GONE, init="revive", original=precise)
    assert (logits(back) - logits(precise)).abs().max() < 1e-9


# Where ----------------------------------------------------------------------------------------------------------------


def test_candidates_are_removed_places_and_on_request_new_ones(built):
    model = built("gpt2")
    pruned = prune(model, [(0, 1), (2, 0), (2, 3)])
    assert candidates(model) == []
    assert candidates(pruned) == [(0, 1), (2, 0), (2, 3)]
    assert candidates(grow(pruned, [(1, 4)]), beyond=1) == [(0, 1), (0, 4), (1, 5), (2, 0), (2, 3), (2, 4)]


def test_a_tenth_of_distilgpt2_is_seven():
    assert count_to_grow(72, 0.1, 21) == 7
    assert count_to_grow(72, 0.33 * 21 / 72, 21) == 6  # a third of what was pruned
    assert count_to_grow(72, 0.001, 21) == 1
    assert count_to_grow(72, 0.5, 21) == 21


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_on_every_model(model, texts, strategy):
    lost = score(model, method="magnitude")
    gone = [head for head in heads(model) if head[0] == 0] + [(1, 0), (1, 2)]
    pruned = prune(model, gone, whole_layers=True)
    before = {name: value.clone() for name, value in pruned.state_dict().items()}
    chosen = propose(pruned, 0.3, strategy, texts(model), lost=lost, seed=3)
    assert len(set(chosen)) == len(chosen) == int(0.3 * len(heads(model)))
    assert set(chosen) <= set(gone)
    assert all(torch.equal(value, before[name]) for name, value in pruned.state_dict().items())
    assert chosen == propose(pruned, 0.3, strategy, texts(model), lost=lost, seed=3)


def test_gradients_tell_layers_apart_and_find_the_one_that_is_heard(built, texts):
    """Layer 1's attention is made deaf: what it would add is multiplied by almost nothing, so a head there is of no use."""
    model = copy.deepcopy(built("gpt2"))
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight.mul_(1e-6)
    pruned = prune(model, [(layer, index) for layer in range(3) for index in (0, 1)])
    wishes = STRATEGIES["gradient"](pruned, candidates(pruned), texts(model), None, 0)
    assert len(set(wishes.values())) == 6
    assert max(wishes[1, 0], wishes[1, 1]) < 1e-3 * min(value for head, value in wishes.items() if head[0] != 1)


def test_candidates_are_tried_at_a_hundredth_of_their_output(built, texts, monkeypatch):
    pruned = prune(built("gpt2"), [(0, 0), (2, 1)])
    quiet, loud = {}, {}
    for wishes, factor in ((quiet, 1), (loud, 2)):
        monkeypatch.setattr(growth, "TRIAL", 0.01 * factor)
        wishes |= STRATEGIES["gradient"](pruned, candidates(pruned), texts(pruned), None, 0)
    assert loud == pytest.approx({head: 2 * wish for head, wish in quiet.items()}, rel=0.02)


def test_the_entropy_gap_goes_to_layers_that_look_at_few_places(built, texts):
    model = copy.deepcopy(built("bert"))
    with torch.no_grad():
        for index in range(4):
            for one in stretches(model, (1, index)):
                if one.role == "q":
                    one.view().mul_(50)  # sharp attention in layer 1
            for one in stretches(model, (2, index)):
                if one.role == "q":
                    one.view().zero_()  # uniform attention in layer 2
    pruned = prune(model, [(layer, 0) for layer in range(3)])
    wishes = STRATEGIES["entropy_gap"](pruned, candidates(pruned), [{"input_ids": texts(model)[0]["input_ids"]}], None, 0)
    assert wishes[1, 0] > wishes[0, 0] > wishes[2, 0]
    assert wishes[2, 0] == pytest.approx(0, abs=1e-5)


def test_a_uniform_causal_head_leaves_no_gap(built):
    model = copy.deepcopy(built("llama"))
    with torch.no_grad():
        for head in heads(model):
            for one in stretches(model, head):
                if one.role == "q":
                    one.view().zero_()
    pruned = prune(model, [(0, 0)])
    batch = {"input_ids": torch.arange(1, 10)[None], "use_cache": False}
    assert STRATEGIES["entropy_gap"](pruned, [(0, 0)], [batch], None, 0)[0, 0] == pytest.approx(0, abs=1e-5)


def test_balanced_growth_counts_anew_after_each_head(built):
    gone = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 0)]
    pruned = prune(built("gpt2"), gone, whole_layers=True)  # 0, 1 and 3 heads
    assert propose(pruned, 5 / 12, "balanced") == [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_the_most_useful_of_the_lost_come_back(built):
    pruned = prune(built("gpt2"), [(0, 0), (1, 1), (2, 2)])
    lost = {(0, 0): 1.0, (1, 1): 3.0, (2, 2): 2.0}
    assert propose(pruned, 2 / 12, "importance", lost=lost) == [(1, 1), (2, 2)]
    assert propose(pruned, 2 / 12, "importance", lost=Scores(lost, highest_go=True)) == [(0, 0), (2, 2)]
    assert propose(pruned, 4 / 12, "importance", lost=lost, beyond=1)[-1] == (0, 4)  # never had a score


def test_random_growth_comes_from_its_seed(built):
    pruned = prune(built("gpt2"), [(layer, index) for layer in range(3) for index in range(3)])
    chosen = [propose(pruned, 0.25, "random", seed=seed) for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_ties_go_to_the_layer_with_fewer_heads():
    wishes = {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 1.0, (2, 0): 2.0}
    assert pick(wishes, 4, [2, 1, 5]) == [(2, 0), (1, 0), (0, 0), (0, 1)]


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([(0, 1)], "it is there already"),
        ([(0, 8)], "up to 2 times"),
        ([(3, 0)], "up to 2 times"),
        ([(0, -1)], "up to 2 times"),
        ([None], "a pair"),
        ([("neuron", 0, 1)], "no neuron 1 can grow in layer 0: it is there already"),
        ([("neuron", 0, 256)], "up to 2 times their original neurons"),
        ([("neuron", 3, 0)], "up to 2 times"),
        ([("neuron", 0, -1)], "up to 2 times"),
        ([("synapse", 0, 1)], "unknown kind of unit"),
        ([("layer", 0, 0)], "only heads and neurons can grow: layers and dimensions of the width that are gone stay gone"),
        ([("width", 0, 0)], "only heads and neurons can grow"),
        ([(0, 4), ("layer", 7, 0)], "only heads and neurons can grow"),
    ],
)
def test_a_place_where_nothing_can_grow(built, asked, message):
    with pytest.raises(UserError, match=message):
        grow(built("gpt2"), asked)


def test_a_clone_needs_a_neighbour(built):
    empty = prune(built("gpt2"), [(0, index) for index in range(4)], whole_layers=True)
    with pytest.raises(UserError, match="no head to clone"):
        grow(empty, [(0, 0)], init="clone")


def test_misspelt_names(built):
    with pytest.raises(UserError, match='did you mean "zero"'):
        grow(built("gpt2"), [(0, 4)], init="zeros")
    with pytest.raises(UserError, match='did you mean "balanced"'):
        propose(built("gpt2"), 0.1, "balance")


def test_what_a_strategy_lacks(built):
    pruned = prune(built("gpt2"), [(0, 0)])
    for strategy in ("gradient", "entropy_gap"):
        with pytest.raises(UserError, match="needs batches"):
            propose(pruned, 0.1, strategy)
    with pytest.raises(UserError, match="scores that removed heads had"):
        propose(pruned, 0.1, "importance")


def test_no_place_and_no_share(built):
    with pytest.raises(UserError, match="no place to grow"):
        propose(built("gpt2"), 0.1, "random")
    for ratio in (0.0, 1.5):
        with pytest.raises(UserError, match="above 0 and at most 1"):
            propose(prune(built("gpt2"), [(0, 0)]), ratio, "random")
