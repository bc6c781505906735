"""What a model is before it is trained: its size, its first weights, and the configs it is made from."""

from __future__ import annotations

import math
import re
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from small_models import (
    CONFIGS,
    PNN_NAMES,
    PUBLISHED,
    SMALL,
    count,
    every_pnn,
    masked_lm,
    some_batch,
)
from transformers import AutoModelForMaskedLM

import pnn
from pnn.errors import UserError
from pnn.models import PNNImageConfig
from pnn.models.sections import model_config

# What a fresh model is ------------------------------------------------------------------------------------------------


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


def test_a_diagonal_gate_starts_where_it_is_told_to():
    """In a whole model, whose initialiser runs over everything once more."""
    for start in (0.5, 0.9):
        model = pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, gate="diagonal", gate_start=start)).eval()
        out = model.encoder(torch.arange(5, 12)[None], output_gates=True)
        assert torch.allclose(torch.stack(out.gates), torch.tensor(start), atol=1e-6)


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


def test_tokens_of_a_narrow_table_start_at_the_scale_of_a_whole_one():
    """In a whole model: as large as positions, which are added to them."""
    torch.manual_seed(0)
    size = SMALL | {"hidden_size": 64, "vocab_size": 200, "head_transform": True}
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**size, embedding_size=32, initializer_range=0.1))
    embeddings = model.encoder.embeddings
    assert embeddings.widen(embeddings.token.weight).std().item() == pytest.approx(0.1, rel=0.1)
    assert embeddings.position.weight.std().item() == pytest.approx(0.1, rel=0.1)


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
        ({"update": "gate"}, "update='gate' is none of gated, delta, rewrite"),
        ({"gate": "query"}, "gate='query' is none of query_key, diagonal, token, none"),
        ({"embedding_size": 0, "head_transform": True}, "embedding_size=0 must lie between 1 and hidden_size=16"),
        ({"embedding_size": 17, "head_transform": True}, "embedding_size=17 must lie between 1 and hidden_size=16"),
        ({"embedding_size": 8}, "embedding_size=8 needs head_transform"),
    ],
)
def test_impossible_configs_raise(wrong, message):
    with pytest.raises(StrictDataclassError, match=message):
        pnn.PNNConfig(**SMALL, **wrong)


OURS = (pnn.PNNConfig, pnn.BertBaselineConfig, pnn.DDLConfig, pnn.PNNCausalConfig, PNNImageConfig)


@pytest.mark.parametrize("config_class", OURS)
def test_a_value_of_another_kind_is_named(config_class):
    for wrong, message in (
        ({"hidden_size": "3"}, "hidden_size='3': expected a whole number"),
        ({"hidden_size": 64.5}, "hidden_size=64.5: expected a whole number"),
        ({"vocab_size": "many"}, "vocab_size='many': expected a whole number"),
        ({"initializer_range": "0.1"}, "initializer_range='0.1': expected a number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': expected true or false"),
        ({"pad_token_id": "0"}, "pad_token_id='0': expected a whole number or None"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            config_class(**wrong)
        assert str(caught.value) == message
    config_class(hidden_size=np.int64(48), initializer_range=np.float32(0.1))
    if config_class is pnn.PNNConfig:
        assert pnn.PNNConfig(schedule=(0, 1), num_steps=2, dropout=0, halt=None).schedule == (0, 1)
        with pytest.raises(ValueError, match="schedule='ab': expected a list or None"):
            pnn.PNNConfig(schedule="ab")


@pytest.mark.parametrize("config_class", OURS)
def test_a_misspelt_key_is_told_of_and_other_unknown_ones_are_kept(config_class, tmp_path):
    said = rf'^{config_class.__name__} does not know "hiden_size".*did you mean "hidden_size"'
    with pytest.warns(UserWarning, match=said) as told:
        config = config_class(hiden_size=3)
    assert len(told) == 1
    assert config.hiden_size == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unknown = {"sep_token_id": 2, "num_labels": 3, "model_revision": "x", "num_beams": 2, "torch_dtype": "float32"}
        config_class(**unknown).save_pretrained(tmp_path)
        assert config_class.from_pretrained(tmp_path).model_revision == "x"


def test_the_schedule_and_the_number_of_steps_imply_each_other():
    assert pnn.PNNConfig().schedule == [0, 0, 0, 0]
    assert pnn.PNNConfig(num_steps=2).schedule == [0, 0]
    config = pnn.PNNConfig(schedule=[0, 1, 2, 3, 0, 1, 2, 3])
    assert (config.num_steps, config.num_refiners) == (8, 4)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "brt"}, "model.type: no architecture 'brt' (did you mean \"bert\"?)"),
        ({"type": "pnn", "num_step": 4}, 'unknown key "model.num_step" (did you mean "num_steps"?)'),
        ({"type": "pnn", "hidden_size": "wide"}, "model.hidden_size: expected a whole number, got 'wide'"),
        ({"type": "pnn", "hidden_size": 10, "num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=10"),
        ({"type": "bert", "hidden_size": 10, "num_attention_heads": 2, "positions": "rotary"}, "heads of 5 numbers cannot be"),
        (
            {"type": "bert", "vocab_size": 10},
            "model.vocab_size: 10, but the tokenizer has 99 entries: --set model.vocab_size=99",
        ),
        ({"type": "bert", "num_hidden_layers": 0}, "model.num_hidden_layers: must be above zero, got 0"),
    ],
)
def test_a_wrong_model_section_is_a_user_error_that_names_the_key(section, message):
    with pytest.raises(UserError) as caught:
        model_config(section, vocab_size=99)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
