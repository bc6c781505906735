"""New heads and neurons come in slowly and learn fast: the factor's values, and updates m times as long."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import transformers as hf
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pnn.errors import UserError
from pnn.models.precision import NARROW
from pnn.objectives import IGNORE
from pnn.plasticity import FasterUpdates, Unit, WarmUp, grow, heads, learning, prune, warm_up_factor
from pnn.plasticity.heads import head_map, stretches
from pnn.plasticity.learning import learn
from pnn.plasticity.measure import held_out_nats
from pnn.plasticity.teaching import Teacher
from pnn.plasticity.text import NOT_TOLD, Text
from pnn.plasticity.units import gated, stretches_of, unit_map
from pnn.training.recording import Recorder


def optimizer_of(model, kind=torch.optim.AdamW, **more):
    return kind(model.parameters(), lr=1e-2, **more)


def trained(model, batch, new, multiplier, steps=1, **settings):
    """A copy after some updates of AdamW."""
    other = copy.deepcopy(model)
    optimizer = optimizer_of(other, **settings)
    if multiplier is not None:
        FasterUpdates(optimizer, other, new, multiplier)
    for _ in range(steps):
        other(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return other


def moves(model, start, head):
    return [one.view() - old.view() for one, old in zip(stretches(model, head), stretches(start, head), strict=True)]


# Warm-up --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "factor"), [(0, 0.01), (50, 0.505), (100, 1.0), (200, 1.0)])
def test_the_factor(step, factor):
    assert warm_up_factor(step) == pytest.approx(factor)


def test_the_factor_rises_evenly():
    values = [warm_up_factor(step) for step in range(101)]
    assert all(later > earlier for earlier, later in pairwise(values))
    assert warm_up_factor(0, steps=0) == 1.0
    assert warm_up_factor(5, steps=10) == pytest.approx(0.505)


def test_the_factor_multiplies_what_new_heads_hand_on(model, logits):
    new = [(0, 1), (2, 0)]
    gates = {("head", layer): torch.ones(len(row)) for layer, row in enumerate(head_map(model))}
    for layer, position in new:
        gates["head", layer][position] = 0.505
    with gated(model, gates):
        expected = logits(model)
    with WarmUp(model, new) as warm_up:
        early = logits(model)
        assert warm_up.at(50) == pytest.approx(0.505)
        assert torch.equal(logits(model), expected)
        assert warm_up.at(100) == 1.0
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert warm_up.at(10) == pytest.approx(0.109)  # whoever goes back to an earlier step gets its factor
    assert not torch.equal(early, expected)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_factor_multiplies_what_new_neurons_hand_on(model, logits):
    neurons, heads_of_layer = torch.ones(len(unit_map(model, "neuron")[2])), torch.ones(len(head_map(model)[0]))
    neurons[[3, 7]] = heads_of_layer[1] = 0.505
    with gated(model, {("neuron", 2): neurons, ("head", 0): heads_of_layer}):
        expected = logits(model)
    with WarmUp(model, [Unit("neuron", 2, 7), Unit("neuron", 2, 3), (0, 1)]) as warm_up:
        warm_up.at(50)
        assert torch.equal(logits(model), expected)
    assert not torch.equal(logits(model), expected)


def test_a_warm_up_can_last_no_time(built, logits):
    model = built("gpt2")
    with WarmUp(model, [(0, 1)], steps=0):
        assert not any(module._forward_pre_hooks for module in model.modules())


# Updates --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiplier", [0.5, 3.0, 5.0])
def test_the_first_step_of_a_new_head_is_m_times_as_long(model, texts, multiplier):
    new, batch = (1, 1), texts(model)[0]
    grown = grow(prune(model, [new]), [new], init="random")
    slow, fast = (trained(grown, batch, [new], m, weight_decay=0.1) for m in (None, multiplier))
    for once, more in zip(moves(slow, grown, new), moves(fast, grown, new), strict=True):
        assert once.abs().max() > 0
        assert (more - multiplier * once).abs().max() < 1e-6
    for name, value in slow.state_dict().items():  # what is shared with no new head moved as ever
        if all(value.shape != one.parameter.shape for one in stretches(grown, new)):
            assert torch.equal(fast.state_dict()[name], value)
    for head in heads(grown):
        if head != new:
            for once, more in zip(moves(slow, grown, head), moves(fast, grown, head), strict=True):
                assert torch.equal(once, more)


def test_the_first_step_of_a_new_neuron_is_m_times_as_long(model, texts):
    new, batch = Unit("neuron", 1, 2), texts(model)[0]
    grown = grow(prune(model, [new]), [new], init="random")
    slow, fast = (trained(grown, batch, [new], m, weight_decay=0.1) for m in (None, 4.0))
    start = stretches_of(grown, [new])[new]
    for old, once, more in zip(start, stretches_of(slow, [new])[new], stretches_of(fast, [new])[new], strict=True):
        assert (more.view() - old.view() - 4 * (once.view() - old.view())).abs().max() < 1e-6
        if old.role == "o":
            assert (once.view() - old.view()).abs().max() > 0
    beside = Unit("neuron", 1, 3)
    for once, more in zip(stretches_of(slow, [beside])[beside], stretches_of(fast, [beside])[beside], strict=True):
        assert torch.equal(once.view(), more.view())


def test_learning_moves_new_heads_m_times_as_far(built, texts):
    """The wiring of `learn`, which the cycle and the study use."""
    model, new = built("gpt2"), (1, 1)
    grown = grow(prune(model, [new]), [new], init="random")
    after = {}
    for multiplier in (1.0, 5.0):
        after[multiplier] = copy.deepcopy(grown)
        batch = texts(model)[0]
        options = {"steps": 1, "peak_rate": 1e-3, "multiplier": multiplier, "seed": 0}
        assert len(list(learn(after[multiplier], [new], lambda _, batch=batch: batch, **options))) == 1
    for once, more in zip(moves(after[1.0], grown, new), moves(after[5.0], grown, new), strict=True):
        assert once.abs().max() > 0
        assert (more - 5 * once).abs().max() < 1e-6
    for once, more in zip(moves(after[1.0], grown, (0, 0)), moves(after[5.0], grown, (0, 0)), strict=True):
        assert torch.equal(once, more)


def test_learning_falls_by_a_cosine_to_a_tenth(built, texts):
    model, rates = copy.deepcopy(built("gpt2")), []
    watch = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        list(learn(model, [], lambda _: texts(model)[0], steps=5, peak_rate=1e-3, multiplier=1.0, seed=0))
    finally:
        watch.remove()
    assert rates == pytest.approx([1e-4 + 9e-4 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)])


def test_it_is_a_learning_rate_m_times_as_high(built, texts):
    """Over several steps: the new head's part of a fused matrix against a parameter group of its own rate."""
    # in 64 bit: the gradient of keys' biases is zero but for rounding, of which Adam would make whole steps
    model, batch = copy.deepcopy(built("gpt2")).double(), texts(built("gpt2"))[0]
    everything = [(1, index) for index in range(4)]  # all heads of a layer: its matrices can have a group of their own
    fast = trained(model, batch, everything, 4.0, steps=3, weight_decay=0.1)
    grouped = copy.deepcopy(model)
    attention = grouped.transformer.h[1].attn
    own = [attention.c_attn.weight, attention.c_attn.bias, attention.c_proj.weight]
    rest = [parameter for parameter in grouped.parameters() if all(parameter is not one for one in own)]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": own, "lr": 4e-2}], lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        grouped(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in grouped.state_dict().items():
        assert (fast.state_dict()[name] - value).abs().max() < 1e-9, name


