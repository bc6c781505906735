"""Causal PNNs, beyond what every decoder does (`test_decoders`): steps and their cache, the loss of every step, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from small_decoders import CAUSAL_PNN, build, config_of, every_causal_pnn, tokens
from transformers import AutoModel, AutoModelForSequenceClassification

import pnn
from pnn.objectives import step_weights


def test_every_step_keeps_keys_and_values_of_its_own():
    """One refiner three times: as many as three refiners would keep."""
    cache = build("PNN")(tokens(2, 7)).past_key_values
    keys = [layer.keys for layer in cache.layers]
    assert [tuple(one.shape) for one in keys] == [(2, 2, 7, 8)] * 3
    assert not torch.allclose(keys[0], keys[1])


@torch.no_grad()
def test_the_refiner_is_the_encoders_with_another_attention():
    """A text of one token sees the same in both: then they are one model."""
    causal = build("PNN, rewrite")
    config = {key: getattr(causal.config, key) for key in ("vocab_size", "hidden_size", "num_attention_heads", "schedule")}
    encoder = pnn.PNNForMaskedLM(
        pnn.PNNConfig(
            **config,
            intermediate_size=32,
            update="rewrite",
            positions="rotary",
            tie_word_embeddings=True,
            head_transform=True,
        )
    ).eval()
    encoder.load_state_dict({key.replace("model.", "encoder.", 1): value for key, value in causal.state_dict().items()})
    one, text = tokens(3, 1), tokens(3, 5)
    assert torch.allclose(causal(one).logits, encoder(one).logits, atol=1e-6)
    assert torch.allclose(causal(text).logits[:, :1], encoder(text[:, :1]).logits, atol=1e-5)
    assert not torch.allclose(causal(text).logits, encoder(text).logits, atol=1e-2)


@every_causal_pnn
def test_states_deltas_and_gates_come_on_request(name):
    model, ids = build(name), tokens(2, 5)
    steps = model.config.num_steps
    plain = model(ids)
    assert plain.states is plain.gates is plain.deltas is None
    out = model(ids, output_states=True, output_gates=True)
    assert (len(out.states), len(out.deltas)) == (steps + 1, steps)
    assert len(out.gates) == (0 if name == "PNN, delta" else steps)
    for before, delta, after in zip(out.states, out.deltas, out.states[1:], strict=False):
        assert torch.allclose(before + delta, after, atol=1e-6)
    assert torch.allclose(model.head(out.states[-1]), plain.logits, atol=1e-5)


@every_causal_pnn
def test_the_loss_is_the_weighted_cross_entropy_of_every_steps_next_tokens(name):
    model, ids = build(name), tokens(3, 8)
    labels = ids.clone()
    labels[0, :4] = -100
    out = model(ids, labels=labels, output_states=True, output_logits=False)
    by_step = [
        F.cross_entropy(model.head(h)[:, :-1].reshape(-1, 60), labels[:, 1:].reshape(-1), ignore_index=-100)
        for h in out.states[1:]
    ]
    weights = model.config.step_weights or step_weights(len(by_step))
    assert out.loss.item() == pytest.approx(sum(w * x.item() for w, x in zip(weights, by_step, strict=True)), abs=1e-5)
    read = [loss.item() for loss, weight in zip(by_step, weights, strict=True) if weight > 0]
    assert out.step_losses.tolist() == pytest.approx(read, abs=1e-5)
    assert out.last_loss.item() == pytest.approx(by_step[-1].item(), abs=1e-5)
    assert out.logits is None


@every_causal_pnn
def test_ordered_attention_is_masked_attention_in_values_and_gradients(name):
    """The same text with a column of padding behind it: torch's causal attention against a mask."""
    model, ids = build(name).train(), tokens(3, 6)
    found = []
    for padded in (False, True):
        mask = F.pad(torch.ones_like(ids), (0, 1)) if padded else None
        labels = F.pad(ids, (0, 1), value=-100) if padded else ids
        model.zero_grad()
        loss = model(F.pad(ids, (0, 1)) if padded else ids, attention_mask=mask, labels=labels, output_logits=False).loss
        loss.backward()
        found.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
    (one, ordered), (other, masked) = found
    assert one == pytest.approx(other, abs=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ordered, masked, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in ordered)


