"""Tokens that halt on a GPU: in fp32 what a CPU and a plain loop compute, in 16 bit about that, by borders and in sizes of few
kinds. Run by hand: pytest -m gpu tests/gpu/test_halting_on_gpu.py"""

import numpy as np
import pytest
import torch

import pnn
from pnn.data.batches import pack
from pnn.evaluation import passes
from pnn.evaluation.passes import states_at
from pnn.models.base import arrange
from pnn.nn import fast, halting, recording
from pnn.nn.halting import CRITERIA, Criterion
from pnn.nn.packing import bucket
from pnn.schedule import period

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZE = {"vocab_size": 500, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "dropout": 0.0}
FORMS = {
    "paper": {"num_steps": 4},
    "rewrite": {"update": "rewrite", "schedule": [0, 1, 0, 1, 0], "positions": "rotary"},
    "diagonal": {"update": "rewrite", "gate": "diagonal", "gate_start": 0.8, "num_steps": 4, "positions": "rotary"},
}
LENGTHS = torch.randint(3, 100, (40,), generator=torch.Generator().manual_seed(0))


class OneNumber(Criterion):
    """Tokens halt by one number of their state."""

    def measure(self, before, after, read):
        return after[:, -1].float()


class Drawn(Criterion):
    """A pattern without order, another one for each seed: whenever they can, about two in five of the live tokens halt."""

    seed = 0

    def measure(self, before, after, read):
        along = torch.randn(after.shape[-1], generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        return (20 * after.double() @ along.to(after.device)) % 1


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setitem(CRITERIA, "one number", OneNumber)
    monkeypatch.setitem(CRITERIA, "drawn", Drawn)
    monkeypatch.setattr(recording, "KNOWN", {*recording.KNOWN, __name__.partition(".")[0]})  # these two measure the same again


def build(form, **more):
    torch.manual_seed(0)
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**(SIZE | FORMS[form] | more), zero_init=False, initializer_range=0.1))
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


@pytest.mark.parametrize(("longest", "computed_by"), [(128, "live_attention"), (256, "flash")])
@pytest.mark.parametrize("form", FORMS)
def test_in_16_bit_attention_goes_by_borders(form, longest, computed_by, monkeypatch):
    model, (ids, borders, at) = build(form, max_position_embeddings=longest).cuda(), batch()
    ids, borders, at = (x.cuda() for x in (ids, borders, at))
    calls, sizes, attention, go_on = [], [], getattr(fast, computed_by), halting.go_on

    def chosen(*given):
        found = go_on(*given)
        sizes.extend((len(found[2].here), len(found[2].beside)))
        return found

    monkeypatch.setattr(fast, computed_by, lambda *given: calls.append(1) or attention(*given))
    monkeypatch.setattr(halting, "go_on", chosen)
    halt = {"criterion": "one number", "threshold": 0.05}
    with torch.inference_mode():
        exact = model.base_model(ids, cu_seqlens=borders, last_at=at, halt=halt)
        calls.clear()
        sizes.clear()
        with torch.autocast("cuda", torch.bfloat16):
            found = model.base_model(ids, cu_seqlens=borders, last_at=at, halt=halt)
    assert calls
    assert sizes
    assert all(size == 0 or size == bucket(size) for size in sizes)
    assert found.halted_at.float().mean() < len(model.config.schedule) - 1
    same = (found.halted_at == exact.halted_at)[0, at]
    assert same.float().mean() > 0.9
    difference = (found.last_hidden_state.float() - exact.last_hidden_state)[0, same].norm(dim=-1)
    assert difference.median() < 0.02 * exact.last_hidden_state.norm(dim=-1).median()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_flow_in_16_bit_where_whole_sequences_have_halted(form):
    model, (ids, borders, at) = build(form).cuda(), batch()
    ids, borders, at = (x.cuda() for x in (ids, borders, at))
    with torch.autocast("cuda", torch.bfloat16):
        out = model.base_model(ids, cu_seqlens=borders, last_at=at, halt={"criterion": "one number", "threshold": 0.05})
    steps = out.halted_at[0].split(LENGTHS.tolist())
    assert any(some.max() < len(model.config.schedule) for some in steps), "the pattern is not worth a test"
    out.last_hidden_state.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.base_model.refiners.parameters())


# Recorded passes --------------------------------------------------------------------------------------------------------