def test_a_gradient_m_times_as_large_would_have_done_nothing(built, texts):
    """Why the update is what is scaled."""
    model, batch, head = copy.deepcopy(built("gpt2")).double(), texts(built("gpt2"))[0], (1, 1)
    plain = trained(model, batch, [], None)
    scaled = copy.deepcopy(model)
    optimizer = optimizer_of(scaled)
    scaled(**batch).loss.backward()
    for one in stretches(scaled, head):
        one.of(one.parameter.grad).mul_(5)
    optimizer.step()
    for one, other in zip(moves(plain, model, head), moves(scaled, model, head), strict=True):
        assert (one - other).abs().mean() < 0.01 * one.abs().mean()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_any_optimiser(built, texts, kind):
    model, batch, head = built("opt"), texts(built("opt"))[0], (0, 2)
    slow, fast = (trained(model, batch, [head], m, kind=kind) for m in (None, 3.0))
    for once, more in zip(moves(slow, model, head), moves(fast, model, head), strict=True):
        assert (more - 3 * once).abs().max() < 1e-6


def test_it_ends_when_it_is_removed(built, texts):
    model, batch, head = built("gpt2"), texts(built("gpt2"))[0], (0, 2)
    other = copy.deepcopy(model)
    optimizer = optimizer_of(other)
    FasterUpdates(optimizer, other, [head], 5.0).remove()
    other(**batch).loss.backward()
    optimizer.step()
    plain = trained(model, batch, [], None)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in other.state_dict().items())


