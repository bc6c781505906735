"""What every model must do, run over small versions of each: PNN in its published readings and variants, and the BERT
baseline. Weights are shaken away from their start, where a zero-initialised refiner would make most checks empty."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
)

import pnn
from pnn.config import shipped_configs
from pnn.data import synthetic
from pnn.data.tokenizers import of_synthetic_language
from pnn.errors import UserError
from pnn.models.sections import build_model, load_model, model_config
from pnn.nn.attention import Layout
from pnn.objectives import step_weights

SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 12,
    "dropout": 0.0,
}
PUBLISHED = {"delta_norm": True, "gate_bias": True, "zero_init": False}
CONFIGS = {
    "pnn_equations": lambda **more: pnn.PNNConfig(**SMALL, **more),
    "pnn_published": lambda **more: pnn.PNNConfig(**SMALL, **PUBLISHED, **more),
    "pnn_no_gate": lambda **more: pnn.PNNConfig(**SMALL, gate="none", **more),
    "pnn_delta": lambda **more: pnn.PNNConfig(**SMALL, update="delta", **more),
    "pnn_schedule": lambda **more: pnn.PNNConfig(**SMALL, schedule=[0, 1, 0, 1], **more),
    "pnn_tied": lambda **more: pnn.PNNConfig(**SMALL, tie_word_embeddings=True, head_transform=True, **more),
    "bert": lambda **more: pnn.BertBaselineConfig(**SMALL, num_hidden_layers=3, **more),
}
WITH_GATE = {"pnn_equations", "pnn_published", "pnn_schedule", "pnn_tied"}
PNN_NAMES = [name for name in CONFIGS if name != "bert"]
LENGTHS = (5, 12, 1, 7)

every_model = pytest.mark.parametrize("name", CONFIGS)
every_pnn = pytest.mark.parametrize("name", PNN_NAMES)


def masked_lm(config):
    return pnn.BertBaselineForMaskedLM(config) if isinstance(config, pnn.BertBaselineConfig) else pnn.PNNForMaskedLM(config)


@torch.no_grad()
def shake(model, seed=0):
    """Add noise to every parameter, so that nothing is at its start any more."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def build(name, **more):
    torch.manual_seed(0)
    return shake(masked_lm(CONFIGS[name](**more)))


