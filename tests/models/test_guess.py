"""`guess_after`: masked tokens read their own guess, nobody else does, and every way to compute a model agrees on it."""

from __future__ import annotations

import accelerate
import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

import pnn
from pnn.data.batches import pack
from pnn.evaluation.choosing import halting_settings
from pnn.evaluation.passes import PackedShape, gaps_in, states_at
from pnn.models.base import arrange
from pnn.plasticity.repair import run

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "dropout": 0.0}
MASK, LENGTHS, HALT = 4, (5, 9, 1, 7), {"criterion": "change", "threshold": 0.1}
NARROW = {"embedding_size": 8, "head_transform": True, "tie_word_embeddings": True}
FORMS = {
    "learned": {},
    "rotary": {"positions": "rotary", "update": "rewrite"},
    "narrow": NARROW,
    "narrow, rotary": NARROW | {"positions": "rotary"},
    "two refiners": {"schedule": [0, 1, 0, 1], "recall": "learned"},
    "two guesses": {"guess_after": [1, 3]},
}
every_form = pytest.mark.parametrize("form", FORMS)


def built(form="learned", kind=pnn.PNNForMaskedLM, **more):
    torch.manual_seed(0)
    shape = {"max_position_embeddings": 16, "initializer_range": 0.3, "zero_init": False, "mask_token_id": MASK}
    model = kind(pnn.PNNConfig(**SMALL | shape | {"guess_after": [2]} | FORMS[form] | more)).double().eval()
    encoder = model if kind is pnn.PNNModel else model.encoder
    for number, part in enumerate([encoder.guess, *(encoder.recalls or ())]):  # as if they had learned
        if part is not None:
            assert part.share.unique().tolist() == pytest.approx([0.1])
            torch.nn.init.uniform_(part.share, generator=torch.Generator().manual_seed(number))
    return model


def text(masked=True, rows=2, length=9):
    tokens = torch.randint(5, 50, (rows, length), generator=torch.Generator().manual_seed(1))
    if masked:
        tokens[:, 2::3] = MASK
    return tokens


def packed():
    tokens = text(rows=1, length=sum(LENGTHS))[0]
    return pack(tokens.numpy(), np.array(LENGTHS), np.zeros(len(LENGTHS), np.int64))


def gradients(model, states):
    """Of all weights: zero for those of a head that no state depends on."""
    return torch.autograd.grad(states[-1].square().sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)


def written_out(model, tokens, flows=False):
    """The equations, step by step, for rows without padding. `flows`: gradients through what is guessed, too."""
    encoder, config = model.encoder, model.config
    table, embeddings = encoder.embeddings.token.weight, encoder.embeddings
    positions, layout = arrange(table[tokens], None, None, None, config)

    def begun(rows):
        wide = rows if embeddings.widen is None else rows @ embeddings.widen.weight.T
        return embeddings.norm(wide if embeddings.position is None else wide + embeddings.position.weight[positions])

    origin = h = begun(table[tokens])
    states = [h]
    for step, number in enumerate(config.order()):
        u = h
        if step in config.guess_after:
            average = model.head(h).softmax(-1) @ table
            g = begun(average if flows else average.detach())
            u = torch.where((tokens == MASK)[..., None], h + encoder.guess.share * (g - h), h)
        if config.recall == "learned":
            u = u + encoder.recalls[number].share * (origin - u)
        h = u + encoder.refiners[number].refine(u, layout).delta
        states.append(h)
    return states


@every_form
def test_states_and_gradients_are_those_of_the_equations(form):
    model = built(form)
    plain, flowing = written_out(model, text()), written_out(model, text(), flows=True)
    slopes = gradients(model, plain)
    for details in (False, True):
        states = model(text(), output_states=True, output_gates=details).states
        torch.testing.assert_close(states, tuple(plain))
        torch.testing.assert_close(gradients(model, states), slopes)
    torch.testing.assert_close(flowing, plain)
    assert not all(torch.allclose(*pair) for pair in zip(gradients(model, flowing), slopes, strict=True))


@every_form
def test_tokens_that_are_not_masked_begin_where_they_are(form):
    model, masked = built(form, recall=False), text() == MASK
    h = model(text(), output_states=True).states[1]
    gaps = model.encoder.gaps_in(text(), torch.arange(9)[None], None, model.average_token)
    for step in range(4):
        u = model.encoder.begin(h, h, step, 0, gaps)
        guesses = step in model.config.guess_after
        assert torch.equal((u != h).any(-1), masked & guesses)


@every_form
def test_a_text_without_masks_is_read_as_without_guesses(form):
    model, without = built(form), built(form, guess_after=None)
    without.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(text(masked=False)).logits, without(text(masked=False)).logits)
    assert not torch.allclose(model(text()).logits, without(text()).logits, atol=1e-3)