# A cycle in small -----------------------------------------------------------------------------------------------------


def test_a_pruned_and_grown_model_learns(built, texts):
    model, batches = built("llama"), texts(built("llama"))
    new = [(0, 1)]
    grown = grow(prune(model, [(0, 1), (2, 0)]), new)
    before = float(grown(**batches[0]).loss.detach())
    optimizer = torch.optim.AdamW(grown.parameters(), lr=3e-3)
    faster = FasterUpdates(optimizer, grown, new, 5.0)
    with WarmUp(grown, new, steps=10) as warm_up:
        for step in range(20):
            warm_up.at(step)
            grown(**batches[0]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    faster.remove()
    assert float(grown(**batches[0]).loss.detach()) < 0.7 * before
    written = next(one for one in stretches(grown, new[0]) if one.role == "o")
    assert written.view().abs().max() > 0.01


# Recorded passes ------------------------------------------------------------------------------------------------------


class Again(Recorder):
    """What a CUDA graph does, on a CPU: computes anew with inputs where they were, and leaves results and gradients there."""

    replays, fails = 0, False

    def __init__(self, run, parameters, passes_per_update):
        self.run, self.parameters, self.adds = run, list(parameters), passes_per_update > 1
        self.graph, self.passes = None, 0

    def on_stream(self):
        return nullcontext()

    def _record(self, inputs):
        if Again.fails:
            torch.rand(3)  # and half a backward pass
            self.parameters[0].grad = torch.ones_like(self.parameters[0])
            raise UserError("no")
        self.inputs, self.graph = {name: x.clone() for name, x in inputs.items()}, self
        with torch.random.fork_rng([]):
            self.outputs = self.run(self.inputs)

    def replay(self):
        Again.replays += 1
        kept = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        for old, new in zip(self.outputs, self.run(self.inputs), strict=True):
            old.copy_(new)
        for parameter, old in zip(self.parameters, kept, strict=True):
            if old is not None:
                parameter.grad = old.copy_(parameter.grad)


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
@pytest.mark.parametrize("lesson", [None, "logits", "states"])
@pytest.mark.parametrize("why_not", ["", "told", "it fails", "no room", "a mask", "no target"])
def test_recorded_updates_are_those_that_are_issued(built, texts, name, lesson, why_not, monkeypatch):
    """Dropout, a warm-up that ends half-way, faster heads and a teacher among it."""
    new, batches = [(1, 1)], [{"input_ids": batch["input_ids"]} for batch in texts(built(name))]
    if why_not == "told" and lesson is not None:  # by the text, here and there
        for batch in batches:
            batch["labels"] = batch["input_ids"]
            batch["told"] = batch["labels"].masked_fill(torch.arange(batch["labels"].shape[1]) % 3 > 0, NOT_TOLD)
    if why_not == "a mask":
        batches[1] = texts(built(name))[1]
    if why_not == "no target":  # at one place: a batch says so on the host, and a recorded pass with a teacher cannot ask
        batches[1]["labels"] = batches[1]["input_ids"].clone()
        batches[1]["labels"][1, 5] = IGNORE
    grown = grow(prune(built(name), [(0, 0), *new]), new, init="random")
    monkeypatch.setattr(learning, "Recorder", Again)
    monkeypatch.setattr(learning, "room_to_record", lambda: why_not != "no room")
    monkeypatch.setattr(Again, "fails", why_not == "it fails")
    monkeypatch.setattr(Again, "replays", 0)
    found = []
    for recorded in (False, True):
        monkeypatch.setattr(learning, "may_record", lambda model, recorded=recorded: recorded)
        model = copy.deepcopy(grown)
        teacher = None if lesson is None else Teacher(built(name), lesson)
        options = {"steps": 12, "peak_rate": 1e-2, "multiplier": 5.0, "seed": 0, "teacher": teacher}
        losses = [loss for _, loss in learn(model, new, lambda step: batches[step % 2], **options)]
        assert losses[-1] < losses[0]
        assert all(parameter.grad is None for parameter in model.parameters())
        found.append((losses, list(model.parameters())))
    replayed = why_not in ("", "told") or (why_not == "no target" and lesson is None)
    assert Again.replays == (6 if replayed else 0)  # six updates of warm-up, six without, the first three of each issued
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("lesson", [None, "logits"])
@pytest.mark.parametrize(("width", "expected"), [(32, torch.float32), (NARROW, torch.bfloat16)])
def test_a_cpu_that_has_bf16_learns_in_it_where_states_are_wide(lesson, width, expected, monkeypatch):
    """Weights and what is measured stay in fp32, and the same updates give the same bits."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    torch.manual_seed(0)
    ids = torch.randint(0, 60, (4, 12))
    text = Text(ids, ids)
    config = hf.GPT2Config(vocab_size=60, n_embd=width, n_layer=1, n_head=2, n_positions=12)
    before = hf.GPT2LMHeadModel(config).eval()
    computed, after = set(), []
    for _ in range(2):
        model = copy.deepcopy(before)
        model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda part, _, out: computed.add((part.training, out.dtype)))
        settings = {"steps": 20, "peak_rate": 1e-3, "multiplier": 1.0, "seed": 0}
        teacher = None if lesson is None else Teacher(hf.GPT2LMHeadModel(config).eval(), lesson)
        losses = [
            loss for _, loss in learn(model, [], lambda step: {"input_ids": ids, "labels": ids}, teacher=teacher, **settings)
        ]
        after.append([*model.state_dict().values()])
        assert losses[-1] < losses[0]
        held_out_nats(model, text)
        assert computed == {(True, expected), (False, torch.float32)}
        computed.clear()
        if lesson is not None:
            break  # each has a teacher of its own
    assert {one.dtype for one in after[0]} == {torch.float32}
    assert all(torch.equal(one, other) for one, other in zip(after[0], after[-1], strict=True))


def test_a_teacher_that_cannot_be_recorded_is_issued(built, texts, monkeypatch):
    model, batch = built("gpt2"), texts(built("gpt2"))[0]["input_ids"]
    monkeypatch.setattr(learning, "Recorder", Again)
    monkeypatch.setattr(learning, "room_to_record", lambda: True)
    monkeypatch.setattr(Again, "replays", 0)
    monkeypatch.setattr(learning, "may_record", lambda one: one is not model)
    options = {"steps": 5, "peak_rate": 1e-3, "multiplier": 1.0, "seed": 0, "teacher": Teacher(model)}
    assert len(list(learn(prune(model, [(0, 0)]), [], lambda _: {"input_ids": batch}, **options))) == 5
    assert Again.replays == 0


# Errors ---------------------------------------------------------------------------------------------------------------


def test_what_cannot_be(built):
    model = built("gpt2")
    optimizer = optimizer_of(copy.deepcopy(model))
    with pytest.raises(UserError, match="above 0"):
        FasterUpdates(optimizer, model, [(0, 0)], 0.0)
    with pytest.raises(UserError, match="make it after growing"):
        FasterUpdates(optimizer, model, [(0, 0)], 2.0)
    with pytest.raises(UserError, match="no head 9"):
        WarmUp(model, [(0, 9)])
    with pytest.raises(UserError, match="only heads and neurons can be new"):
        WarmUp(model, [("layer", 0, 0)])
    with pytest.raises(UserError, match="0 or more"):
        WarmUp(model, [(0, 0)], steps=-1)