@torch.no_grad()
def test_gradient_checkpointing_needs_no_cache_and_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        model, ids = build("PNN").train(), tokens(2, 6)
        if checkpointing:
            model.gradient_checkpointing_enable()
        with torch.enable_grad():
            model(ids, labels=ids, use_cache=True).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


@torch.no_grad()
def test_fewer_and_more_steps_than_trained():
    model, ids = build("PNN"), tokens(2, 5)
    states = model(ids, num_steps=5, output_states=True).states
    assert torch.equal(model(ids, num_steps=2).logits, model.head(states[2]))
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "num_steps": 2}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))
    with pytest.raises(ValueError, match="num_steps=3, but the cache holds 2 steps of the text before"):
        model(tokens(2, 1), past_key_values=model(ids, num_steps=2).past_key_values)
    with pytest.raises(ValueError, match="num_steps=0: a decoder needs at least one"):
        model(ids, num_steps=0)


@torch.no_grad()
def test_the_last_state_of_some_tokens_alone():
    model, ids = build("PNN, rewrite").model, tokens(3, 6)
    at = torch.tensor([1, 7, 16])
    whole = model(ids).last_hidden_state
    assert torch.allclose(model(ids, last_at=at).last_hidden_state[0], whole.flatten(0, 1)[at], atol=1e-6)


@torch.no_grad()
def test_attention_weights_of_a_step_see_no_later_token_and_come_with_a_cache_too():
    model, ids = build("PNN"), tokens(2, 6)
    whole = model(ids, output_attentions=True).attentions
    assert [tuple(one.shape) for one in whole] == [(2, 2, 6, 6)] * 3
    assert not any(one.triu(1).any() for one in whole)
    before = model(ids[:, :5]).past_key_values
    last = model(ids[:, 5:], past_key_values=before, output_attentions=True).attentions
    assert all(torch.allclose(one[:, :, 0], full[:, :, 5], atol=1e-5) for one, full in zip(last, whole, strict=True))


def test_heads_can_be_taken_away_and_none_may_be_left():
    model, ids = build("PNN, rewrite"), tokens(2, 5)
    assert pnn.plasticity.heads(model) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    scores = pnn.plasticity.score(model, [{"input_ids": ids}], "entropy")
    assert len(scores) == 4
    without = pnn.plasticity.prune(model, [(0, 0), (0, 1)], whole_layers=True)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(without.generate(ids, **settings), without.generate(ids, use_cache=False, **settings))


def test_a_classifier_reads_the_last_real_token(tmp_path):
    build("PNN").save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, pad_token_id=0).eval()
    assert type(model) is pnn.PNNCausalForSequenceClassification
    ids = tokens(2, 6).clamp(min=1)
    ids[1, 4:] = 0
    logits = model(ids).logits
    states = AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state
    assert torch.allclose(logits, model.score(torch.stack((states[0, 5], states[1, 3]))), atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"positions": "learned"}, 'positions="learned": a causal PNN has rotary positions'),
        ({"halt": {"criterion": "change", "threshold": 0.1}}, "halt: tokens of a causal PNN do not halt"),
        ({"num_attention_heads": 16}, "heads of 1 numbers cannot be rotated"),
        ({"num_steps": 0, "schedule": None}, "num_steps=0, but at least one step is needed"),
        ({"update": "add"}, "update='add' is none of gated, delta, rewrite"),
    ],
)
def test_impossible_configs_raise(wrong, message):
    with pytest.raises((StrictDataclassError, ValueError)) as error:
        config_of("PNN", **wrong)
    assert message in str(error.value.__cause__ or error.value)


def test_variants_cover_every_rule():
    assert {changes.get("update", "gated") for changes in CAUSAL_PNN.values()} == set(pnn.nn.updates.UPDATES)
