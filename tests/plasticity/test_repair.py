"""What remains takes over from what went: never worse on the calibration text, exactly where nothing was lost. And the scores
that look at the same matrices."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from pnn.errors import UserError
from pnn.plasticity import masked, prune
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.matrices import Projection
from pnn.plasticity.phases import calibration
from pnn.plasticity.repair import input_major, output_errors, outputs, repair
from pnn.plasticity.scores import mean_loss, prepared
from pnn.plasticity.shrink import ShrinkSettings, shrink
from pnn.plasticity.unit_scores import OF_MATRICES, UNIT_METHODS, _magnitude, _wanda, grams, score_units
from pnn.plasticity.units import unit_map

GONE = [("head", 0, 1), ("head", 2, 0), *(("neuron", 0, index) for index in range(5)), ("neuron", 1, 7)]


def test_repair_is_never_worse_on_its_text(model, texts):
    batches = texts(model, rows=4)
    small = prune(model, GONE)
    before = copy.deepcopy(small.state_dict())
    repaired = repair(small, model, batches)
    cut, mended = (output_errors(one, model, batches) for one in (small, repaired))
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())
    assert cut.keys() == mended.keys() == outputs(model).keys()
    first = next(iter(cut))
    assert mended[first] < 0.999 * cut[first]
    assert all(mended[at] <= cut[at] + 1e-9 for at in cut)
    assert sum(mended.values()) < 0.95 * sum(cut.values())
    assert not any(module._forward_pre_hooks for one in (model, repaired) for module in one.modules())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_others_can_say_is_not_lost(name, built, texts):
    """Neurons that do what others do, and heads whose values others have, can go without a trace."""
    model = copy.deepcopy(built(name)).double()
    parts = {kind: outputs(model)[kind, 1] for kind in ("head", "neuron")}
    with torch.no_grad():  # unit 1 of layer 1 reads and attends as unit 0 does; what it hands on is its own
        for kind in parts:
            for one in _inputs(model, kind):
                for stretch, twin in zip(one.stretches(1), one.stretches(0), strict=True):
                    stretch.view().copy_(twin.view())
    batches = texts(model, rows=8)
    small = prune(model, [("head", 1, 1), ("neuron", 1, 1)])
    cut = output_errors(small, model, batches)
    assert cut["head", 1] > 1e-3
    assert cut["neuron", 1] > 1e-5
    assert max(output_errors(repair(small, model, batches, ridge=1e-12), model, batches).values()) < 1e-12


def _inputs(model, kind):
    architecture = architecture_of(model)
    return architecture.parts(kind, architecture.blocks(model)[1])[:-1]


def test_a_stronger_ridge_moves_less(built, texts):
    model = built("llama")
    small = prune(model, GONE)
    moved = []
    for ridge in (1e-4, 1e-1, 1e6):
        repaired = repair(small, model, texts(model), ridge=ridge)
        pairs = zip(outputs(repaired).values(), outputs(small).values(), strict=True)
        moved.append(sum(float((one.weight - other.weight).detach().norm()) for one, other in pairs))
    assert moved[0] > moved[1] > moved[2]
    assert moved[2] < 1e-3


def test_what_was_not_pruned_is_not_touched(built, texts):
    """Matrices in front of the first that lost anything read what they always read."""
    model = built("gpt2")
    repaired = repair(prune(model, [("neuron", 1, 0)]), model, texts(model))
    before, after = outputs(model), outputs(repaired)
    changed = [at for at in before if before[at].count != after[at].count or not before[at].weight.equal(after[at].weight)]
    assert changed == [("neuron", 1), ("head", 2), ("neuron", 2)]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "pnn", "pnn causal repeat"])
def test_passes_in_16_bit_repair_as_well(name, built, texts, monkeypatch):
    """As on a GPU: passes are rounded, what they read is multiplied and added up in fp32."""
    module = sys.modules["pnn.plasticity.repair"]
    model, gone = built(name), [*GONE, *(("neuron", 1, index) for index in range(10, 20))]
    batches, small = texts(model, rows=24), prune(model, gone)
    exact, seen = repair(small, model, batches), []
    with monkeypatch.context() as patch:
        patch.setattr(module, "computing", lambda model: torch.autocast("cpu", torch.bfloat16))
        patch.setattr(module, "applied", lambda part, x, plain=module.applied: seen.append(plain(part, x)) or seen[-1])
        nearly = repair(small, model, batches)
    assert {y.dtype for y in seen} == {torch.float32}
    assert any(not torch.equal(y, y.bfloat16()) for y in seen)  # products were not rounded again
    errors = [sum(output_errors(one, model, batches).values()) for one in (small, exact, nearly)]
    assert errors[1] < 0.9 * errors[0]
    assert errors[2] - errors[1] < 0.1 * (errors[0] - errors[1])


def test_a_model_in_16_bit_is_repaired(built, texts):
    model, batches = copy.deepcopy(built("gpt2")).bfloat16(), texts(built("gpt2"), rows=8)
    small = prune(model, GONE)
    repaired = repair(small, model, batches)
    assert {parameter.dtype for parameter in repaired.parameters()} == {torch.bfloat16}
    cut, mended = (sum(output_errors(one, model, batches).values()) for one in (small, repaired))
    assert mended < cut


# Scores ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", UNIT_METHODS)
def test_every_unit_has_a_score(method, model, texts):
    kinds = ("head", "neuron") if method in OF_MATRICES else ("head", "neuron", "layer")
    if method == "contribution":
        kinds = ("head", "layer")  # a pass each
    scores = score_units(model, texts(model), method, kinds)
    assert scores.kinds == kinds
    for kind in kinds:
        assert [len(values) for values in scores.of[kind]] == [len(row) for row in unit_map(model, kind)]
        assert len({float(value) for values in scores.of[kind] for value in values}) > 1


def test_contribution_is_what_masking_costs(built, texts):
    model = built("llama")
    batches = [prepared(model, batch) for batch in texts(model)[:1]]
    scores = score_units(model, batches, "contribution", ("neuron", "layer"))
    with torch.no_grad():
        base = mean_loss(model, batches)
        for unit in (("neuron", 1, 3), ("layer", 2, 0)):
            with masked(model, [unit]):
                cost = float(mean_loss(model, batches) - base)
            assert float(scores.of[unit[0]][unit[1]][unit[2]]) == pytest.approx(cost, abs=1e-6)


def test_the_surgeon_knows_what_repair_will_leave(built, texts):
    """The score in closed form against the unit's removal and repair, one by one."""
    model = copy.deepcopy(built("llama")).double()
    batches = texts(model, rows=8)
    parts, scores = outputs(model), score_units(model, batches, "surgeon", ("head", "neuron"))
    gram = grams(model, [prepared(model, batch) for batch in batches], parts)
    for kind, index in (("head", 2), ("neuron", 9)):
        part = parts[kind, 0]
        weight, c = input_major(part), gram[kind, 0]
        whole = float((weight * (c @ weight)).sum())  # ‖X W‖²
        left = output_errors(repair(prune(model, [(kind, 0, index)]), model, batches), model, batches)[kind, 0]
        # the score charges for the ridge too, a thousandth of a column
        assert float(scores.of[kind][0][index]) == pytest.approx(left * whole, rel=0.15)
        assert float(scores.of[kind][0][index]) >= left * whole


