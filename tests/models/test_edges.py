"""Batches with nothing in them or nothing to learn, and heads that another head's rule of halting does not fit."""

from __future__ import annotations

import pytest
import torch
import transformers
from small_models import SMALL, shake

import pnn
from pnn.models.last_loss import LastLoss


@pytest.mark.parametrize("name", ["AutoModelForTokenClassification", "AutoModelForQuestionAnswering"])
def test_a_batch_without_targets_has_no_loss(name, tmp_path):
    pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL)).save_pretrained(tmp_path)
    model = getattr(transformers, name).from_pretrained(tmp_path)
    ids = torch.randint(5, 20, (2, 6))
    cut = torch.full((2,), 6)
    targets = {"labels": torch.full((2, 6), -100)} if "Token" in name else {"start_positions": cut, "end_positions": cut}
    loss = model(input_ids=ids, **targets).loss
    loss.backward()
    assert loss.item() == 0


def test_an_update_without_targets_has_no_loss_where_halting_is_trained():
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, random_halt=True)).train()
    ids = torch.randint(5, 20, (2, 6))
    loss = model(input_ids=ids, labels=torch.full((2, 6), -100), num_items_in_batch=torch.tensor(0)).loss
    assert loss.item() == 0


def test_a_body_does_not_halt_by_what_its_head_was_sure_of(tmp_path):
    halt = {"criterion": "confidence", "threshold": 0.01}
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, halt=halt)).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(5, 20, (2, 6))
    with torch.no_grad():
        out = transformers.AutoModel.from_pretrained(tmp_path)(input_ids=ids)
        whole = model.base_model(input_ids=ids, halt=False)
    assert torch.equal(out.last_hidden_state, whole.last_hidden_state)
    with pytest.raises(ValueError, match="needs a head that chooses"):
        model.base_model(input_ids=ids, halt=halt)


def test_outputs_as_tuples_report_what_they_are():
    model = shake(pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL))).eval()
    ids = torch.randint(5, 20, (2, 6))
    plain = model(input_ids=ids, labels=ids)
    assert plain.loss != plain.last_loss
    LastLoss().on_init_end(None, None, None, model=model)
    assert model(input_ids=ids, labels=ids).loss == plain.last_loss
    assert model(input_ids=ids, labels=ids, return_dict=False)[0] == plain.loss


def test_a_classifier_does_not_halt_its_text_at_random(tmp_path):
    pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, random_halt=True)).save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert (model.config.random_halt, model.config.num_labels) == (False, 3)
    assert model.base_model.config.random_halt is False


def of_each_kind():
    decoder = {"bos_token_id": None, "eos_token_id": None}
    yield pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL))
    yield pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, update="rewrite", schedule=[0, 1, 0], step_weights=[0, 0.5, 0.5]))
    yield pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, halt={"criterion": "change", "threshold": 0.1}))
    yield pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig(**SMALL, num_hidden_layers=2))
    for compressor in ("channel", "token"):
        yield pnn.DDLForCausalLM(pnn.DDLConfig(**SMALL, **decoder, num_hidden_layers=2, compressor=compressor))
    yield pnn.PNNForCausalLM(pnn.PNNCausalConfig(**SMALL, **decoder))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("which", range(7))
def test_a_batch_without_texts_has_no_outputs(which, train):
    model = list(of_each_kind())[which].train(train)
    ids = torch.zeros(0, 5, dtype=torch.long)
    assert model(ids).logits.shape == (0, 5, model.config.vocab_size)
    assert model(ids, attention_mask=torch.ones_like(ids)).logits.shape == (0, 5, model.config.vocab_size)
    out = model(input_ids=ids, labels=ids, output_states=True, output_hidden_states=True)
    assert out.loss.item() == 0
    assert {len(state) for state in (*out.states, *out.hidden_states)} == {0}
    if train:
        out.loss.backward()
