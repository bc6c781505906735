"""Tokens that halt on a GPU: in fp32 what a CPU computes, in 16 bit about that, by borders and in sizes of few kinds.
Run by hand: pytest -m gpu tests/gpu/test_halting_on_gpu.py"""

import pytest
import torch

import pnn
from pnn.nn import fast, live
from pnn.nn.halting import CRITERIA, Criterion

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZE = {"vocab_size": 500, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "dropout": 0.0}
FORMS = {
    "paper": {"num_steps": 4},
    "rewrite": {"update": "rewrite", "schedule": [0, 1, 0, 1, 0], "positions": "rotary"},
}
LENGTHS = torch.randint(3, 100, (40,), generator=torch.Generator().manual_seed(0))


class OneNumber(Criterion):
    """Tokens halt by one number of their state."""

    def measure(self, before, after, read):
        return after[:, -1].float()


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setitem(CRITERIA, "one number", OneNumber)


def build(form):
    torch.manual_seed(0)
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**SIZE, **FORMS[form], zero_init=False, initializer_range=0.1))
    return model.eval()


def batch():
    ids = torch.randint(5, 500, (1, int(LENGTHS.sum())), generator=torch.Generator().manual_seed(1))
    borders = torch.cat((torch.zeros(1, dtype=torch.long), LENGTHS.cumsum(0))).int()
    return ids, borders, torch.arange(2, ids.shape[1], 7)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_in_fp32_a_gpu_halts_as_a_cpu_does(form, asked):
    model, (ids, borders, at) = build(form), batch()
    halt = {"criterion": "change", "threshold": 0.4}
    with torch.inference_mode():
        ours = model.base_model(ids, cu_seqlens=borders, last_at=at if asked else None, halt=halt)
        model.cuda()
        where = at.cuda() if asked else None
        theirs = model.base_model(ids.cuda(), cu_seqlens=borders.cuda(), last_at=where, halt=halt)
    same = (ours.halted_at == theirs.halted_at.cpu()).float().mean()
    assert same > 0.99  # a token beside the threshold may fall to either side
    assert len(ours.halted_at.unique()) > 1
    difference = (ours.last_hidden_state - theirs.last_hidden_state.cpu()).abs().amax(-1)
    assert (difference < 1e-3).float().mean() > 0.97


@pytest.mark.parametrize("form", FORMS)
def test_in_16_bit_attention_goes_by_borders(form, monkeypatch):
    model, (ids, borders, at) = build(form).cuda(), batch()
    ids, borders, at = (x.cuda() for x in (ids, borders, at))
    calls, sizes, flash, in_bucket = [], [], fast.flash, live._in_bucket
    monkeypatch.setattr(fast, "flash", lambda *given: calls.append(1) or flash(*given))
    monkeypatch.setattr(live, "_in_bucket", lambda *given: sizes.append(len(found := in_bucket(*given))) or found)
    halt = {"criterion": "one number", "threshold": 0.05}
    with torch.inference_mode():
        exact = model.base_model(ids, cu_seqlens=borders, last_at=at, halt=halt)
        calls.clear()
        sizes.clear()
        with torch.autocast("cuda", torch.bfloat16):
            found = model.base_model(ids, cu_seqlens=borders, last_at=at, halt=halt)
    assert calls
    assert all(size == 0 or size == live.bucket(size) for size in sizes)
    assert found.halted_at.float().mean() < len(model.config.schedule) - 1
    same = (found.halted_at == exact.halted_at)[0, at]
    assert same.float().mean() > 0.9
    difference = (found.last_hidden_state.float() - exact.last_hidden_state)[0, same].norm(dim=-1)
    assert difference.median() < 0.02 * exact.last_hidden_state.norm(dim=-1).median()
