"""Reorganised decoders of transformers on a GPU, called as their users call them: replayed passes, steps and updates give what
transformers' own path gives. Run by hand: pytest -m gpu tests/gpu/test_recorded_decoders.py"""

import copy
import time

import pytest
import torch
import transformers as hf
from greedy import too_large

from pnn.models import recorded
from pnn.nn import recording
from pnn.plasticity import grow, heads, learning, prune
from pnn.plasticity.units import Unit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZE = {"vocab_size": 500, "hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 256}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}
CONFIGS = {
    "gpt2": lambda: hf.GPT2Config(vocab_size=500, n_embd=128, n_head=4, n_layer=3, n_positions=256, **NO_ENDS),
    "opt": lambda: hf.OPTConfig(**SIZE, ffn_dim=256, **NO_ENDS),
    "llama": lambda: hf.LlamaConfig(**SIZE, intermediate_size=256, num_key_value_heads=2, **NO_ENDS),
}


def build(name="gpt2", gone=(), dtype=torch.bfloat16):
    """Without every second head, without any in layer 1."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]()).cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    half = [head for head in heads(model) if head[1] % 2 or head[0] == 1]
    return prune(model, [*half, *gone], whole_layers=True).to(dtype)


def as_transformers_does(model):
    other = copy.deepcopy(model)
    base = recorded.recorded_part(other)
    base.__class__ = base.unrecorded_class
    return other


def known(model):
    return recorded._KNOWN.get(recorded.recorded_part(model))


def readings(model):
    return 0 if known(model) is None else len(known(model).readings.recorded)


def slots(model):
    return [] if known(model) is None else list(known(model).slots.values())


def near(one, other, most=1e-2):
    assert one.shape == other.shape
    assert (one.float() - other.float()).norm() <= most * other.float().norm()


def some_ids(rows=4, length=64, seed=0):
    return torch.randint(1, 500, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "autocast"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_replay_reads_what_transformers_reads(name, dtype):
    model = build(name, [Unit("layer", 2, 0)], dtype)
    plain = as_transformers_does(model)
    kept = []
    for mode in (torch.no_grad, torch.inference_mode):
        for seed in range(4):
            ids = some_ids(seed=seed)
            with mode(), torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
                found, expected = model(ids, attention_mask=torch.ones_like(ids)), plain(ids)
            near(found.logits, expected.logits)
            for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
                near(ours.keys, theirs.keys)
            kept.append((found.logits, found.logits.clone(), found.past_key_values.layers[0].keys.clone(), found))
    for now, before, keys, found in kept:  # what was given away stays
        assert torch.equal(now, before)
        assert torch.equal(found.past_key_values.layers[0].keys, keys)
    assert readings(model) == 1
    assert readings(plain) == 0


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_steps_give_the_logits_of_the_whole_text(name):
    model = build(name)
    ids = some_ids(3, 250)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = as_transformers_does(model)(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()
    cache = model(ids[:, :20], attention_mask=mask[:, :20], position_ids=positions[:, :20]).past_key_values
    for at in range(20, 250):
        asked = {"attention_mask": mask[:, : at + 1], "position_ids": positions[:, at : at + 1]}
        out = model(ids[:, at : at + 1], past_key_values=cache, **asked)
        near(out.logits[:, 0], whole[:, at], 0.05)
        assert any(one.serves(cache) for one in slots(model)), at
    assert cache.get_seq_length() == 250


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", CONFIGS)
def test_generated_text_is_that_of_transformers(name, settings, dtype):
    model = build(name, dtype=dtype)
    prompt = some_ids(4, 6)
    asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **settings}
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
        found, expected = (one.generate(prompt, **asked) for one in (model, as_transformers_does(model)))
    assert (found == expected)[:, :10].float().mean() > 0.9  # near ties may fall either way, and change all that follows
    assert slots(model)


@torch.no_grad()
def test_two_texts_at_a_time_do_not_mix():
    model = build()
    plain = as_transformers_does(model)
    texts = [some_ids(2, 40, seed) for seed in range(2)]
    caches = [model(ids[:, :8]).past_key_values for ids in texts]
    for at in range(8, 40):
        for ids, cache in zip(texts, caches, strict=True):
            found = model(ids[:, at : at + 1], past_key_values=cache).logits[:, 0]
            near(found, plain(ids[:, : at + 1], use_cache=False).logits[:, -1], 0.05)
    assert len(slots(model)) == 1


@pytest.mark.parametrize("why", ["hook", "fp32", "training", "a stream of one's own", "out of memory"])
def test_transformers_own_path_where_nothing_can_be_recorded(why, monkeypatch):
    model = build(dtype=torch.float32 if why == "fp32" else torch.bfloat16)
    if why == "hook":
        model.base_model.h[0].register_forward_hook(lambda *_: None)
    if why == "training":
        model.train()
    if why == "out of memory":
        for place in (recorded, recording):
            monkeypatch.setattr(place, "Recording", too_large(place.Recording))
    before = torch.cuda.current_stream()
    mine = torch.cuda.Stream() if why == "a stream of one's own" else before
    mine.wait_stream(before)
    with torch.no_grad(), torch.cuda.stream(mine):
        for _ in range(3):
            found = model(some_ids()).logits
        text = model.generate(some_ids(2, 5), max_new_tokens=4, do_sample=False, pad_token_id=0)
    torch.cuda.synchronize()
    assert torch.isfinite(found.float()).all()
    assert text.shape == (2, 9)
    assert readings(model) == 0
    assert not slots(model)
    assert torch.cuda.current_stream() == before


@torch.no_grad()
def test_recording_takes_less_than_a_second_and_keeps_no_more_memory_each_time():
    whole = hf.GPT2LMHeadModel(hf.GPT2Config()).cuda().bfloat16().eval()
    model = prune(whole, [head for head in heads(whole) if head[1] % 2])
    ids = torch.randint(0, 50_000, (64, 256), device="cuda")
    took, held = [], []
    for _ in range(6):
        torch.cuda.synchronize()
        started = time.perf_counter()
        model(ids)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - started)
        held.append(torch.cuda.memory_allocated())
    assert readings(model) == 1
    assert took[1] < 1
    assert held[2] == held[-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_learning_follows_issued_learning(name, monkeypatch):
    """With dropout, and a warm-up that ends half-way."""
    new = [(2, 1)]
    grown = grow(build(name, dtype=torch.float32), new, init="random")
    found = []
    for records in (True, False):
        if not records:
            monkeypatch.setattr(learning, "may_record", lambda model: False)
        model, passes = copy.deepcopy(grown), []
        kept = learning.Passes.__init__

        def remember(self, *args, kept=kept, passes=passes):
            kept(self, *args)
            passes.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(learning.Passes, "__init__", remember)
            options = {"steps": 30, "peak_rate": 1e-3, "multiplier": 5.0, "seed": 0}
            updates = learning.learn(model, new, lambda step: {"input_ids": some_ids(seed=step % 3).cpu()}, **options)
            losses = [loss for _, loss in updates]
        assert passes[0].may_record == records  # it has not given up
        assert not records or passes[0].recorder.graph is not None
        assert losses[-1] < losses[0]
        found.append((torch.tensor(losses), torch.cat([p.detach().flatten() for p in model.parameters()])))
    (ours, weights), (theirs, expected) = found
    assert (ours - theirs).abs().max() < 0.02 * theirs[0]
    start = torch.cat([p.detach().flatten() for p in grown.parameters()])
    assert (weights - expected).norm() < 0.1 * (expected - start).norm()
