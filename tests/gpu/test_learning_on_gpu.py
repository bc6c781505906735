"""Learning of Llama-like decoders with kernels and recorded passes, on a GPU in bf16, beside the same without; and their
repair. Run by hand: pytest -m gpu tests/gpu/test_learning_on_gpu.py"""

import sys
from contextlib import nullcontext

import pytest
import torch
import transformers as hf

from pnn.objectives import IGNORE
from pnn.plasticity import learning, prune
from pnn.plasticity.learning import Passes, learn
from pnn.plasticity.repair import output_errors, repair
from pnn.plasticity.teaching import Teacher
from pnn.plasticity.text import NOT_TOLD
from pnn.plasticity.units import Unit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
# two groups of three heads, of which one can go; a width that is no power of two, heads that are
SIZE = {"vocab_size": 1000, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 512}
GONE = [Unit("head", 0, 0), *(Unit("neuron", 1, index) for index in range(64))]


def build() -> hf.PreTrainedModel:
    """With weights so large that what was pruned is missed."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, num_hidden_layers=3, max_position_embeddings=128))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.cuda()


def text(rows: int = 8) -> torch.Tensor:
    return torch.randint(0, 1000, (rows, 100), generator=torch.Generator().manual_seed(0))


def losses(lesson: str | None, ignored: int = 0, steps: int = 20, told: bool = False) -> list[float]:
    """Two batches in turn: a replay that read the one before would be noticed."""
    rows = text(16)
    labels = rows.clone()
    labels[:, :ignored] = IGNORE
    batches = [{"input_ids": rows[part::2], "labels": labels[part::2]} for part in range(2)]
    if told:  # by the text, at every third token
        for batch in batches:
            batch["told"] = batch["labels"].masked_fill(torch.arange(batch["labels"].shape[1]) % 3 > 0, NOT_TOLD)
    teacher = None if lesson is None else Teacher(build(), lesson)
    plan = {"steps": steps, "peak_rate": 1e-3, "multiplier": 1.0, "seed": 0, "teacher": teacher}
    return [loss for _, loss in learn(prune(build(), GONE), [], lambda step: batches[step % 2], **plan)]


@pytest.fixture
def passes(monkeypatch) -> list[Passes]:
    """Those of every call of `learn`."""
    made: list[Passes] = []

    class Watched(Passes):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(learning, "Passes", Watched)
    return made


@pytest.mark.parametrize("lesson", [None, "logits", "states"])
def test_with_kernels_it_learns_the_same(lesson, monkeypatch):
    fast = losses(lesson)
    monkeypatch.setattr(learning, "fused", lambda *models: nullcontext())
    plain = losses(lesson)
    assert plain[-1] < 0.8 * plain[0]
    torch.testing.assert_close(torch.tensor(fast), torch.tensor(plain), rtol=0.03, atol=0.003)


@pytest.mark.parametrize(("lesson", "told"), [(None, False), ("logits", False), ("logits", True), ("states", True)])
def test_recorded_it_learns_what_it_learns_issued(lesson, told, passes, monkeypatch):
    recorded = losses(lesson, told=told)
    monkeypatch.setattr(learning, "may_record", lambda model: False)
    issued = losses(lesson, told=told)
    assert passes[0].recorder is not None
    assert passes[0].recorder.graph is not None
    assert passes[1].recorder is None
    assert issued[-1] < 0.8 * issued[0]
    torch.testing.assert_close(torch.tensor(recorded), torch.tensor(issued), rtol=0.02, atol=0.002)


def test_a_batch_with_tokens_that_are_no_targets_is_issued_with_a_teacher(passes, monkeypatch):
    found = losses("logits", ignored=10)
    assert passes[0].recorder is None
    assert losses(None, ignored=10)  # without a teacher a recorded pass knows what to leave out
    assert passes[1].recorder is not None
    assert passes[1].recorder.graph is not None
    monkeypatch.setattr(learning, "may_record", lambda model: False)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses("logits", ignored=10)), rtol=0.02, atol=0.002)


def test_passes_in_16_bit_repair_as_well(monkeypatch):
    model, batches = build(), [{"input_ids": part} for part in text(64).split(16)]
    small = prune(model, GONE)
    nearly = repair(small, model, batches)
    monkeypatch.setattr(sys.modules["pnn.plasticity.repair"], "computing", lambda model: nullcontext())
    exact = repair(small, model, batches)
    cut, least, found = (sum(output_errors(one, model, batches).values()) for one in (small, exact, nearly))
    assert least < 0.9 * cut
    assert found - least < 0.1 * (cut - least)
