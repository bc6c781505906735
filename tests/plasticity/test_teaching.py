"""Learning with a teacher: the chunked divergence is the plain one, and a model comes nearer to its teacher by it."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from small_cycles import SHORT, records_of, same_weights
from torch import nn

from pnn import memory
from pnn.errors import UserError
from pnn.files import write_json
from pnn.objectives import IGNORE
from pnn.plasticity import CycleSettings, cycle, prune
from pnn.plasticity.learning import learn
from pnn.plasticity.scores import prepared
from pnn.plasticity.settings import check
from pnn.plasticity.teaching import CHUNK_BYTES, Teacher, divergence, plain_divergence, states_before_head
from pnn.runs import read_json

phases = importlib.import_module("pnn.plasticity.phases")
TAUGHT = CycleSettings(**{**vars(SHORT), "learn_steps": 4, "evaluate_every": 2, "teacher": "states"})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
@pytest.mark.parametrize("told", [None, [12, -1, -1, 0, 5, -1, 3]])
def test_chunks_give_the_plain_divergence_and_its_gradients(bias, rows_at_once, told, monkeypatch):
    vocabulary, count = 13, 7
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * vocabulary * rows_at_once)
    torch.manual_seed(0)
    head, wanted_head = nn.Linear(4, vocabulary, bias).double(), nn.Linear(6, vocabulary, bias).double()
    h, wanted = torch.randn(count, 4).double().requires_grad_(), torch.randn(count, 6).double()
    parameters = [h, *head.parameters()]
    with torch.no_grad():
        logits = wanted_head(wanted)
    told = None if told is None else torch.tensor(told)
    plain = plain_divergence(head(h), logits, told)
    chunked = divergence(h, head, wanted, wanted_head, told)
    assert float(plain.detach()) > 0.1
    assert torch.allclose(chunked, plain, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(3 * chunked, parameters), torch.autograd.grad(3 * plain, parameters), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-12)


def test_what_the_text_tells_is_learnt_from_it_and_all_else_from_the_teacher():
    torch.manual_seed(0)
    logits, wanted, told = torch.randn(3, 5), torch.randn(3, 5), torch.tensor([-1, 4, -1])
    text = -logits[1].log_softmax(-1)[4]
    teacher = 2 * plain_divergence(logits[[0, 2]], wanted[[0, 2]])
    assert float(plain_divergence(logits, wanted, told)) == pytest.approx(float(text + teacher) / 3, rel=1e-6)


def test_in_16_bit_it_is_the_same_to_rounding():
    torch.manual_seed(0)
    head, wanted_head = nn.Linear(16, 50), nn.Linear(16, 50)
    h, wanted = torch.randn(9, 16).requires_grad_(), torch.randn(9, 16)
    exact = divergence(h, head, wanted, wanted_head)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = divergence(h, head, wanted, wanted_head)
    assert rounded.dtype == torch.float32
    assert float(rounded.detach()) == pytest.approx(float(exact.detach()), rel=0.03)
    one, other = (torch.autograd.grad(loss, [h, head.weight]) for loss in (exact, rounded))
    for exactly, nearly in zip(one, other, strict=True):
        assert nearly.dtype == torch.float32
        assert (exactly - nearly).norm() < 0.03 * exactly.norm()


def test_states_are_what_the_head_reads_at_the_predicted_positions(model, texts):
    for batch in texts(model):
        ready = prepared(model, batch)
        labels, logits = ready["labels"], model(**{**ready, "labels": None}).logits
        if model.can_generate():
            labels, logits = labels[:, 1:], logits[:, :-1]
        found = model.get_output_embeddings()(states_before_head(model, ready))
        assert torch.allclose(found, logits[labels != IGNORE], atol=1e-5)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["gpt2", "opt post-norm", "llama", "mistral", "qwen2"])
@pytest.mark.parametrize("lesson", ["logits", "states"])
def test_whole_rows_need_not_be_asked_where_their_targets_are(name, lesson, built, monkeypatch):
    """What a recorded pass computes, and what any batch takes: the same bits, without a question to the device."""
    model, small = built(name), prune(built(name), [(0, 0), ("neuron", 1, 3)])
    ids = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0))
    teacher, batch = Teacher(model, lesson), {"input_ids": ids, "labels": ids}
    asked = teacher.loss(small, batch | {"use_cache": False})
    slopes = torch.autograd.grad(asked, list(small.parameters()))

    def wait(*_):
        raise AssertionError("a recorded pass would wait here")

    with monkeypatch.context() as patch:
        for name in ("nonzero", "item", "__bool__", "tolist"):
            patch.setattr(torch.Tensor, name, wait)
        found = teacher.loss(small, batch, whole_rows=True)
    assert torch.equal(found, asked)
    for one, other in zip(torch.autograd.grad(found, list(small.parameters())), slopes, strict=True):
        assert torch.equal(one, other)
    assert not any(module._forward_pre_hooks for one in (model, small) for module in one.modules())


def test_no_target_is_no_loss(built, texts):
    model = built("gpt2")
    batch = prepared(model, texts(model)[0])
    batch["labels"] = torch.full_like(batch["labels"], IGNORE)
    with torch.no_grad():
        assert float(Teacher(model).loss(model, batch)) == 0


@torch.no_grad()
@pytest.mark.parametrize("lesson", ["logits", "states"])
def test_a_model_is_its_own_best_pupil(model, texts, lesson):
    batch = prepared(model, texts(model)[0])
    teacher = Teacher(model, lesson)
    assert float(teacher.loss(model, batch)) == pytest.approx(0, abs=1e-6)
    assert float(teacher.loss(prune(model, [(0, 0), (1, 1)]), batch)) > 1e-5


@pytest.mark.parametrize("name", ["llama", "pnn"])
def test_learning_brings_a_pruned_model_nearer_to_its_teacher(name, built, texts):
    model = built(name)
    before, batch = copy.deepcopy(model), prepared(model, texts(model)[0])
    small, teacher = prune(model, [(0, 0), (1, 1)]), Teacher(model)
    options = {"steps": 20, "peak_rate": 3e-3, "multiplier": 1.0, "seed": 0, "teacher": teacher}
    losses = [loss for _, loss in learn(small, [], lambda _: batch, **options)]
    with torch.no_grad():
        assert float(teacher.loss(small, batch)) < 0.5 * losses[0]
    assert same_weights(model, before)  # teachers do not learn
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_cycle_with_a_teacher_that_was_killed_goes_on_to_the_same_bits(model_of, text, tmp_path, monkeypatch):
    whole = cycle(model_of("gpt2"), text, tmp_path / "whole", TAUGHT)
    held_out_loss, calls = phases.held_out_loss, 0

    def fatal(*args):
        nonlocal calls
        calls += 1
        if calls == 4:  # initial, pruned, grown, amid learning
            raise KeyboardInterrupt
        return held_out_loss(*args)

    with monkeypatch.context() as patch:
        patch.setattr(phases, "held_out_loss", fatal)
        with pytest.raises(KeyboardInterrupt):
            cycle(model_of("gpt2"), text, tmp_path / "killed", TAUGHT)
    assert same_weights(cycle(model_of("gpt2"), text, tmp_path / "killed", TAUGHT, resume=True), whole)
    assert records_of(tmp_path / "killed") == records_of(tmp_path / "whole")


def test_a_cycle_from_before_there_were_teachers_is_resumed(model_of, text, tmp_path):
    settings = CycleSettings(**{**vars(TAUGHT), "teacher": "none"})
    cycle(model_of("gpt2"), text, tmp_path / "run", settings)
    held = tmp_path / "run/cycle.json"
    write_json(held, {key: value for key, value in read_json(held).items() if key != "teacher"})
    cycle(model_of("gpt2"), text, tmp_path / "run", settings, resume=True)
    with pytest.raises(UserError, match="teacher was 'none' and is now 'states'"):
        cycle(model_of("gpt2"), text, tmp_path / "run", TAUGHT, resume=True)


def test_what_cannot_be(built, model_of, text, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"no 'logit' to learn from a teacher.*logits"):
        Teacher(built("gpt2"), "logit")
    with pytest.raises(UserError, match=r"no 'state' to learn of a teacher.*states"):
        CycleSettings(teacher="state")
    model = model_of("gpt2")
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(memory, "_total", lambda device: int(3.5 * weights))  # 1 for the teacher, 4 · 0.7 for the pupil
    with pytest.raises(UserError, match=r"teacher beside the model.*or learn without a teacher"):
        cycle(model, text, tmp_path / "run", TAUGHT)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(memory, "_total", lambda device: int(3.9 * weights))
    check(model, TAUGHT)
