"""Muon, batched over matrices of one shape, against torch's own and what it promises; schedules; averaged weights."""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import pnn
from pnn.config import TrainingConfig, load_config
from pnn.errors import UserError
from pnn.training.muon import Muon, orthogonal
from pnn.training.optim import average_weights, block_matrices, learning_rate, make_optimizer, with_average
from pnn.training.run import train_run

SIZE = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 12}


def model(**changes):
    torch.manual_seed(0)
    return pnn.PNNForMaskedLM(
        pnn.PNNConfig(**SIZE, update="rewrite", schedule=[0, 1], dropout=0.0, initializer_range=0.1, **changes)
    )


def recipe(**changes):
    return TrainingConfig(optimizer="muon", learning_rate=2e-2, weight_decay=0.1, **changes)


def take_steps(model, optimizer, count, first=0):
    for step in range(first, first + count):
        ids = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(step))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_adams_averages_are_as_long_as_the_config_says(optimizer):
    training = TrainingConfig(optimizer=optimizer, adam_beta1=0.8, adam_beta2=0.95)
    groups = [group for group in make_optimizer(model(), training).param_groups if "betas" in group]
    assert [group["betas"] for group in groups] == [(0.8, 0.95)] * 2


def test_twenty_updates_are_those_of_torchs_muon_with_q_k_and_v_apart():
    ours = model()
    theirs = copy.deepcopy(ours)
    training = recipe()
    matrices = block_matrices(theirs)
    split = {p: [nn.Parameter(part.clone()) for part in p.detach().chunk(parts)] for p, parts in matrices.items()}
    muon = torch.optim.Muon(
        [part for parts in split.values() for part in parts], lr=2e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    rest = [p for p in theirs.parameters() if p not in matrices]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=2e-2,
        betas=(0.9, 0.999),
    )
    start = copy.deepcopy(ours)
    take_steps(ours, make_optimizer(ours, training), 20)
    for step in range(20):
        ids = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(step))
        theirs(ids, labels=ids).loss.backward()
        for p, parts in split.items():
            for part, grad in zip(parts, p.grad.chunk(len(parts)), strict=True):
                part.grad = grad.clone()
        muon.step()
        adamw.step()
        with torch.no_grad():
            for p, parts in split.items():
                p.copy_(torch.cat(list(parts)))
        theirs.zero_grad()
    assert {3, 1} == set(matrices.values())
    for (name, one), other, before in zip(ours.named_parameters(), theirs.parameters(), start.parameters(), strict=True):
        moved = (other - before).norm()
        assert (one - other).norm() <= 0.02 * moved + 1e-6, name  # bf16 iterations, added up in another order
        assert moved > 0


def test_blocks_matrices_are_muons_and_the_rest_is_adamws():
    built = model()
    names = {p: name for name, p in built.named_parameters()}
    chosen = {names[p] for p in block_matrices(built)}
    expected = {"attention.qkv", "attention.out", "ffn.up", "ffn.down", "gate.query", "gate.key"}
    assert chosen == {f"encoder.refiners.{i}.{part}.weight" for i in range(2) for part in expected}
    optimizer = make_optimizer(built, recipe())
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(built.parameters()))
    decays = {names[p]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays["encoder.refiners.0.gate.temperature"] == 0
    assert decays["encoder.embeddings.token.weight"] == 0.1


def test_fused_matrices_of_decoders_are_taken_apart_and_without_linear_layers_muon_says_so():
    size = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    decoder = pnn.DDLForCausalLM(pnn.DDLConfig(**size, intermediate_size=24, max_position_embeddings=12))
    names = {p: name for name, p in decoder.named_parameters()}
    parts = {names[p]: count for p, count in block_matrices(decoder).items()}
    assert parts["model.blocks.1.attention.qkv.weight"] == 3
    assert parts["model.blocks.1.mlp.up.weight"] == 2
    assert parts["model.blocks.1.mlp.down.weight"] == 1
    assert not any("embeddings" in name or "head" in name for name in parts)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_head=2, n_layer=1, n_positions=12))
    with pytest.raises(UserError, match="GPT2LMHeadModel have no linear layers: take adamw"):
        make_optimizer(gpt2, recipe())