@every_form
def test_packed_is_padded_wherever_gaps_are_named(form):
    model, batch = built(form), packed()
    keep = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    rows = torch.zeros(keep.shape, dtype=torch.long).masked_scatter(keep, batch.input_ids)
    states = model(rows, attention_mask=keep.long(), output_states=True).states
    expected = tuple(h[keep] for h in states)
    slopes = gradients(model, expected)
    gaps = gaps_in(batch, model.config)
    others = torch.cat((torch.tensor([0]), gaps)).sort().values  # token 0 is to be predicted and not masked
    for at in (None, gaps, torch.cat((gaps, gaps[:1].repeat(3))), torch.cat((others, torch.zeros(5, dtype=torch.long)))):
        found = model(batch.input_ids[None], cu_seqlens=batch.cu_seqlens, gaps_at=at, output_states=True).states
        torch.testing.assert_close(tuple(h[0] for h in found), expected)
        torch.testing.assert_close(gradients(model, found), slopes)


@every_form
def test_passes_give_the_models_own_states(form):
    model, batch, at = built(form), packed(), torch.tensor([0, 2, 5, 21])
    whole = model(batch.input_ids[None], cu_seqlens=batch.cu_seqlens, output_states=True).states
    for ours, theirs in zip(states_at(model, batch, at, every_step=True), whole, strict=True):
        torch.testing.assert_close(ours, theirs[0, at])
    gaps = gaps_in(batch, model.config)
    filled = PackedShape.bucket(batch, at, 16, gaps)  # as a recorded pass is: with tokens and gaps that nobody asked for
    assert filled.gaps > len(gaps)
    inputs = filled.inputs(filled.flat(batch, at, 16, gaps))
    with torch.no_grad():
        last = model.encoder(**inputs, average_token=model.average_token).last_hidden_state
    torch.testing.assert_close(last[0, : len(at)], whole[-1][0, at])


def test_where_weights_lie_elsewhere_or_a_text_is_read_for_repair_guesses_are_made():
    model = built("narrow")
    with torch.no_grad():
        expected = model(text(), output_states=True)
        seen = []
        model.encoder.refiners[0].register_forward_hook(lambda module, args, out: seen.append(out))
        run(model.float(), {"input_ids": text(), "labels": text()})
        torch.testing.assert_close(seen[-1], expected.states[-1].float(), atol=1e-4, rtol=1e-4)
        elsewhere = accelerate.cpu_offload(built("narrow"), execution_device=torch.device("cpu"))
        torch.testing.assert_close(elsewhere(text()).logits, expected.logits)


@every_form
def test_a_saved_model_still_guesses(tmp_path, form):
    model = built(form)
    model.save_pretrained(tmp_path)
    again = pnn.PNNForMaskedLM.from_pretrained(tmp_path)
    assert (again.config.guess_after, again.config.mask_token_id) == (model.config.guess_after, MASK)
    torch.testing.assert_close(again(text()).logits, model(text()).logits)


def test_who_has_no_head_for_tokens_makes_no_guess():
    classifier, encoder = built(kind=pnn.PNNForSequenceClassification), built(kind=pnn.PNNModel)
    assert classifier(text(masked=False), labels=torch.tensor([0, 1])).loss.isfinite()
    for model in (classifier, encoder):  # nor does it fail if some of its text is masked
        guessing = model(text())[0]
        model.base_model.guess = None
        assert torch.equal(model(text())[0], guessing)


def test_the_head_learns_where_autocast_keeps_what_it_casts():
    """A guess reads the head first, without gradients: what is kept of that must not stand in the loss's way."""
    model, labels = built("narrow").float(), text().masked_fill(text() != MASK, -100)
    slopes = []
    for casts in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            model(text(), labels=labels).loss.backward()
        slopes.append([model.head.transform.weight.grad.clone(), model.encoder.embeddings.token.weight.grad.clone()])
    for one, other in zip(*slopes, strict=True):
        assert (one - other).norm() < 0.05 * one.norm()


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        *((pnn.PNNConfig, {"guess_after": steps}, "must name steps from 1 to 3") for steps in ([], [0], [4], [2, 1], [1, 1])),
        (pnn.PNNConfig, {"random_steps": [2, 6]}, "some updates of random_steps=[2, 6] end before"),
        (pnn.PNNConfig, {"halt": HALT}, "so no token can halt"),
        (pnn.PNNConfig, {"random_halt": True}, "so no token can halt"),
        (pnn.PNNCausalConfig, {}, "guess_after: a causal PNN has no masked tokens"),
        (pnn.PNNImageConfig, {}, "guess_after: an image has no masked tokens"),
    ],
)
def test_what_cannot_be_is_refused(kind, more, says):
    with pytest.raises(StrictDataclassError) as refused:
        kind(**{"guess_after": [2]} | more)
    assert says in str(refused.value.__cause__)


def test_which_tokens_are_masked_has_to_be_known():
    model = built(mask_token_id=None)
    for ask in (lambda: model(text()), lambda: states_at(model, packed(), torch.tensor([2]))):
        with pytest.raises(ValueError, match="guess_after needs mask_token_id: which tokens are masked"):
            ask()
    with pytest.raises(ValueError, match="give input_ids, which say where they are"):
        built()(inputs_embeds=torch.zeros(1, 4, 16, dtype=torch.double))


def test_nobody_halts_in_a_model_that_guesses():
    model = built()
    for ask in (lambda: model(text(), halt=HALT), lambda: model.encoder.set_halt(HALT)):
        with pytest.raises(ValueError, match="so no token can halt"):
            ask()
    assert halting_settings(model, []) == []