def some_texts(seed):
    """Forty sequences in another order each time: the same shape."""
    draw = np.random.default_rng(seed)
    lengths = draw.permutation(LENGTHS.numpy())
    texts = pack(draw.integers(5, 500, lengths.sum()), lengths, np.zeros(len(lengths), np.int64))
    return texts, torch.from_numpy(np.sort(draw.choice(lengths.sum(), lengths.sum() // 8, replace=False)))


def halting_half(model, criterion):
    """Settings that let half of the tokens go as soon as they may."""
    encoder, (texts, _) = model.base_model, some_texts(0)
    encoder.set_halt({"criterion": criterion, "threshold": 0.5})
    with torch.no_grad():
        if criterion == "learned":
            encoder.criterion.weight.normal_(generator=torch.Generator().manual_seed(5))
        step = period(model.config.schedule)
        states = encoder(texts.input_ids[None], cu_seqlens=texts.cu_seqlens, output_states=True, halt=False).states
        middle = encoder.criterion.measure(states[step - 1][0], states[step][0], None).median()
    return {"criterion": criterion, "threshold": float(middle)}


@pytest.mark.parametrize("criterion", ["one number", "change", "learned", "context"])
@pytest.mark.parametrize("longest", [128, 256])
@pytest.mark.parametrize("form", FORMS)
def test_a_recorded_pass_is_the_plain_one(form, longest, criterion, monkeypatch):
    model = build(form, max_position_embeddings=longest)
    halt = {"criterion": criterion, "min_steps": 2} if criterion == "context" else halting_half(model, criterion)
    model.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        found = [states_at(model, *some_texts(seed), halt=halt)[0] for seed in range(8)]
        known = passes._HALTING[model]
        states_at(model, *some_texts(7), halt=halt)  # the last of them may have needed more room than there was
        assert known.recorded, known.failed
        counts_when_replayed(model, known, *some_texts(7), halt, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(passes, "_recordings_of", lambda model, halting: None)
            expected = [states_at(model, *some_texts(seed), halt=halt)[0] for seed in range(8)]
            every = [states_at(model, *some_texts(seed), halt=False)[0] for seed in range(8)]
    for one, other, all_steps in zip(found, expected, every, strict=True):
        assert torch.isfinite(one.float()).all()
        difference, size = (one.float() - other.float()).norm(dim=-1), other.float().norm(dim=-1).median()
        assert difference.median() < 0.02 * size
        assert (difference < 0.1 * size).float().mean() > 0.97  # a token beside the threshold may fall to either side
        assert (all_steps.float() - other.float()).norm(dim=-1).median() > difference.median()  # something halts


def counts_when_replayed(model, known, texts, at, halt, monkeypatch):
    """A pass that is void, or not recorded, would be computed without a recording, and be right as well."""
    replay, found = known.replay, []
    with monkeypatch.context() as patch:
        patch.setattr(known, "replay", lambda *given: found.append(replay(*given)) or found[-1])
        patch.setattr(known, "forget", lambda key: pytest.fail(f"void: {key}"))
        states_at(model, texts, at, halt=halt)
    assert len(found) == 1
    assert found[0] is not None, known.failed


@pytest.mark.parametrize("room", [0, 1, 64])
@pytest.mark.parametrize("form", FORMS)
def test_too_little_room_reads_nothing_else_at_full_width(form, room, monkeypatch):
    """As measured: twelve heads, many sequences, a learned unit. A read behind a buffer ends the process here."""
    model = build(form, hidden_size=768, num_attention_heads=12, intermediate_size=2048, max_position_embeddings=128)
    halt = halting_half(model, "learned")
    model.cuda()
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 128, 1000)
    texts = pack(draw.integers(5, 500, lengths.sum()), lengths, np.zeros(1000, np.int64))
    at = torch.arange(0, int(lengths.sum()), 7)
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(3):
            states_at(model, texts, at, halt=halt)
        known = passes._HALTING[model]
        ((key, enough),) = known.room.items()
        known.room[key] = small = tuple((room, room) for _ in enough)
        known.seen.add((key, small))
        states_at(model, texts, at, halt=halt)  # void, and computed again
        torch.cuda.synchronize()
        states_at(model, texts, at, halt=halt)
        assert (key, small) not in known.recorded
        counts_when_replayed(model, known, texts, at, halt, monkeypatch)


def test_a_recorded_pass_without_room_is_computed_again(monkeypatch):
    model, halt = build("paper").cuda(), {"criterion": "one number", "threshold": 0.05}
    with torch.autocast("cuda", torch.bfloat16):
        for seed in range(4):
            states_at(model, *some_texts(seed), halt=halt)
        known = passes._HALTING[model]
        ((key, room),) = known.room.items()
        known.room[key] = small = ((64, room[0][1]), *room[1:])
        found = [states_at(model, *some_texts(4), halt=halt)[0] for _ in range(4)]
        assert known.room[key][0][0] > 64
        assert (key, known.room[key]) in known.recorded, known.failed
        assert (key, small) not in known.recorded  # what was void is forgotten
        monkeypatch.setattr(passes, "_recordings_of", lambda model, halting: None)
        expected = states_at(model, *some_texts(4), halt=halt)[0]
    for one in found:
        difference = (one.float() - expected.float()).norm(dim=-1)
        assert difference.median() < 0.02 * expected.float().norm(dim=-1).median()


# Beside a plain loop ----------------------------------------------------------------------------------------------------


@pytest.fixture
def device():
    """What follows can be called with "cpu" too."""
    return "cuda"


def rows(device):
    """The batch as padded rows, and which of their tokens are real."""
    flat, _, at = batch()
    keep = torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]
    ids = torch.full(keep.shape, 7).masked_scatter_(keep, flat)
    return ids.to(device), keep.to(device), keep.flatten().nonzero()[at, 0].to(device)


def plain_loop(encoder, ids, keep, taken):
    """h⁰ … hᵀ by the equations, in fp32: every token is computed at every step, and stays where it is once it has taken so
    many."""
    tokens = encoder.embeddings.token(ids)
    positions, layout = arrange(tokens, keep, None, None, encoder.config)
    states = [encoder.embeddings(tokens, positions)]
    for step, number in enumerate(encoder.config.schedule):
        h = states[-1]
        states.append(torch.where((taken > step)[..., None], h + encoder.refiners[number].refine(h, layout).delta, h))
    return states


def first_settled(measured, threshold, schedule):
    """After how many steps a token stops by what is measured of it after each of them: (steps, …) without the steps."""
    stops = torch.full_like(measured[0], len(schedule), dtype=torch.long)
    for step in reversed(range(1, len(schedule))):
        if step % period(schedule) == 0:
            stops = torch.where(measured[step - 1] >= threshold, step, stops)
    return stops


def assert_close(found, expected, dtype):
    """As far as the two kinds of numbers let them be: (rows, d) each."""
    difference, size = (found.float() - expected).norm(dim=-1), expected.norm(dim=-1).median()
    if dtype == torch.float32:
        assert difference.max() < 1e-3
    else:
        assert difference.median() < 0.02 * size
        assert difference.quantile(0.99) < 0.1 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_any_pattern_leaves_what_a_plain_loop_leaves(form, packed, dtype, device):
    """The loop is told who takes how many steps: in 16 bit a pattern without order is another one."""
    encoder, (ids, keep, at) = build(form).to(device).base_model, rows(device)
    halt, schedule = {"criterion": "drawn", "threshold": 0.6}, encoder.config.schedule
    if packed:
        borders = batch()[1].to(device)
        call, places = {"input_ids": ids[keep][None], "cu_seqlens": borders}, keep.flatten().nonzero()[:, 0]
    else:
        call, places = {"input_ids": ids, "attention_mask": keep.long()}, torch.arange(keep.numel(), device=device)
    for seed, asked in [(0, None), (1, None), (0, at), (1, at)]:
        Drawn.seed = seed
        last_at = None if asked is None else torch.searchsorted(places, asked)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            out = encoder(**call, halt=halt, last_at=last_at)
        taken = torch.zeros(keep.numel(), dtype=torch.long, device=device)
        taken[places] = out.halted_at.flatten()
        taken = taken.view(keep.shape)
        states = plain_loop(encoder, ids, keep, taken)
        assert len(taken[keep].unique()) >= (3 if period(schedule) == 1 else 2), "the pattern is not worth a test"
        if asked is None:
            assert_close(out.last_hidden_state.flatten(0, 1)[keep.flatten()[places]], states[-1][keep], dtype)
        else:
            assert_close(out.last_hidden_state[0], states[-1].flatten(0, 1)[asked], dtype)
        if dtype == torch.float32:  # nobody stops when the criterion does not say so, but for those that are of no use
            by_step = torch.stack([Drawn(0).measure(None, h.flatten(0, 1), None) for h in states[1:]])
            said = first_settled(by_step, halt["threshold"], schedule).view(keep.shape)
            who = keep if asked is None else torch.zeros_like(keep).view(-1).index_fill_(0, asked, True).view(keep.shape)
            assert (said == taken)[who].float().mean() > 0.99  # a token beside the threshold may fall to either side


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_a_classifier_stops_where_a_plain_loop_is_sure(form, dtype, device):
    """A text halts as a whole, while others of its batch go on."""
    torch.manual_seed(0)
    config = pnn.PNNConfig(**SIZE, **FORMS[form], zero_init=False, initializer_range=0.1, num_labels=3)
    model, (ids, keep, _) = pnn.PNNForSequenceClassification(config).eval().to(device), rows(device)
    schedule = config.schedule
    states = plain_loop(model.base_model, ids, keep, torch.full_like(ids, len(schedule)))
    logits = torch.stack([model.classifier(h[:, 0]) for h in states])
    sure = logits.softmax(-1).amax(-1)[1:]
    values = sure[period(schedule) - 1].sort().values
    middle = values[len(values) // 4 : -len(values) // 4]
    widest = middle.diff().argmax()
    threshold = float(middle[widest : widest + 2].mean())  # between two texts, where rounding turns nobody
    stops = first_settled(sure, threshold, schedule)
    assert len(stops.unique()) > 1
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        out = model(ids, attention_mask=keep.long(), halt={"criterion": "confidence", "threshold": threshold})
    found = out.halted_at[:, 0]
    same = (found == stops).float().mean()
    assert same == 1 if dtype == torch.float32 else same > 0.9
    assert_close(out.logits, logits[found, torch.arange(len(ids), device=device)], dtype)