def test_wanda_and_magnitude_by_hand():
    linear = nn.Linear(4, 3, bias=False)
    part = Projection(linear, "o", 2)
    x = torch.randn(5, 4)
    columns = (linear.weight.abs() * x.norm(dim=0)).sum(0).detach()
    assert torch.allclose(_wanda(part, x.T @ x), columns.view(2, 2).sum(1))
    assert torch.allclose(_magnitude(part, x), torch.stack([linear.weight[:, :2].norm(), linear.weight[:, 2:].norm()]))


def test_what_cannot_be(built, texts):
    model = built("gpt2")
    small = prune(model, [(0, 0)])
    with pytest.raises(UserError, match=r"unknown score of units 'fischer'.*fisher"):
        score_units(model, texts(model), "fischer")
    with pytest.raises(UserError, match="needs batches"):
        score_units(model, None, "wanda", ("head",))
    with pytest.raises(UserError, match="a layer has several"):
        score_units(model, texts(model), "wanda", ("head", "layer"))
    with pytest.raises(UserError, match="compares units of one matrix"):
        ShrinkSettings(fewer=0.2, by="wanda", kinds=("layer",))
    with pytest.raises(UserError, match="needs batches"):
        repair(small, model, [])
    with pytest.raises(UserError, match="ridge=0"):
        repair(small, model, texts(model), ridge=0)


def test_shrinking_repairs_what_it_cut(model_of, text, tmp_path):
    model, errors = model_of("gpt2"), {}
    for mend in (False, True):
        settings = ShrinkSettings(fewer=0.2, kinds=("head", "neuron"), repair=mend, learn_steps=0, score_rows=16)
        smaller, _, *_ = shrink(model, text, tmp_path / str(mend), settings)
        batches = calibration(text, settings.as_cycle(), 1)
        errors[mend] = sum(output_errors(smaller, model, batches).values())
    assert errors[True] < 0.9 * errors[False]
