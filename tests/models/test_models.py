"""What every model must do, run over small versions of each."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import (
    CONFIGS,
    LENGTHS,
    SMALL,
    WITH_GATE,
    build,
    every_model,
    every_pnn,
    shake,
    some_batch,
)

import pnn
from pnn.nn.packing import Layout
from pnn.objectives import step_weights

# Padded and packed ----------------------------------------------------------------------------------------------------


@every_model
def test_packed_and_padded_forward_agree_in_values_and_gradients(name):
    model = build(name)
    ids, mask, packed, borders = some_batch()
    weights = torch.randn(sum(LENGTHS), SMALL["vocab_size"], generator=torch.Generator().manual_seed(2))
    results = []
    for logits in (
        model(input_ids=ids, attention_mask=mask).logits[mask.bool()],
        model(input_ids=packed, cu_seqlens=borders).logits[0],
    ):
        grads = torch.autograd.grad((logits * weights).sum(), list(model.parameters()))
        results.append((logits, grads))
    (padded_logits, padded_grads), (packed_logits, packed_grads) = results
    assert (padded_logits - packed_logits).abs().max() < 1e-5
    for (parameter, _), one, two in zip(model.named_parameters(), padded_grads, packed_grads, strict=True):
        assert one.norm() > 1e-3, parameter
        # (a gradient that is a sum of large numbers to almost nothing is right to their rounding, not to its own)
        assert (one - two).norm() < 1e-5 * one.norm().clamp(min=0.1), parameter


@every_model
def test_packed_and_padded_losses_agree(name):
    model = build(name)
    ids, mask, packed, borders = some_batch()
    labels = torch.where((torch.arange(ids.numel()).view_as(ids) % 3 == 0) & mask.bool(), ids, -100)
    padded_loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    packed_loss = model(input_ids=packed, cu_seqlens=borders, labels=labels[mask.bool()][None]).loss
    assert abs(padded_loss - packed_loss) < 1e-5


@every_model
def test_no_mask_means_that_every_token_is_real(name):
    model = build(name)
    ids, _, _, _ = some_batch((6, 6))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, model(ids, attention_mask=torch.ones_like(ids)).logits, atol=1e-5)
        half = torch.ones_like(ids)
        half[:, 3:] = 0
        assert not torch.allclose(model(ids).logits[:, 0], model(ids, attention_mask=half).logits[:, 0], atol=1e-3)


@every_model
@pytest.mark.parametrize("changed", [0, 1, 3])
def test_a_changed_token_changes_its_own_packed_sequence_and_no_other(name, changed):
    model = build(name)
    _, _, packed, borders = some_batch()
    start, stop = int(borders[changed]), int(borders[changed + 1])
    other = packed.clone()
    other[0, start + 2] = (other[0, start + 2] - 5 + 1) % 50 + 5
    with torch.no_grad():
        before = model(input_ids=packed, cu_seqlens=borders).logits[0]
        after = model(input_ids=other, cu_seqlens=borders).logits[0]
    same = (before == after).all(-1)
    assert same[:start].all()
    assert same[stop:].all()
    assert not same[start:stop].any()  # attention carries the change to every token of the sequence


@every_model
def test_positions_count_from_each_packed_sequence(name):
    model = build(name)
    _, _, packed, borders = some_batch()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        counted = model(input_ids=packed, cu_seqlens=borders).logits
        assert torch.equal(counted, model(input_ids=packed, cu_seqlens=borders, position_ids=positions).logits)
        assert not torch.allclose(counted, model(input_ids=packed, cu_seqlens=borders, position_ids=positions * 0).logits)


def test_packed_input_of_several_rows_raises():
    ids, _, _, borders = some_batch()
    with pytest.raises(ValueError, match="one row of tokens, got 4 rows"):
        build("pnn_equations")(input_ids=ids, cu_seqlens=borders)


@every_model
def test_a_sequence_that_is_too_long_raises_with_both_numbers(name):
    with pytest.raises(ValueError, match="a sequence of 13 tokens, but the model takes 12"):
        build(name)(input_ids=torch.full((2, 13), 7))


@every_model
def test_input_ids_and_embeddings_are_alternatives(name):
    model = build(name)
    ids, mask, _, _ = some_batch()
    with torch.no_grad():
        embedded = model.get_input_embeddings()(ids)
        from_ids = model(input_ids=ids, attention_mask=mask).logits
        assert torch.equal(from_ids, model(inputs_embeds=embedded, attention_mask=mask).logits)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": embedded}):
        with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
            model(**wrong)


# Logits and losses ----------------------------------------------------------------------------------------------------


@every_model
def test_logit_positions_gives_the_rows_of_full_logits(name):
    model = build(name)
    ids, mask, packed, borders = some_batch()
    at = torch.tensor([24, 3, 3, 11])
    with torch.no_grad():
        for call in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": packed, "cu_seqlens": borders}):
            full = model(**call).logits
            rows = model(**call, logit_positions=at).logits
            assert rows.shape == (4, SMALL["vocab_size"])
            assert torch.allclose(rows, full.flatten(0, 1)[at], atol=1e-5)


@every_model
def test_loss_over_labels_equals_loss_over_logit_positions(name):
    model = build(name)
    ids, mask, _, _ = some_batch()
    call = {"input_ids": ids, "attention_mask": mask}
    at = torch.tensor([0, 13, 15, 30, 37])
    labels = torch.full((ids.numel(),), -100)
    labels[at] = torch.tensor([9, 8, 7, 6, 5])
    with torch.no_grad():
        everywhere = model(**call, labels=labels.view_as(ids))
        chosen = model(**call, labels=labels[at], logit_positions=at)
        # a fixed number of places, of which the last two are not used
        places = torch.cat((at, torch.zeros(2, dtype=torch.long)))
        spare = model(**call, labels=torch.cat((labels[at], torch.tensor([-100, -100]))), logit_positions=places)
    assert everywhere.logits.shape == (*ids.shape, SMALL["vocab_size"])
    assert chosen.logits.shape == (5, SMALL["vocab_size"])
    for other in (chosen, spare):
        assert torch.allclose(everywhere.loss, other.loss, atol=1e-6)
        assert torch.allclose(everywhere.step_losses, other.step_losses, atol=1e-6)
    without = model(**call, labels=labels[at], logit_positions=at, output_logits=False)
    assert without.logits is None
    assert torch.allclose(without.loss, chosen.loss, atol=1e-6)


@every_model
@pytest.mark.parametrize("steps", [None, 1, 0])
def test_a_last_state_at_the_predicted_tokens_alone_gives_the_same_loss_and_gradients(name, steps):
    model = build(name)
    _, _, packed, borders = some_batch()
    at = torch.tensor([0, 4, 5, 16, 17, 24, 0])  # the last place is not used
    labels = torch.cat((packed[0, at[:-1]], torch.tensor([-100])))
    call = {"input_ids": packed, "cu_seqlens": borders, "labels": labels, "logit_positions": at, "num_steps": steps}
    results = []
    for whole in (True, False):
        out = model(**call, output_states=whole)
        grads = torch.autograd.grad(out.loss, list(model.parameters()), materialize_grads=True)
        results.append((out.loss, out.step_losses, out.logits, *grads))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm().clamp(min=1e-2)
    last = model.base_model(input_ids=packed, cu_seqlens=borders, num_steps=steps, last_at=at).last_hidden_state
    assert last.shape == (1, len(at), SMALL["hidden_size"])
    with pytest.raises(ValueError, match="gates come for every token"):
        model.base_model(input_ids=packed, cu_seqlens=borders, last_at=at, output_gates=True)


@every_model
def test_num_items_in_batch_is_what_the_loss_is_divided_by(name):
    model = build(name)
    ids, mask, _, _ = some_batch()
    labels = torch.where(mask.bool(), ids, -100)
    targets = int(mask.sum())
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        for items in (targets, 2 * targets, torch.tensor(3 * targets)):
            scaled = model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=items).loss
            assert math.isclose(scaled.item() * float(items) / targets, plain.item(), rel_tol=1e-5)


@every_model
def test_a_batch_without_targets_has_zero_loss(name):
    model = build(name)
    out = model(input_ids=torch.full((2, 4), 7), labels=torch.full((2, 4), -100))
    assert out.loss.item() == 0
    out.loss.backward()
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())


@every_pnn
@pytest.mark.parametrize("steps", [2, 4, 6])
def test_the_loss_is_the_weighted_sum_of_every_steps_cross_entropy(name, steps):
    if name in ("pnn_schedule", "pnn_one_attention"):
        order = [step % 2 for step in range(steps)]
        model = shake(pnn.PNNForMaskedLM(CONFIGS[name](schedule=order)))
    else:
        model = build(name, num_steps=steps)
    ids, mask, _, _ = some_batch()
    labels = torch.where((ids % 2 == 0) & mask.bool(), ids, -100)
    out = model(input_ids=ids, attention_mask=mask, labels=labels, output_states=True)
    losses = [F.cross_entropy(model.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100) for h in out.states[1:]]
    total = steps * (steps + 1) / 2
    expected = sum((t + 1) / total * loss for t, loss in enumerate(losses))
    assert len(losses) == steps
    assert torch.allclose(out.loss, expected, atol=1e-5)
    assert torch.allclose(out.step_losses, torch.stack(losses), atol=1e-5)
    assert not out.step_losses.requires_grad


def test_given_step_weights_are_used():
    weights = [0.0, 0.0, 0.5, 3.0]
    model = build("pnn_equations", step_weights=weights)
    ids, mask, _, _ = some_batch()
    out = model(input_ids=ids, attention_mask=mask, labels=torch.where(mask.bool(), ids, -100))
    assert out.step_losses.shape == (2,)  # a step of weight 0 is not read
    assert torch.allclose(out.loss, (torch.tensor(weights[2:]) * out.step_losses).sum(), atol=1e-5)
    with pytest.raises(StrictDataclassError, match="the last must be above it"):
        pnn.PNNConfig(**SMALL, step_weights=[0.5, 0.5, 0.0, 0.0])
    with pytest.raises(StrictDataclassError, match="step_weights has 3 entries, but num_steps=4"):
        pnn.PNNConfig(**SMALL, step_weights=[0.1, 0.2, 0.7])


def test_bert_is_trained_on_its_last_layer_alone():
    model = build("bert")
    ids, mask, _, _ = some_batch()
    labels = torch.where(mask.bool(), ids, -100)
    out = model(input_ids=ids, attention_mask=mask, labels=labels)
    expected = F.cross_entropy(out.logits[mask.bool()], ids[mask.bool()])
    assert out.step_losses.shape == (1,)
    assert torch.allclose(out.loss, expected, atol=1e-5)


def test_four_steps_weigh_one_to_four_tenths():
    assert step_weights(4) == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=1e-12)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 200))
def test_step_weights_sum_to_one_and_grow_linearly(steps):
    weights = step_weights(steps)
    assert len(weights) == steps
    assert math.isclose(sum(weights), 1, rel_tol=1e-12)
    assert all(math.isclose(weight, step * weights[0], rel_tol=1e-12) for step, weight in enumerate(weights, 1))


@pytest.mark.parametrize("steps", [2, 6])
def test_other_numbers_of_steps_train(steps):
    torch.manual_seed(0)
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, num_steps=steps))
    ids, mask, _, _ = some_batch()
    labels = torch.where(mask.bool(), ids, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 0.3


def test_every_norm_has_the_configs_epsilon():
    """1e-5 unless the config says otherwise: what published weights were trained with."""
    shape = {**SMALL, "delta_norm": True, "head_transform": True}
    for update, changes in itertools.product(("gated", "delta", "rewrite"), ({}, {"layer_norm_eps": 1e-3})):
        model = pnn.PNNForMaskedLM(pnn.PNNConfig(**shape, update=update, **changes))
        epsilons = [module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
        assert set(epsilons) == {changes.get("layer_norm_eps", 1e-5)}
        assert len(epsilons) >= 4
    assert pnn.BertBaselineConfig().layer_norm_eps == 1e-5


# Steps, states, gates -------------------------------------------------------------------------------------------------


@every_model
def test_states_deltas_and_gates_come_on_request(name):
    model = build(name)
    ids, mask, _, _ = some_batch()
    steps = 3 if name == "bert" else 4
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask)
        assert plain.states is None
        assert plain.gates is None
        assert plain.deltas is None
        out = model(input_ids=ids, attention_mask=mask, output_states=True, output_gates=True)
        assert torch.allclose(plain.logits, out.logits, atol=1e-5)
        assert len(out.states) == steps + 1
        assert torch.equal(model.head(out.states[-1]), out.logits)
    assert len(out.gates) == (steps if name in WITH_GATE else 0)
    for gate in out.gates:
        assert gate.shape == (*ids.shape, SMALL["hidden_size"])
        assert 0 < gate.min() < gate.max() < 1
    if name != "bert":
        assert len(out.deltas) == steps
        for before, delta, after in zip(out.states, out.deltas, out.states[1:], strict=False):
            assert torch.equal(before + delta, after)
            assert delta.abs().max() > 1e-3


@every_model
def test_num_steps_at_the_call_stops_early(name):
    model = build(name)
    ids, mask, _, _ = some_batch()
    call = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        full = model(**call, output_states=True)
        for steps in range(len(full.states)):
            out = model(**call, num_steps=steps, output_states=True)
            assert len(out.states) == steps + 1
            assert torch.equal(out.logits, model.head(full.states[steps]))
        assert torch.equal(model(**call, num_steps=len(full.states) - 1).logits, full.logits)
        labels = torch.where(mask.bool(), ids, -100)
        assert model(**call, num_steps=0, labels=labels).step_losses.shape == (1,)
        assert math.isfinite(model(**call, num_steps=2, labels=labels).loss)


def test_more_steps_than_trained_go_round_the_schedule_again():
    model = build("pnn_schedule")
    ids, _, _, _ = some_batch((6, 6))
    layout = Layout()
    with torch.no_grad():
        states = model(input_ids=ids, num_steps=6, output_states=True).states
        assert len(states) == 7
        for step, refiner in enumerate((0, 1, 0, 1, 0, 1)):
            expected = model.encoder.refiners[refiner](states[step], layout)
            assert torch.allclose(states[step + 1], expected, atol=1e-6)
    assert len(model.encoder.refiners) == 2


def test_bert_has_no_more_steps_than_layers():
    with pytest.raises(ValueError, match="num_steps=4, but a BERT baseline of 3 layers"):
        build("bert")(input_ids=torch.full((1, 3), 7), num_steps=4)


@pytest.mark.parametrize("model_class", [pnn.PNNModel, pnn.BertBaselineModel])
def test_a_negative_number_of_steps_is_refused(model_class):
    model = model_class(model_class.config_class(vocab_size=20, hidden_size=8, num_attention_heads=2, intermediate_size=8))
    with pytest.raises(ValueError, match="num_steps=-1"):
        model(torch.tensor([[2, 5, 3]]), num_steps=-1)


@every_model
def test_bf16_autocast_runs_and_stays_finite(name):
    model = build(name).train()
    ids, mask, _, _ = some_batch()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=ids, attention_mask=mask, labels=torch.where(mask.bool(), ids, -100))
    assert out.logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(out.logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@every_model
def test_token_type_ids_are_accepted_and_not_used(name):
    model = build(name)
    ids, mask, _, _ = some_batch()
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask).logits
        assert torch.equal(plain, model(input_ids=ids, attention_mask=mask, token_type_ids=torch.ones_like(ids)).logits)


@every_model
def test_dropout_acts_in_training_only(name):
    model = build(name)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    ids, mask, _, _ = some_batch()
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)
        model.train()
        assert not torch.equal(model(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)