def test_muon_trains_what_pruning_and_freezing_leave():
    pruned = pnn.plasticity.prune(model(tie_word_embeddings=True), [(0, 1)])
    pruned.encoder.refiners[1].requires_grad_(False)
    before = copy.deepcopy(pruned)
    matrices = block_matrices(pruned)
    assert matrices[pruned.encoder.refiners[0].attention.qkv.weight] == 3  # one head of q, of k and of v
    optimizer = make_optimizer(pruned, recipe())
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == sum(p.requires_grad for p in pruned.parameters())
    take_steps(pruned, optimizer, 2)
    moved = {
        name for (name, p), was in zip(pruned.named_parameters(), before.parameters(), strict=True) if not torch.equal(p, was)
    }
    assert {name for name, p in pruned.named_parameters() if p.requires_grad} == moved


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 12, 40), (2, 40, 12)])
def test_directions_are_nearly_orthogonal(shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(x).float())
    assert values.min() > 0.3
    assert values.max() < 1.4
    together, alone = orthogonal(x), torch.cat([orthogonal(one[None]) for one in x])
    assert torch.allclose(together.float(), alone.float(), atol=0.02)


def test_a_state_that_was_saved_and_loaded_goes_on_to_the_same_bits():
    whole = model()
    optimizer = make_optimizer(whole, recipe())
    take_steps(whole, optimizer, 3)
    half, saved = copy.deepcopy(whole), copy.deepcopy(optimizer.state_dict())
    again = make_optimizer(half, recipe())
    again.load_state_dict(saved)
    take_steps(whole, optimizer, 3, first=3)
    take_steps(half, again, 3, first=3)
    assert isinstance(again, Muon)
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), half.parameters(), strict=True))


def test_a_flat_schedule_holds_the_peak_and_falls_over_the_last_fifth():
    training = TrainingConfig(schedule="flat", learning_rate=1.0, min_learning_rate=0.1, warmup_steps=10)
    rates = [learning_rate(step, 100, training) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert set(rates[10:79]) == {1.0}
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[79:]))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_averaged_weights_are_the_running_mean_and_come_back(optimizer):
    built = model()
    training = TrainingConfig(optimizer=optimizer, learning_rate=1e-2)
    stepper = make_optimizer(built, training)
    expected = None
    for step in range(4):
        take_steps(built, stepper, 1, first=step)
        average_weights(stepper, 0.75)
        now = {name: p.detach().clone() for name, p in built.named_parameters()}
        expected = now if expected is None else {name: 0.75 * expected[name] + 0.25 * p for name, p in now.items()}
    last = {name: p.detach().clone() for name, p in built.named_parameters()}
    with with_average(stepper):
        assert all(torch.allclose(p, expected[name], atol=1e-6) for name, p in built.named_parameters())
        assert not torch.equal(built.head.decoder.weight, last["head.decoder.weight"])
    assert all(torch.equal(p, last[name]) for name, p in built.named_parameters())


def test_nothing_is_averaged_while_fp16_skips_the_first_updates():
    built = model()
    stepper = make_optimizer(built, recipe())
    average_weights(stepper, 0.75)  # a scaler that found an infinite gradient has not called step
    take_steps(built, stepper, 1)
    average_weights(stepper, 0.75)
    with with_average(stepper):
        assert all("average" in stepper.state[p] for p in built.parameters())


def test_a_run_is_evaluated_with_its_averaged_weights_too(tiny_config, tmp_path):
    config = load_config(str(tiny_config(training={"max_steps": 6, "average_decay": 0.5, "optimizer": "muon"})))
    train_run(config, tmp_path / "run", quiet=True)
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert found["average"]["targets"] == found["targets"]
    assert found["average"]["loss"] != found["loss"]
    averaged = load_file(tmp_path / "run" / "checkpoints" / "average" / "model.safetensors")
    state = load_file(tmp_path / "run" / "checkpoints" / "last" / "optimizer.safetensors")
    key = "encoder.refiners.0.ffn.up.weight"
    assert torch.equal(averaged[key], state[f"average.{key}"])
