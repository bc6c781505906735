"""Rates that carry over widths: an update moves predictions by as much at every width, and without the rule it does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import pnn
from pnn.config import TrainingConfig
from pnn.errors import UserError
from pnn.training.optim import make_optimizer, set_learning_rate
from pnn.training.widths import sums_over_width, times_as_wide

BASE = 32
IDS = torch.randint(5, 60, (8, 12), generator=torch.Generator().manual_seed(0))


def model(width, **changes):
    torch.manual_seed(0)
    size = {"vocab_size": 60, "hidden_size": width, "num_attention_heads": width // 16, "intermediate_size": 2 * width}
    spread = 0.1 * (BASE / width) ** 0.5
    config = pnn.PNNConfig(**size, update="rewrite", dropout=0.0, num_steps=2, initializer_range=spread, **changes)
    return pnn.PNNForMaskedLM(config)


def moved(width, base, optimizer, **changes):
    """How far three updates move the logits, root mean square."""
    built = model(width, **changes)
    before = built(IDS).logits.detach()
    steps = make_optimizer(built, TrainingConfig(optimizer=optimizer, learning_rate=2e-3, base_width=base))
    for _ in range(3):
        built(IDS, labels=IDS).loss.backward()
        steps.step()
        steps.zero_grad()
    return (built(IDS).logits - before).square().mean().sqrt().item()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_updates_move_predictions_by_as_much_at_eight_times_the_width(optimizer, tied):
    form = {"tie_word_embeddings": tied, "head_transform": tied}
    at_base = moved(BASE, BASE, optimizer, **form)
    carried = moved(8 * BASE, BASE, optimizer, **form) / at_base
    as_it_was = moved(8 * BASE, None, optimizer, **form) / at_base
    # the matrix of an untied head begins √8 times too large for its width (`training/widths`)
    assert 0.5 < carried < (2 if tied else 2 * 8**0.5)
    assert as_it_was > max(3, 1.7 * carried)


def test_at_the_base_width_nothing_changes():
    states = []
    for base in (None, BASE):
        built = model(BASE)
        steps = make_optimizer(built, TrainingConfig(optimizer="muon", learning_rate=1e-2, base_width=base))
        built(IDS, labels=IDS).loss.backward()
        steps.step()
        states.append([p.detach().clone() for p in built.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_a_table_of_a_width_of_its_own_is_refused():
    """The rule knows one width."""
    narrow = model(BASE, embedding_size=BASE // 2, head_transform=True)
    assert times_as_wide(narrow, TrainingConfig()) == 1
    with pytest.raises(UserError, match="embedding_size out"):
        times_as_wide(narrow, TrainingConfig(base_width=BASE))


def test_every_parameter_has_one_rate_and_one_decay():
    built = model(4 * BASE)
    optimizer = make_optimizer(built, TrainingConfig(optimizer="muon", weight_decay=0.1, base_width=BASE))
    set_learning_rate(optimizer, 1e-2)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(built.parameters()))
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    refiner = built.encoder.refiners[0]
    assert rates[id(next(refiner.ffn.parameters()))] == (5e-3, 0.2)
    assert rates[id(built.head.decoder.weight)] == (2.5e-3, 0.4)
    assert rates[id(built.encoder.embeddings.token.weight)] == (1e-2, 0.1)
    assert rates[id(built.head.decoder.bias)] == (1e-2, 0.0)


def test_transformers_decoders_have_the_rule_too():
    gpt = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, n_positions=16, vocab_size=40))
    optimizer = make_optimizer(gpt, TrainingConfig(learning_rate=1e-2, base_width=16))
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(gpt.transformer.h[0].mlp.c_fc.weight)] == rates[id(gpt.lm_head.weight)] == 2.5e-3
    assert rates[id(gpt.transformer.wpe.weight)] == 1e-2
    assert gpt.transformer.wpe.weight not in sums_over_width(gpt)


def test_a_model_without_a_width_is_told():
    with pytest.raises(UserError, match=r"training.base_width: 16, but a SimpleNamespace has no single width"):
        times_as_wide(SimpleNamespace(config=SimpleNamespace()), TrainingConfig(base_width=16))
