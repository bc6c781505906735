"""One budget for all kinds: what goes, in which portions, and what cannot be given."""

from __future__ import annotations

import pytest
import torch

from pnn.errors import UserError
from pnn.plasticity import Unit, UnitScores, masked, prune, unit_map
from pnn.plasticity.architectures import KINDS
from pnn.plasticity.budget import Portion, faster, fewer_parameters, group_of, portions, share_out
from pnn.plasticity.measure import reading_times
from pnn.plasticity.scores import mean_loss, prepared
from pnn.plasticity.unit_scores import UNIT_METHODS, score_units
from pnn.plasticity.units import gated, parameters_of


def numbers(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def drawn(model, kinds=KINDS) -> UnitScores:
    return score_units(model, None, "random", kinds)


# Scores ---------------------------------------------------------------------------------------------------------------


def test_scores_are_one_for_each_unit(model, texts):
    scores = score_units(model, texts(model))
    assert scores.kinds == KINDS
    for kind in KINDS:
        assert [len(values) for values in scores.of[kind]] == [len(row) for row in unit_map(model, kind)]
    pruned = prune(model, [Unit("layer", 1, 0)])
    assert len(score_units(pruned, texts(model)).of["neuron"][1]) == 0


def test_a_layers_score_is_the_loss_without_it(model, texts):
    batches = [prepared(model, batch) for batch in texts(model)]
    scores = score_units(model, texts(model), "fisher", ["layer"])
    with torch.no_grad():
        base = mean_loss(model, batches)
        with masked(model, [Unit("layer", 2, 0)]):
            assert float(mean_loss(model, batches) - base) == pytest.approx(float(scores.of["layer"][2]), abs=1e-5)


def test_fisher_is_half_the_squared_slope(built, texts):
    """Of one row, from a difference quotient of the loss in the gate of one neuron."""
    model = built("llama")
    row = {"input_ids": texts(model)[0]["input_ids"][:1]}
    batch, step = prepared(model, row), 1e-2
    scores = score_units(model, [row], "fisher", ["neuron"])
    gate = torch.ones(len(unit_map(model, "neuron")[1]))
    losses = []
    for value in (1 - step, 1 + step):
        gate[3] = value
        with torch.no_grad(), gated(model, {("neuron", 1): gate}):
            losses.append(float(mean_loss(model, [batch])))
    targets = row["input_ids"].numel() - 1
    slope = targets * (losses[1] - losses[0]) / (2 * step)
    assert float(scores.of["neuron"][1][3]) == pytest.approx(slope**2 / 2 / targets, rel=0.05, abs=1e-8)


def test_what_scores_refuse(built):
    with pytest.raises(UserError, match="did you mean"):
        score_units(built("gpt2"), None, "fishr")
    with pytest.raises(UserError, match="needs batches"):
        score_units(built("gpt2"), None)


# Portions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("neurons", "size"), [(3072, 64), (768, 64), (511, 32), (48, 4), (7, 1)])
def test_groups_of_neurons(neurons, size):
    assert group_of(neurons) == size


def test_the_least_useful_neurons_go_first_and_groups_are_whole(built):
    model = built("gpt2")  # 128 neurons: groups of 16
    scores = drawn(model, ["neuron"])
    gone = fewer_parameters(model, scores, 0.1)
    for layer, row in enumerate(unit_map(prune(model, gone), "neuron")):
        assert len(row) % 16 == 0
        lost = sorted({*range(128)} - {*row})
        kept = scores.of["neuron"][layer][row]
        assert not lost or float(scores.of["neuron"][layer][lost].max()) <= float(kept.min())


@pytest.mark.parametrize("share", [0.05, 0.2, 0.3])
def test_so_many_fewer_parameters_and_hardly_more(model, share):
    smaller = prune(model, fewer_parameters(model, drawn(model), share))
    left = numbers(smaller) / numbers(model)
    assert 1 - share - parameters_of(model, "head", 0) / numbers(model) < left <= 1 - share


def test_the_least_worth_for_its_price_goes_first():
    def portion(kind, layer, index, worth, price):
        return Portion(kind, layer, (Unit(kind, layer, index),), worth, price)

    cheap, dear, large = portion("head", 0, 0, 1.0, 1.0), portion("head", 0, 1, 3.0, 1.0), portion("neuron", 1, 0, 4.0, 10.0)
    assert share_out([cheap, dear, large], 10, 2) == ([Unit("neuron", 1, 0)], 10)
    assert share_out([cheap, dear, large], 11, 2)[0] == [Unit("head", 0, 0), Unit("neuron", 1, 0)]
    assert share_out([cheap, dear, large], 2, 2)[0] == [Unit("head", 0, 0), Unit("head", 0, 1)]  # the large one waits
    assert share_out([cheap, dear, large], 3, 2)[1] == 12  # and goes where nothing else is enough
    # a layer counts without what is gone of it, and takes it along; the last layer stays
    layers = [portion("layer", 0, 0, 8.0, 4.0), portion("layer", 1, 0, 50.0, 4.0)]
    assert share_out([cheap, *layers], 4, 2) == ([Unit("layer", 0, 0)], 4)
    assert share_out([cheap, *layers], 100, 2) == ([Unit("layer", 0, 0)], 4)


def test_prices_are_parameters(model):
    offered = portions(model, drawn(model), lambda kind, layer: parameters_of(model, kind, layer))
    for kind in KINDS:
        portion = next(one for one in offered if one.kind == kind)
        assert numbers(model) - numbers(prune(model, portion.units)) == portion.price


# What cannot be given -------------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_large_says_what_can_go(built):
    with pytest.raises(UserError, match=r"−99 % of the parameters cannot go: heads, neurons and layers that may go hold"):
        fewer_parameters(built("gpt2"), drawn(built("gpt2")), 0.99)
    with pytest.raises(UserError, match=r"−40 % of the parameters cannot go: heads that may go hold 2\d\.\d %"):
        fewer_parameters(built("gpt2"), drawn(built("gpt2"), ["head"]), 0.4)


# Time -----------------------------------------------------------------------------------------------------------------


def test_a_faster_model_by_what_was_measured(built, monkeypatch):
    """On a clock that counts parameters: the answer is then known."""
    monkeypatch.setattr(
        "pnn.plasticity.budget.reading_times", lambda models, length: {name: numbers(m) for name, m in models.items()}
    )
    model = built("gpt2")
    gone = faster(model, drawn(model), 1.3, 8)
    assert numbers(model) / numbers(prune(model, gone)) == pytest.approx(1.3, rel=0.03)
    with pytest.raises(UserError, match=r"--speed 50: without all the heads that may go the model reads 1\.\d\d times as fast"):
        faster(model, drawn(model, ["head"]), 50, 8)


def test_the_real_clock_times_every_model(built):
    """How fast a small model is on a busy machine is nobody's promise."""
    model = built("gpt2")
    times = reading_times({"": model, "pruned": prune(model, [(0, 0)])}, 8)
    assert list(times) == ["", "pruned"]
    assert min(times.values()) > 0


def test_every_method_is_named():
    assert list(UNIT_METHODS) == ["fisher", "gradient", "contribution", "surgeon", "wanda", "magnitude", "random"]
