"""`recall`: a step begins between the state and the embeddings, in every way to compute it, and nobody halts."""

from __future__ import annotations

import accelerate
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

import pnn
from pnn.evaluation.choosing import halting_settings
from pnn.models.base import arrange
from pnn.plasticity.architectures import LAYER
from pnn.plasticity.surgery import prune
from pnn.plasticity.units import Unit, parameters_of

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "dropout": 0.0}
RULES = {"gated": {"zero_init": False}, "rewrite": {}, "delta": {"zero_init": False}}


def built(update="rewrite", **more):
    torch.manual_seed(0)
    config = pnn.PNNConfig(**SMALL, update=update, max_position_embeddings=16, initializer_range=0.3, **RULES[update], **more)
    return with_shares(pnn.PNNForMaskedLM(config)).eval()


def with_shares(model):
    """As if it had learned how far steps begin back at the embeddings: otherwise in each dimension of each refiner."""
    for number, recall in enumerate(model.base_model.recalls or []):
        assert recall.share.unique().tolist() == pytest.approx([0.1])
        torch.nn.init.uniform_(recall.share, generator=torch.Generator().manual_seed(number))
    return model


def ids(rows=2, length=9):
    return torch.randint(5, 50, (rows, length), generator=torch.Generator().manual_seed(1))


def written_out(encoder, tokens, steps):
    """The equations, step by step, for rows without padding."""
    embedded = encoder.embeddings.token(tokens)
    positions, layout = arrange(embedded, None, None, None, encoder.config)
    origin = h = encoder.embeddings(embedded, positions)
    states = [h]
    for number in encoder.config.order(steps):
        share = 0.5 if encoder.config.recall is True else encoder.recalls[number].share
        u = (1 - share) * h + share * origin
        h = u + encoder.refiners[number].refine(u, layout).delta
        states.append(h)
    return states


@pytest.mark.parametrize("recall", [True, "learned"])
@pytest.mark.parametrize("update", RULES)
@pytest.mark.parametrize("more", [{}, {"schedule": [0, 1, 0, 1]}, {"positions": "rotary"}], ids=["one", "two", "rotary"])
def test_states_and_gradients_are_those_of_the_equations(update, more, recall):
    model = built(update, recall=recall, **more).double()
    states = model.encoder(ids(), num_steps=6, output_states=True).states
    plain = written_out(model.encoder, ids(), 6)
    torch.testing.assert_close(states, tuple(plain))
    details = model.encoder(ids(), num_steps=6, output_states=True, output_gates=True).states
    torch.testing.assert_close(details, tuple(plain))
    weights = [model.encoder.refiners[0].ffn.down.weight]
    if recall == "learned":
        weights.append(model.encoder.recalls[0].share)
    torch.testing.assert_close(*(torch.autograd.grad(path[-1].square().sum(), weights) for path in (states, plain)))
    without = built(update, **more).double().encoder(ids(), num_steps=6, output_states=True).states
    torch.testing.assert_close(without[1], states[1])  # the first step begins at the embeddings either way
    assert not torch.allclose(without[2], states[2], atol=1e-3)


@pytest.mark.parametrize("recall", [True, "learned"])
def test_states_of_chosen_tokens_are_those_of_all(recall):
    model, tokens = built(recall=recall), ids()
    at = torch.tensor([1, 4, 11])
    whole = model.encoder(tokens).last_hidden_state.flatten(0, 1)[at]
    torch.testing.assert_close(model.encoder(tokens, last_at=at).last_hidden_state[0], whole)


@pytest.mark.parametrize("recall", [True, "learned"])
def test_a_decoder_with_a_cache_says_what_it_says_without(recall):
    torch.manual_seed(0)
    config = pnn.PNNCausalConfig(**SMALL, update="rewrite", num_steps=4, recall=recall, initializer_range=0.3)
    model, tokens = with_shares(pnn.PNNForCausalLM(config)).eval(), ids(2, 12)
    whole = model(tokens).logits
    cache, found = None, []
    for part in (tokens[:, :5], tokens[:, 5:6], tokens[:, 6:]):
        out = model(part, past_key_values=cache, use_cache=True)
        cache, found = out.past_key_values, [*found, out.logits]
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recall", [True, "learned"])
def test_a_saved_model_still_recalls(tmp_path, recall):
    model = built(recall=recall)
    model.save_pretrained(tmp_path)
    again = pnn.PNNForMaskedLM.from_pretrained(tmp_path)
    assert again.config.recall == recall
    torch.testing.assert_close(again(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize("recall", ["learnt", 1])
def test_a_misspelt_recall_is_refused(recall):
    with pytest.raises(StrictDataclassError) as refused:
        pnn.PNNConfig(**SMALL, recall=recall)
    assert f'recall={recall!r} is none of true, false, "learned"' in str(refused.value.__cause__)


def test_shares_come_along_where_weights_are_kept_elsewhere():
    """accelerate brings a module's weights when it is called, and no others."""
    model = built(recall="learned")
    expected = model(ids()).logits
    found = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))(ids()).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("recall", [False, True, "learned"])
def test_a_layer_that_is_gone_takes_what_is_counted(recall):
    """Its step still begins where it did: masked is removed."""
    model = built(schedule=[0, 1, 0], recall=recall)
    held, counted = sum(p.numel() for p in model.parameters()), parameters_of(model, LAYER, 1)
    smaller = prune(model, [Unit(LAYER, 1, 0)])
    assert held - sum(p.numel() for p in smaller.parameters()) == counted


@pytest.mark.parametrize("recall", [True, "learned"])
def test_nobody_halts_in_a_model_that_recalls(recall):
    for more in ({"halt": {"criterion": "change", "threshold": 0.1}}, {"random_halt": True}):
        with pytest.raises(StrictDataclassError) as refused:
            pnn.PNNConfig(**SMALL, recall=recall, **more)
        assert "with recall or guess_after steps begin elsewhere" in str(refused.value.__cause__)
    model, halt = built(recall=recall), {"criterion": "change", "threshold": 0.1}
    with pytest.raises(ValueError, match="with recall or guess_after steps begin elsewhere"):
        model(ids(), halt=halt)
    with pytest.raises(ValueError, match="with recall or guess_after steps begin elsewhere"):
        model.encoder.set_halt(halt)
    assert model.config.halt is None
    assert halting_settings(model, []) == []
