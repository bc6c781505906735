"""Training with tokens that halt: a unit that draws and pays for steps, and a context that halts at random."""

import pytest
import torch
from halting_models import AT, FORMS, halting
from huggingface_hub.errors import StrictDataclassError
from small_models import SMALL, build, some_batch

import pnn
from pnn.models.base import arrange
from pnn.nn.packing import only_at
from pnn.schedule import period


def test_a_unit_in_training_draws_and_pays():
    model = halting("rewrite", "learned", cost=0.25).train()
    ids, mask, packed, borders = some_batch()
    labels = torch.where(torch.arange(packed.shape[1]) % 3 == 0, packed, -100)
    torch.manual_seed(0)
    out = model(packed, cu_seqlens=borders, labels=labels, output_states=True)
    assert 1 < out.halted_at.float().mean() < 5
    assert out.step_cost.item() == pytest.approx(0.25 * float(out.halted_at.float().mean()))
    for step in range(1, 5):  # who has halted has not moved, to the bit
        stopped = out.halted_at[0] == step
        assert torch.equal(out.states[step][0, stopped], out.states[-1][0, stopped])
        assert not torch.equal(out.states[step][0, ~stopped], out.states[-1][0, ~stopped])
    torch.manual_seed(0)
    free = model(packed, cu_seqlens=borders, labels=labels, halt={"criterion": "learned", "threshold": 0.5})
    assert out.loss.item() == pytest.approx((free.loss + out.step_cost).item())
    torch.manual_seed(0)
    half = model(packed, cu_seqlens=borders, labels=labels, num_items_in_batch=2 * int((labels != -100).sum()))
    assert half.loss.item() == pytest.approx(out.loss.item() / 2)  # one of an update's two batches pays half
    out.loss.backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.encoder.criterion.parameters())
    assert model(ids, attention_mask=mask).halted_at[mask == 0].sum() == 0


@pytest.mark.parametrize("name", ["pnn_equations", "pnn_schedule"])
def test_a_unit_that_never_stops_trains_the_model_as_it_was(name):
    model = build(name).train()
    packed, borders = some_batch()[2:]
    labels = torch.where(torch.arange(packed.shape[1]) % 3 == 0, packed, -100)
    call = {"input_ids": packed, "cu_seqlens": borders, "labels": labels}
    before = [*torch.autograd.grad(model(**call).loss, list(model.parameters()))]
    parameters = list(model.parameters())
    model.encoder.set_halt({"criterion": "learned", "threshold": 0.5})
    assert torch.equal(model.encoder.criterion.weight, torch.zeros(SMALL["hidden_size"]))
    with torch.no_grad():
        model.encoder.criterion.bias.fill_(-200.0)
    after = torch.autograd.grad(model(**call).loss, parameters)
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(before, after, strict=True))
    model.encoder.set_halt({"criterion": "change", "threshold": 1e6})
    assert model(**call).halted_at is None  # other criteria are for use, not for training


@pytest.mark.parametrize("form", ["gated", "rounds"])
def test_a_model_can_train_with_a_context_that_halts(form):
    more = {"num_steps": None if "schedule" in FORMS[form] else 5, **FORMS[form]}
    model = build("pnn_equations", random_halt=True, **more).train()
    packed, borders = some_batch()[2:]
    labels = torch.where(torch.arange(packed.shape[1]) % 3 == 0, packed, -100)
    call = {"input_ids": packed, "cu_seqlens": borders, "labels": labels, "logit_positions": None, "output_logits": False}
    asked, steps = labels[0] != -100, model.config.num_steps
    means = []
    for seed in range(40):
        torch.manual_seed(seed)
        out = model(**call)
        assert (out.halted_at[0, asked] == steps).all()
        assert set(out.halted_at[0, ~asked].tolist()) <= {
            *range(period(model.config.schedule), steps, period(model.config.schedule)),
            steps,
        }
        means.append(out.halted_at[0, ~asked].float().mean().item())
    assert min(means) < 0.5 * steps  # nearly all halt when they first can, or nearly none, or something between
    assert max(means) > 0.8 * steps
    assert out.step_cost == 0
    out.loss.backward()
    assert all(p.grad is not None for p in model.encoder.refiners.parameters())
    assert model(packed, cu_seqlens=borders, labels=labels).halted_at.min() == steps  # all are asked for: nobody is context
    assert model(**call, halt=False).halted_at is None
    assert model.eval()(**call).halted_at is None  # in use every step is computed, unless `halt` says something else


def test_a_context_that_halts_in_training_keeps_its_state():
    """What others read of it is what a plain loop gives them."""
    model = build("pnn_equations", random_halt=True, num_steps=4, update="rewrite").train()
    packed, borders = some_batch()[2:]
    torch.manual_seed(1)
    out = model.encoder(packed, cu_seqlens=borders, last_at=AT, output_states=True)
    tokens = model.encoder.embeddings.token(packed)
    positions, layout = arrange(tokens, None, None, borders, model.config)
    h = model.encoder.embeddings(tokens, positions)
    assert 1 < out.halted_at.float().mean() < 4
    for step in range(1, 5):
        moved = model.encoder.refiners[0](h, layout)
        h = torch.where((out.halted_at >= step)[..., None], moved, h)
        assert torch.allclose(only_at(h, AT if step == 4 else None), out.states[step], atol=1e-6)


def test_a_model_that_trained_with_a_halting_context_gets_a_unit(tmp_path):
    """It is saved with it; and where the unit trains with the model, the unit alone draws."""
    model = build("pnn_equations", num_steps=4, random_halt=True).train()
    model.encoder.set_halt({"criterion": "learned", "threshold": 0.5, "cost": 0.1})
    model.save_pretrained(tmp_path)
    again = pnn.PNNForMaskedLM.from_pretrained(tmp_path).train()
    assert again.config.random_halt
    packed, borders = some_batch()[2:]
    labels = torch.where(torch.arange(packed.shape[1]) % 3 == 0, packed, -100)
    assert again(packed, cu_seqlens=borders, labels=labels, output_logits=False).step_cost > 0
    with pytest.raises(StrictDataclassError, match="random_halt needs two steps or more"):
        pnn.PNNConfig(**SMALL, num_steps=1, random_halt=True)
    pnn.PNNConfig(**SMALL, num_steps=1, trained_steps=4, random_halt=True)  # calibrated to fewer since
