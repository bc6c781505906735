"""`shared_attention`: refiners that attend by one attention are refiners with equal attentions, and it is there once."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

import pnn
from pnn.errors import UserError
from pnn.figures.anatomy import anatomy
from pnn.models.base import parts_of
from pnn.plasticity import heads

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "dropout": 0.0}
FORM = {"schedule": [0, 1, 2, 1], "max_position_embeddings": 16, "initializer_range": 0.3}
UPDATES = pytest.mark.parametrize("update", ["gated", "rewrite", "delta"])


def built(update="rewrite", **more):
    torch.manual_seed(0)
    return pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, **FORM, update=update, zero_init=False, **more))


def apart(model):
    """The same model with an attention for each refiner."""
    other = built(model.config.update)
    own = model.state_dict()
    weights = {
        name: own[name if name in own else ".".join([*name.split(".")[:2], "0", *name.split(".")[3:]])]
        for name in other.state_dict()
    }
    other.load_state_dict(weights)
    return other


def loss_of(model):
    ids = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, labels=ids).loss


@UPDATES
def test_values_and_gradients_are_those_of_equal_attentions(update):
    model = built(update, shared_attention=True)
    other = apart(model)
    ours, theirs = loss_of(model), loss_of(other)
    assert torch.allclose(ours, theirs, atol=1e-6)
    ours.backward()
    theirs.backward()
    for name, parameter in model.encoder.refiners[0].attention.named_parameters():
        each = [refiner.attention.get_parameter(name).grad for refiner in other.encoder.refiners]
        assert all(grad.abs().max() > 0 for grad in each)
        assert torch.allclose(parameter.grad, sum(each), atol=1e-5)


def test_it_is_counted_and_saved_once(tmp_path):
    model = built(shared_attention=True)
    one = sum(p.numel() for p in model.encoder.refiners[0].attention.parameters())
    assert sum(p.numel() for p in built().parameters()) - sum(p.numel() for p in model.parameters()) == 2 * one
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert [name for name in names if "attention.qkv" in name] == [
        f"encoder.refiners.0.attention.qkv.{what}" for what in ("bias", "weight")
    ]
    again = pnn.PNNForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(loss_of(again), loss_of(model))
    assert len({id(refiner.attention) for refiner in again.encoder.refiners}) == 1


def test_a_copy_shares_its_own():
    model = built(shared_attention=True)
    other = copy.deepcopy(model)
    first = other.encoder.refiners[0].attention
    assert all(refiner.attention is first for refiner in other.encoder.refiners)
    assert first is not model.encoder.refiners[0].attention


@pytest.mark.parametrize("number", [0, 2])
def test_what_replaces_it_is_used_by_all_and_saved(number, tmp_path):
    """Whichever refiner it is given to."""
    model = built(shared_attention=True).eval()
    other = built("gated").encoder.refiners[2].attention
    before = loss_of(model).item()
    model.encoder.refiners[number].attention = other
    assert all(refiner.attention is other for refiner in model.encoder.refiners)
    assert loss_of(model).item() != pytest.approx(before, abs=1e-4)
    assert [name for name, _ in model.named_parameters() if "attention.qkv.weight" in name] == [
        "encoder.refiners.0.attention.qkv.weight"
    ]
    model.save_pretrained(tmp_path)
    assert torch.equal(loss_of(pnn.PNNForMaskedLM.from_pretrained(tmp_path)), loss_of(model))


def test_parts_add_up_to_the_model():
    for shared in (False, True):
        model = built(shared_attention=shared)
        parts = parts_of(model)
        assert ("attention" in parts) is shared
        whole = parts["embeddings"] + 3 * parts["block"] + parts["head"] + parts.get("attention", 0)
        assert whole == sum(p.numel() for p in model.parameters())
        assert ("one attention" in anatomy(model.config.to_dict()).describe()) is shared


def test_a_decoder_shares_it_too():
    torch.manual_seed(0)
    config = pnn.PNNCausalConfig(**SMALL, **FORM, update="rewrite", shared_attention=True)
    model = pnn.PNNForCausalLM(config).eval()
    ids = torch.randint(5, 50, (1, 9))
    cached = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(cached, model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, use_cache=False))
    assert len({id(refiner.attention) for refiner in model.model.refiners}) == 1


def test_plasticity_says_that_it_does_not_reorganise_them():
    with pytest.raises(UserError, match="whose refiners share one attention"):
        heads(built(shared_attention=True))
    alone = pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, num_steps=3, shared_attention=True))  # nobody to share with
    assert heads(alone) == [(0, 0), (0, 1)]
