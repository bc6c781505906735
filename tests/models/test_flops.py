"""FLOPs a token against arithmetic done by hand."""

import numpy as np
import pytest

import pnn
from pnn.config import load_config
from pnn.models.flops import halting_flops, inference_flops, training_flops
from pnn.models.sections import model_config

WIDTH, VOCABULARY = 768, 30522
REFINER = 4 * WIDTH**2 + 2 * WIDTH * 2048 + 2 * WIDTH**2  # attention, FFN, gate
LAYER = 4 * WIDTH**2 + 2 * WIDTH * 3072
HEAD = WIDTH * VOCABULARY
QKV = 3 * WIDTH**2


def blocks(count, block, share):
    """All but the last for every token; of the last q, k and v for every token, the rest for predicted ones."""
    return (count - 1) * block + QKV + share * (block - QKV)


def test_pnn_at_the_papers_shape():
    by_hand = 6 * (blocks(4, REFINER, 0.146) + 4 * 0.146 * HEAD) + 4 * 12 * 82 * WIDTH
    assert training_flops(pnn.PNNConfig(), 82, 0.146) == pytest.approx(by_hand)
    assert by_hand == pytest.approx(0.2205e9, rel=5e-3)
    all_tokens = 6 * (4 * REFINER + 4 * 0.146 * HEAD) + 4 * 12 * 82 * WIDTH
    assert all_tokens == pytest.approx(0.245e9, rel=5e-3)  # if the last step were computed for every token


def test_bert_is_trained_at_its_last_layer_alone():
    by_hand = 6 * (blocks(12, LAYER, 0.146) + 0.146 * HEAD) + 12 * 12 * 82 * WIDTH
    assert training_flops(pnn.BertBaselineConfig(), 82, 0.146) == pytest.approx(by_hand)
    with_transform = training_flops(pnn.BertBaselineConfig(head_transform=True), 82, 0.146)
    assert with_transform - by_hand == pytest.approx(6 * 0.146 * WIDTH**2)


def test_inference_reads_one_step_and_may_stop_early():
    by_hand = 2 * (blocks(4, REFINER, 0.146) + 0.146 * HEAD) + 4 * 4 * 82 * WIDTH
    assert inference_flops(pnn.PNNConfig(), 82, 0.146) == pytest.approx(by_hand)
    one_step = 2 * (blocks(1, REFINER, 0.146) + 0.146 * HEAD) + 4 * 82 * WIDTH
    assert inference_flops(pnn.PNNConfig(), 82, 0.146, num_steps=1) == pytest.approx(one_step)


def test_shared_matrices_count_each_time_and_what_a_model_lacks_does_not():
    steps = [training_flops(pnn.PNNConfig(num_steps=n), 82, 0.0) for n in (4, 8)]
    assert steps[1] - steps[0] == pytest.approx(4 * (6 * REFINER + 12 * 82 * WIDTH))
    difference = training_flops(pnn.PNNConfig(), 82, 0.1) - training_flops(pnn.PNNConfig(gate="none"), 82, 0.1)
    assert difference == pytest.approx(6 * 3.1 * 2 * WIDTH**2)
    delta = training_flops(pnn.PNNConfig(update="delta"), 82, 0.1) - training_flops(pnn.PNNConfig(gate="none"), 82, 0.1)
    assert delta == pytest.approx(6 * 3.1 * 2 * WIDTH)


def test_a_decoder_attends_to_half_of_its_row_and_predicts_every_token_but_the_first():
    config = model_config(load_config("ddl_small_additive").model)
    layer = 4 * 768**2 + 3 * 768 * 2048
    wanted = 6 * (12 * layer + 1023 / 1024 * 768 * 50304) + 12 * 512.5 * 768 * 12
    assert training_flops(config, 512.5, 1023 / 1024) == pytest.approx(wanted)
    rewriting = model_config(load_config("ddl_small").model)
    more = training_flops(rewriting, 512.5, 1023 / 1024) - wanted
    assert more == pytest.approx(6 * 12 * 2 * 768 * 5)  # what four values and a gate are made from, in each sublayer