def some_batch(lengths=LENGTHS, seed=1):
    """The same sequences padded on the right (padding holds random tokens, which nothing may read) and packed."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, SMALL["vocab_size"], (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ids, mask, ids[mask.bool()][None], borders


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
    if name == "pnn_schedule":
        model = shake(pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, schedule=[step % 2 for step in range(steps)])))
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
    assert torch.allclose(out.loss, (torch.tensor(weights) * out.step_losses).sum(), atol=1e-5)
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
        assert torch.allclose(plain.logits, out.logits, atol=1e-6)
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


# What a fresh model is ------------------------------------------------------------------------------------------------


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: pnn.PNNForMaskedLM(pnn.PNNConfig()), 53_704_251),
        (lambda: pnn.PNNForMaskedLM(pnn.PNNConfig(delta_norm=True, gate_bias=True)), 53_707_323),
        (lambda: pnn.PNNForMaskedLM(pnn.PNNConfig(**PUBLISHED)), 53_707_323),
        (lambda: pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig()), 132_066_618),
        (
            lambda: pnn.PNNForMaskedLM(
                pnn.PNNConfig(delta_norm=True, gate_bias=True, tie_word_embeddings=True, head_transform=True)
            ),
            30_858_555,
        ),
        # no gate: two 768×768 matrices and the temperature less
        (lambda: pnn.PNNForMaskedLM(pnn.PNNConfig(gate="none")), 53_704_251 - 2 * 768 * 768 - 1),
        # a second refiner: attention 2,362,368, its norm 1,536, FFN 3,148,544, gate 1,179,649
        (lambda: pnn.PNNForMaskedLM(pnn.PNNConfig(schedule=[0, 1, 0, 1])), 53_704_251 + 6_692_097),
    ],
)
def test_parameter_counts_are_the_published_ones(make, expected):
    with torch.device("meta"):
        assert count(make()) == expected


@pytest.mark.parametrize("name", ["pnn_equations", "pnn_no_gate", "pnn_delta", "pnn_schedule", "pnn_tied"])
def test_zero_init_stays_zero_after_construction_and_after_loading(name, tmp_path):
    torch.manual_seed(0)
    fresh = masked_lm(CONFIGS[name]()).eval()
    fresh.save_pretrained(tmp_path)
    ids, mask, _, _ = some_batch()
    for model in (fresh, AutoModelForMaskedLM.from_pretrained(tmp_path)):
        with torch.no_grad():
            out = model(input_ids=ids, attention_mask=mask, output_states=True, output_gates=True)
            assert len(out.deltas) == 4
            assert all(torch.count_nonzero(delta) == 0 for delta in out.deltas)
            predictions = [model.head(h) for h in out.states]
            assert all(torch.equal(prediction, predictions[0]) for prediction in predictions)
            assert predictions[0].abs().max() > 0


@pytest.mark.parametrize("name", [*PNN_NAMES, "bert"])
def test_without_zero_init_every_step_changes_the_state(name):
    torch.manual_seed(0)
    more = {} if name in ("pnn_published", "bert") else {"zero_init": False}
    model = masked_lm(CONFIGS[name](**more)).eval()
    ids, mask, _, _ = some_batch()
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=mask, output_states=True).states
    assert all((after - before).abs().min(-1).values.max() > 0 for before, after in pairwise(states))


@every_pnn
def test_a_fresh_model_gets_finite_gradients_that_move_it(name):
    torch.manual_seed(0)
    model = masked_lm(CONFIGS[name]())
    ids, mask, _, _ = some_batch()
    model(input_ids=ids, attention_mask=mask, labels=torch.where(mask.bool(), ids, -100)).loss.backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    assert grads["encoder.refiners.0.ffn.down.weight"].abs().max() > 1e-6
    assert max(grad.norm() for grad in grads.values()) < 100


@pytest.mark.parametrize("width", [16, 36])
def test_the_gates_temperature_starts_at_the_root_of_the_width(width):
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL | {"hidden_size": width}, schedule=[0, 1]))
    assert [r.gate.temperature.tolist() for r in model.encoder.refiners] == [[math.sqrt(width)]] * 2


def test_weights_start_at_the_configured_scale():
    torch.manual_seed(0)
    model = pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig(**SMALL | {"hidden_size": 64}, initializer_range=0.1))
    for key, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.1, rel=0.1), key
        elif "norm.weight" in key:
            assert torch.equal(parameter, torch.ones_like(parameter)), key
        else:
            assert torch.count_nonzero(parameter) == 0, key


# Configs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config_class", [pnn.PNNConfig, pnn.BertBaselineConfig])
def test_heads_that_do_not_divide_the_width_raise_with_both_numbers(config_class):
    with pytest.raises(StrictDataclassError, match="num_attention_heads=3 does not divide hidden_size=16"):
        config_class(**SMALL | {"num_attention_heads": 3})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_steps": 0}, "num_steps=0, but at least one step"),
        ({"schedule": [0, 2]}, "without a gap"),
        ({"schedule": [-1, 0]}, "without a gap"),
        ({"schedule": [0, 1], "num_steps": 3}, "schedule has 2 entries, but num_steps=3"),
        ({"update": "gate"}, "update='gate' is none of gated, delta"),
        ({"gate": "query"}, "gate='query' is none of query_key, none"),
    ],
)
def test_impossible_configs_raise(wrong, message):
    with pytest.raises(StrictDataclassError, match=message):
        pnn.PNNConfig(**SMALL, **wrong)


def test_the_schedule_and_the_number_of_steps_imply_each_other():
    assert pnn.PNNConfig().schedule == [0, 0, 0, 0]
    assert pnn.PNNConfig(num_steps=2).schedule == [0, 0]
    config = pnn.PNNConfig(schedule=[0, 1, 2, 3, 0, 1, 2, 3])
    assert (config.num_steps, config.num_refiners) == (8, 4)


@pytest.mark.parametrize("name", [name for name in shipped_configs() if not name.startswith("ddl")])
def test_the_model_section_of_a_shipped_config_builds(name):
    section = yaml.safe_load(shipped_configs()[name].read_text(encoding="utf-8"))["model"]
    with torch.device("meta"):
        model = build_model(model_config(section, vocab_size=30522))
    assert model.config.vocab_size == 30522
    published = {
        "pnn_wikitext103": 53_704_251,
        "paper_reproduction": 53_707_323,
        "bert_baseline": 132_066_618,
        "ablation_no_gate": 53_704_251 - 2 * 768 * 768 - 1,
    }
    assert count(model) == published.get(name, count(model))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "brt"}, "model.type: no architecture 'brt' (did you mean \"bert\"?)"),
        ({"type": "pnn", "num_step": 4}, 'unknown key "model.num_step" (did you mean "num_steps"?)'),
        ({"type": "pnn", "hidden_size": "wide"}, "model.hidden_size: expected a whole number, got 'wide'"),
        ({"type": "pnn", "hidden_size": 10, "num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=10"),
        ({"type": "bert", "vocab_size": 10}, "model.vocab_size: 10, but the tokenizer has 99 entries"),
        ({"type": "bert", "num_hidden_layers": 0}, "num_hidden_layers=0, but at least one layer is needed"),
    ],
)
def test_a_wrong_model_section_is_a_user_error_that_names_the_key(section, message):
    with pytest.raises(UserError) as caught:
        model_config(section, vocab_size=99)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# Saving and loading ---------------------------------------------------------------------------------------------------


@every_model
def test_a_saved_model_comes_back_identical_through_the_auto_class(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert not loaded.training
    ids, mask, packed, borders = some_batch()
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, loaded(ids, attention_mask=mask).logits)
        before, after = model(packed, cu_seqlens=borders).logits, loaded(packed, cu_seqlens=borders).logits
        assert torch.equal(before, after)
    assert count(loaded) == count(model)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()


def test_tied_weights_stay_tied_and_are_saved_once(tmp_path):
    model = build("pnn_tied")
    model.save_pretrained(tmp_path)
    vocabulary = [key for key, value in load_file(tmp_path / "model.safetensors").items() if value.shape == (60, 16)]
    assert vocabulary == ["encoder.embeddings.token.weight"]
    for each in (model, AutoModelForMaskedLM.from_pretrained(tmp_path)):
        assert each.head.decoder.weight is each.encoder.embeddings.token.weight
    untied = build("pnn_equations")
    assert untied.head.decoder.weight is not untied.encoder.embeddings.token.weight


def test_every_head_loads_through_its_auto_class(tmp_path):
    for name in ("pnn_equations", "bert"):
        build(name).save_pretrained(tmp_path / name)
        bert = name == "bert"
        for auto, expected in (
            (AutoModel, pnn.BertBaselineModel if bert else pnn.PNNModel),
            (AutoModelForSequenceClassification, type(classifier(name))),
            (AutoModelForMultipleChoice, type(chooser(name))),
        ):
            assert type(auto.from_pretrained(tmp_path / name)) is expected


def test_load_model_refuses_weights_that_are_missing_or_of_another_size(tmp_path):
    model = build("pnn_equations")
    model.save_pretrained(tmp_path)
    assert torch.equal(load_model(tmp_path).head.decoder.weight, model.head.decoder.weight)
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    config = json.loads(text)
    config |= {"num_steps": 4, "schedule": [0, 1, 0, 1]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match="missing keys"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(text.replace('"vocab_size": 60', '"vocab_size": 61'), encoding="utf-8")
    with pytest.raises(UserError, match=r"the weights are not those of the architecture|cannot load"):
        load_model(tmp_path)


def test_load_model_of_a_damaged_or_missing_folder_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="cannot load a masked language model"):
        load_model(tmp_path / "nothing")
    build("pnn_equations").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot load a masked language model"):
        load_model(tmp_path)


def test_a_model_loaded_with_another_number_of_steps_can_be_saved(tmp_path):
    build("pnn_equations").save_pretrained(tmp_path / "four")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "four", num_steps=6)
    model.save_pretrained(tmp_path / "six")
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "six").config.num_steps == 6


@pytest.mark.parametrize("name", ["pnn_equations", "pnn_tied", "bert"])
def test_token_embeddings_can_be_resized(name):
    model = build(name)
    ids, mask, _, _ = some_batch()
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits
        model.resize_token_embeddings(67, mean_resizing=False)
        after = model(ids, attention_mask=mask).logits
    assert model.config.vocab_size == 67
    assert after.shape == (*ids.shape, 67)
    assert torch.allclose(before, after[..., :60], atol=1e-5)
    assert model.head.decoder.bias.shape == (67,)
    assert (model.head.decoder.weight is model.encoder.embeddings.token.weight) == (name == "pnn_tied")
    assert torch.isfinite(model(input_ids=torch.full((1, 3), 66), labels=torch.full((1, 3), 66)).loss)


# The other heads ------------------------------------------------------------------------------------------------------


def classifier(name, **more):
    config = CONFIGS[name](**more)
    torch.manual_seed(0)
    return shake(
        pnn.BertBaselineForSequenceClassification(config) if name == "bert" else pnn.PNNForSequenceClassification(config)
    )


def chooser(name):
    config = CONFIGS[name]()
    torch.manual_seed(0)
    return shake(pnn.BertBaselineForMultipleChoice(config) if name == "bert" else pnn.PNNForMultipleChoice(config))


both_kinds = pytest.mark.parametrize("name", ["pnn_equations", "bert"])


@both_kinds
def test_the_classifier_reads_the_first_tokens_last_state(name):
    model = classifier(name, num_labels=3)
    ids, mask, _, _ = some_batch()
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, token_type_ids=torch.ones_like(ids), output_states=True)
        assert out.logits.shape == (4, 3)
        assert out.loss is None
        assert torch.allclose(out.logits, model.classifier(out.states[-1][:, 0]), atol=1e-6)
        shorter = model(input_ids=ids, attention_mask=mask, num_steps=1).logits
        assert torch.allclose(shorter, model.classifier(out.states[1][:, 0]), atol=1e-6)
        changed = ids.clone()
        changed[mask == 0] = 3
        assert torch.allclose(model(input_ids=changed, attention_mask=mask).logits, out.logits, atol=1e-6)


@both_kinds
def test_classification_losses_equal_those_computed_by_hand(name):
    ids, mask, _, _ = some_batch()
    call = {"input_ids": ids, "attention_mask": mask}

    model = classifier(name, num_labels=3)
    labels = torch.tensor([0, 2, 1, 1])
    out = model(**call, labels=labels)
    by_hand = -torch.stack([row.softmax(0)[label].log() for row, label in zip(out.logits, labels, strict=True)]).mean()
    assert torch.allclose(out.loss, by_hand, atol=1e-5)

    targets = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    out = model(**call, labels=targets)
    p = out.logits.sigmoid()
    assert torch.allclose(out.loss, -(targets * p.log() + (1 - targets) * (1 - p).log()).mean(), atol=1e-5)

    model = classifier(name, num_labels=1)
    scores = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for given_labels in (scores, scores[:, None]):
        out = model(**call, labels=given_labels)
        assert torch.allclose(out.loss, sum((out.logits[i, 0] - scores[i]) ** 2 for i in range(4)) / 4, atol=1e-5)

    model = classifier(name, num_labels=3, problem_type="regression")
    out = model(**call, labels=targets)
    assert torch.allclose(out.loss, ((out.logits - targets) ** 2).mean(), atol=1e-5)


@both_kinds
def test_multiple_choice_scores_each_candidate_alone(name):
    model = chooser(name)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 60, (2, 3, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, 1, 4:] = 0
    labels = torch.tensor([2, 0])
    out = model(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids), labels=labels)
    assert out.logits.shape == (2, 3)
    by_hand = -torch.stack([out.logits[i].log_softmax(0)[label] for i, label in enumerate(labels)]).mean()
    assert torch.allclose(out.loss, by_hand, atol=1e-5)
    with torch.no_grad():
        swapped = model(input_ids=ids[:, [2, 1, 0]], attention_mask=mask[:, [2, 1, 0]]).logits
        assert torch.allclose(swapped, out.logits[:, [2, 1, 0]], atol=1e-6)
        changed = ids.clone()
        changed[mask == 0] = 3
        assert torch.allclose(model(input_ids=changed, attention_mask=mask).logits, out.logits, atol=1e-6)


@both_kinds
@pytest.mark.parametrize("kind", ["single_label", "regression", "multi_label", "choice"])
def test_a_few_sgd_steps_lower_a_heads_loss(name, kind):
    ids, mask, _, _ = some_batch((7, 12, 3, 9))
    call = {"input_ids": ids, "attention_mask": mask}
    if kind == "choice":
        model = chooser(name)
        call = {"input_ids": ids.view(2, 2, -1), "attention_mask": mask.view(2, 2, -1)}
        labels = torch.tensor([1, 0])
    else:
        model = classifier(name, num_labels={"single_label": 2, "regression": 1, "multi_label": 3}[kind])
        labels = {
            "single_label": torch.tensor([0, 1, 1, 0]),
            "regression": torch.tensor([0.5, -1.0, 2.0, 0.0]),
            "multi_label": torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]),
        }[kind]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(10):
        loss = model(**call, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@both_kinds
def test_heads_started_from_a_masked_model_keep_its_encoder(name, tmp_path):
    source = build(name)
    source.save_pretrained(tmp_path)
    encoder = source.encoder.state_dict()
    for auto, more in (
        (AutoModelForSequenceClassification, {"num_labels": 3}),
        (AutoModelForMultipleChoice, {}),
    ):
        model = auto.from_pretrained(tmp_path, **more)
        loaded = model.encoder.state_dict()
        assert loaded.keys() == encoder.keys()
        assert all(torch.equal(loaded[key], encoder[key]) for key in encoder)
        assert model.classifier.weight.std() > 0
        assert torch.isfinite(model.classifier.weight).all()
        assert torch.count_nonzero(model.classifier.bias) == 0


# The Hugging Face ecosystem -------------------------------------------------------------------------------------------


def language_model(name):
    tokenizer = of_synthetic_language(32)
    torch.manual_seed(0)
    model = masked_lm(CONFIGS[name]().__class__(**SMALL | {"vocab_size": len(tokenizer), "max_position_embeddings": 32}))
    return model, tokenizer


@both_kinds
def test_the_fill_mask_pipeline_reads_a_saved_folder(name, tmp_path):
    model, tokenizer = language_model(name)
    shake(model).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert not list(Path(tmp_path).glob("*.bin"))
    words = next(synthetic.paragraphs(1, seed=0)).split()
    words[4] = "[MASK]"
    guesses = pipeline("fill-mask", model=str(tmp_path), device="cpu")(" ".join(words))
    with torch.no_grad():
        logits = model(**tokenizer(" ".join(words), return_tensors="pt")).logits[0, 5]
    top = logits.softmax(0).topk(5)
    assert [guess["token"] for guess in guesses] == top.indices.tolist()
    assert [guess["score"] for guess in guesses] == pytest.approx(top.values.tolist(), rel=1e-4)
    assert [guess["token_str"] for guess in guesses] == [synthetic.language().words[i] for i in top.indices]


@both_kinds
@pytest.mark.parametrize("with_token_types", [False, True])
def test_the_hugging_face_trainer_trains(name, with_token_types, tmp_path):
    model, tokenizer = language_model(name)
    examples = [dict(tokenizer(line, return_token_type_ids=with_token_types)) for line in synthetic.paragraphs(40, seed=1)]
    assert ("token_type_ids" in examples[0]) == with_token_types
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=5,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=examples,
        eval_dataset=examples[:8],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 5
    # every target counts once: the loss logged at the start is the loss of a uniform guess, not twice or half of it
    assert losses[0] == pytest.approx(math.log(len(tokenizer)), rel=0.1)
    assert losses[-1] < losses[0] - 0.2
    assert math.isfinite(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("model_class", [pnn.PNNModel, pnn.BertBaselineModel])
def test_a_negative_number_of_steps_is_refused(model_class):
    model = model_class(model_class.config_class(vocab_size=20, hidden_size=8, num_attention_heads=2, intermediate_size=8))
    with pytest.raises(ValueError, match="num_steps=-1"):
        model(torch.tensor([[2, 5, 3]]), num_steps=-1)


@pytest.mark.parametrize("head", ["PNNForSequenceClassification", "BertBaselineForMultipleChoice"])
def test_hf_trainer_trains_the_other_heads_too(head, tmp_path):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model_class = getattr(pnn, head)
    model = model_class(model_class.config_class(vocab_size=20, hidden_size=8, num_attention_heads=2, intermediate_size=8))
    shape = (3, 6) if "Choice" in head else (6,)
    rows = [{"input_ids": torch.randint(5, 20, shape), "labels": torch.tensor(i % 2)} for i in range(8)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    outcome = Trainer(model, arguments, train_dataset=rows).train()
    assert math.isfinite(outcome.training_loss)


@pytest.mark.parametrize("num_steps", [None, 0, 1])
@pytest.mark.parametrize("kind", ["pnn", "bert"])
def test_a_classifier_reads_the_first_token_alone_and_gives_the_same_logits(kind, num_steps):
    """Of the last step only what it reads is computed, unless states are asked for."""
    size = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "initializer_range": 0.2}
    torch.manual_seed(0)
    if kind == "pnn":
        config = pnn.PNNConfig(**size, zero_init=False)
        models = pnn.PNNForSequenceClassification(config), pnn.PNNForMultipleChoice(config)
    else:
        config = pnn.BertBaselineConfig(**size, num_hidden_layers=2)
        models = pnn.BertBaselineForSequenceClassification(config), pnn.BertBaselineForMultipleChoice(config)
    ids = torch.randint(5, 50, (4, 9))
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1], [7]])).long()
    for model, shape in zip(models, ((4, 9), (2, 2, 9)), strict=True):
        inputs = {"input_ids": ids.view(shape), "attention_mask": mask.view(shape), "num_steps": num_steps}
        whole = model.eval()(**inputs, output_states=True)
        torch.testing.assert_close(model(**inputs).logits, whole.logits)
        read = model.classifier(whole.states[-1][:, 0]).view_as(whole.logits)
        torch.testing.assert_close(whole.logits, read)
        assert len({round(value, 4) for value in whole.logits.flatten().tolist()}) > 1