def test_a_causal_pnns_refiner_costs_what_a_layer_does_and_a_round_what_its_layers_do():
    shared = {"vocab_size": 500, "hidden_size": 96, "num_attention_heads": 2}
    layers = pnn.DDLConfig(**shared, num_hidden_layers=6, residual="additive", value_channels=1)
    rounds = pnn.DDLConfig(**shared, num_hidden_layers=3, num_rounds=2, residual="additive", value_channels=1)
    last_only = [0.0] * 5 + [1.0]
    refiners = pnn.PNNCausalConfig(
        **shared, ffn="geglu", intermediate_size=192, schedule=[0, 1, 2] * 2, step_weights=last_only, update="rewrite"
    )
    counted = [training_flops(one, 32, 1.0) for one in (layers, rounds, refiners)]
    assert counted == pytest.approx([counted[0]] * 3)
    every_step = pnn.PNNCausalConfig(**shared, ffn="geglu", intermediate_size=192, schedule=[0, 1, 2] * 2, update="rewrite")
    assert training_flops(every_step, 32, 1.0) - counted[0] == pytest.approx(6 * 5 * 96 * 500)


def test_a_narrow_table_is_widened_for_every_token_and_narrowed_for_predicted_ones():
    narrow, wide = ({"head_transform": True, "gate": "diagonal", **more} for more in ({"embedding_size": 384}, {}))
    saved = WIDTH * VOCABULARY // 2 + WIDTH**2 // 2  # of the head: half of its table and of its transform
    for flops, each in ((training_flops, 6), (inference_flops, 2)):
        reads = 4 if each == 6 else 1
        change = flops(pnn.PNNConfig(**narrow), 82, 0.1) - flops(pnn.PNNConfig(**wide), 82, 0.1)
        assert change == pytest.approx(each * (WIDTH * 384 - reads * 0.1 * saved))
    taken = np.array([4, 4])
    change = halting_flops(pnn.PNNConfig(**narrow), taken, 1) - halting_flops(pnn.PNNConfig(**wide), taken, 1)
    assert change == pytest.approx(2 * (2 * WIDTH * 384 - saved))


def test_a_masked_token_passes_the_head_and_the_table_once_more_for_each_guess():
    narrow = {"embedding_size": 384, "head_transform": True}
    for shape, guess in (({}, 2 * HEAD), (narrow, HEAD + 2 * WIDTH * 384)):  # narrowed for the head, and widened again
        without, two = pnn.PNNConfig(**shape), pnn.PNNConfig(**shape, guess_after=[1, 3])
        for flops in (training_flops, inference_flops):  # forward alone, but for the gradient of what widens
            learns = WIDTH * 384 if shape and flops is training_flops else 0
            assert flops(two, 82, 0.1) - flops(without, 82, 0.1) == pytest.approx(2 * 0.1 * 2 * (guess + learns))
        fewer = inference_flops(two, 82, 0.1, num_steps=3) - inference_flops(without, 82, 0.1, num_steps=3)
        assert fewer == pytest.approx(2 * 0.1 * guess)  # the second is never made


def test_tokens_that_halt_pay_for_keys_and_values_once_more():
    config, live = pnn.PNNConfig(), 2 * REFINER + 4 * 5 * WIDTH
    taken = np.array([1, 1, 4, 3, 0])
    by_hand = live * 9 + 4 * 4 * WIDTH**2 + 2 * HEAD  # all but the one that takes all steps have halted before the end
    assert halting_flops(config, taken, 1) == pytest.approx(by_hand)
    assert halting_flops(config, np.array([2, 2]), 1) == pytest.approx(4 * (2 * REFINER + 4 * 2 * WIDTH) + 2 * HEAD)


def test_each_refiner_that_is_to_come_needs_its_own_keys_and_values():
    config = pnn.PNNConfig(schedule=[0, 1, 0, 1])
    more = halting_flops(config, np.array([2, 4]), 1) - halting_flops(pnn.PNNConfig(), np.array([2, 4]), 1)
    assert more == pytest.approx(4 * WIDTH**2)


def test_all_steps_cost_what_inference_does_less_what_nobody_reads():
    """`inference_flops` has queries and attention at the last step for all tokens, of which only targets are read."""
    config, length, targets = pnn.PNNConfig(), 80, 12
    taken = np.where(np.arange(length) < targets, 4, 3)
    whole = length * inference_flops(config, length, targets / length)
    unread = (length - targets) * (2 * WIDTH**2 + 4 * length * WIDTH)
    assert halting_flops(config, taken, targets) == pytest.approx(whole - unread)
