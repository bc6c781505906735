"""Reorganised decoders of transformers, called as their users call them: what is replayed is what transformers computes.

There are no CUDA graphs on a CPU. `Again` stands for one: it computes anew on the same memory and leaves what it gives where it
was, so that whoever forgets to copy or to write an input is found out. Real ones: tests/gpu/test_recorded_decoders.py."""

import copy
import gc
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from transformers.activations import ACT2FN

from pnn.models import recorded
from pnn.models.recorded import quicken, quickened
from pnn.nn import recording
from pnn.plasticity import heads, load, prune, save
from pnn.plasticity.units import Unit, masked

DECODERS = ("gpt2", "opt", "opt post-norm", "llama", "llama plain", "qwen2")
IDS = torch.randint(1, 50, (3, 9), generator=torch.Generator().manual_seed(0))
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


class Again:
    made = 0

    def __init__(self, run, stream, pool):
        run()
        self.run, self.result = run, run()
        type(self).made += 1

    def replay(self):
        for old, new in zip(tensors(self.result), tensors(self.run()), strict=True):
            if old is not new:
                old.copy_(new)
        return self.result


def tensors(found):
    if isinstance(found, torch.Tensor):
        return [found]
    return [x for one in found for x in tensors(one)] if isinstance(found, tuple | list) else []


@pytest.fixture
def replays(monkeypatch):
    """A CPU that records. Gives how often it did."""
    monkeypatch.setattr(recorded, "can_record", lambda base: True)
    for place in (recorded, recording):
        monkeypatch.setattr(place, "Recording", Again)
        monkeypatch.setattr(place, "room_to_record", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(Again, "made", 0)
    return lambda: Again.made


def halved(model, gone=()):
    """Without every second head, without any head in layer 1, in double precision."""
    model = prune(model, [*(head for head in heads(model) if head[1] % 2 or head[0] == 1), *gone], whole_layers=True)
    return model.double()


def as_transformers_does(model):
    """The same model on the plain path."""
    other = copy.deepcopy(model)
    base = recorded.recorded_part(other)
    base.__class__ = base.unrecorded_class
    return other


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_a_replay_reads_what_transformers_reads(built, replays, name):
    model = halved(built(name), [Unit("layer", 2, 0)])
    plain = as_transformers_does(model)
    first = None
    for ids in (IDS, IDS.flip(1), IDS, IDS.flip(0)):
        found, expected = model(ids, attention_mask=torch.ones_like(ids)), plain(ids)
        assert type(found) is type(expected)
        close(found.logits, expected.logits)
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
            close(ours.keys, theirs.keys)
            close(ours.values, theirs.values)
        first = first or (found.past_key_values, copy.deepcopy(found.past_key_values))
    for now, before in zip(first[0].layers, first[1].layers, strict=True):  # what was given away stays as it was
        assert torch.equal(now.keys, before.keys)
    assert replays() == 1
    one, other = (model.base_model(ids).last_hidden_state for ids in (IDS, IDS.flip(1)))
    assert not torch.equal(one, other)
    with torch.inference_mode():
        close(model(IDS).logits, plain(IDS).logits)
    assert model(IDS, use_cache=False).past_key_values is None
    assert model(IDS, use_cache=False, logits_to_keep=1).logits.shape == (3, 1, 50)
    assert replays() == 2


@pytest.mark.parametrize("name", DECODERS)
def test_replayed_steps_write_what_transformers_writes(built, replays, name, monkeypatch):
    monkeypatch.setattr(recorded, "capacity_for", lambda tokens, most: min(most, tokens + 4))  # buffers that become too small
    model = halved(built(name))
    plain = as_transformers_does(model)
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    for settings in ({}, {"num_beams": 2}):
        found = model.generate(IDS, attention_mask=mask, **GREEDY, **settings)
        assert torch.equal(found, plain.generate(IDS, attention_mask=mask, **GREEDY, **settings))
    assert replays() >= 3


@pytest.mark.parametrize("name", DECODERS)
def test_steps_are_replayed_under_autocast(built, replays, name):
    """Keys and values then differ in precision."""
    model = halved(built(name)).float()
    plain = as_transformers_does(model)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (one.generate(IDS, attention_mask=torch.ones_like(IDS), **GREEDY) for one in (model, plain))
    assert torch.equal(found, expected)
    assert not recorded._KNOWN[recorded.recorded_part(model)].cannot_write
    assert replays() >= 1


@torch.no_grad()
def test_steps_by_hand(built, replays):
    """One's own loop: another text in between, a cache that is cut back, several tokens at once."""
    model = halved(built("gpt2"))
    plain = as_transformers_does(model)

    def step(caches, ids):
        """The same for both."""
        found, expected = (one(ids, past_key_values=cache) for one, cache in zip((model, plain), caches, strict=True))
        close(found.logits, expected.logits)
        assert found.past_key_values is caches[0]
        for ours, theirs in zip(*(cache.layers for cache in caches), strict=True):
            close(ours.keys, theirs.keys)

    one, other = ([m(ids).past_key_values for m in (model, plain)] for ids in (IDS, IDS.flip(1)))
    for at in range(3):
        step(one, IDS[:, at : at + 1])
        step(other, IDS[:, at : at + 1])
    assert replays() == 2  # of reading, and of steps: the second text found the buffers taken
    for cache in one:
        cache.crop(-2)
    step(other, IDS[:, 3:4])
    step(one, IDS[:, 4:5])
    step(one, IDS[:, 5:8])
    step(one, IDS[:, 1:2])
    step(other, IDS[:, 1:2])
    del one
    gc.collect()
    step(other, IDS[:, 2:3])  # moves in where the first was
    assert replays() == 2
    (known,) = [known for base, known in recorded._KNOWN.items() if base is model.base_model]
    (slots,) = known.slots.values()
    assert slots.serves(other[0])


@torch.no_grad()
def test_a_mask_that_changes_between_steps_counts(built, replays):
    model = halved(built("llama"))
    plain = as_transformers_does(model)
    caches = [m(IDS).past_key_values for m in (model, plain)]
    for at in range(3):
        mask = torch.ones(3, 10 + at, dtype=torch.long)
        mask[:, at] = 0
        asked = {"attention_mask": mask, "position_ids": torch.tensor([[9 + at]])}
        found, expected = (
            m(IDS[:, :1], past_key_values=cache, **asked).logits for m, cache in zip((model, plain), caches, strict=True)
        )
        close(found, expected)
    assert replays() == 1


ODD = {
    "gradients": (lambda model: torch.enable_grad(), {}),
    "a hook": (lambda model: model.base_model.h[0].mlp.act.register_forward_hook(lambda *_: None) and nullcontext(), {}),
    "masked heads": (lambda model: masked(model, [(0, 0)]), {}),
    "another attention": (lambda model: model.set_attn_implementation("eager") or nullcontext(), {}),
    "hidden states": (lambda model: nullcontext(), {"output_hidden_states": True}),
    "padding": (
        lambda model: nullcontext(),
        {"attention_mask": torch.arange(9).expand(3, -1) > torch.tensor([[0], [2], [-1]])},
    ),
    "positions": (lambda model: nullcontext(), {"position_ids": torch.arange(3, 12)[None]}),
    "a static cache": (lambda model: nullcontext(), {"past_key_values": hf.StaticCache}),
    "embeddings": (lambda model: nullcontext(), {"input_ids": None, "inputs_embeds": torch.ones(3, 9, 32).double()}),
}


@pytest.mark.parametrize("why", ODD)
def test_whatever_is_odd_takes_transformers_own_path(built, replays, why):
    model = halved(built("gpt2"))
    plain = as_transformers_does(model)
    change, asked = ODD[why]
    for _ in range(3):
        answers = []
        for one in (model, plain):
            inputs = {"input_ids": IDS, **asked}
            if "past_key_values" in asked:
                inputs["past_key_values"] = hf.StaticCache(config=one.config, max_cache_len=12)
            with torch.no_grad(), change(one):
                answers.append(one(**inputs)[0])
        close(*answers)
    assert replays() == 0


@torch.no_grad()
def test_an_adapter_can_be_switched_off(built, replays):
    """With and without, the same weights lie in the same places."""
    peft = pytest.importorskip("peft", reason="in the extra dev")
    model = halved(built("gpt2"))
    expected = model(IDS).logits
    adapter = peft.LoraConfig(target_modules=["c_fc"], init_lora_weights=False, fan_in_fan_out=True)
    tuned = peft.get_peft_model(model, adapter).eval()
    for _ in range(3):
        assert not torch.allclose(tuned(IDS).logits, expected)
    with tuned.disable_adapter():
        close(tuned(IDS).logits, expected)
    assert replays() == 0


def test_sliding_windows_too(built, replays):
    model = prune(built("mistral"), [(0, 0)])
    model.generate(IDS, **GREEDY)
    assert replays() == 0


@torch.no_grad()
def test_weights_that_moved_are_noticed_and_trained_ones_seen(built, replays):
    model = halved(built("gpt2"))
    for change in (
        lambda weight: weight.mul_(2),
        lambda weight: setattr(model.base_model.h[0].mlp.c_fc, "weight", torch.nn.Parameter(3 * weight)),
    ):
        for _ in range(3):
            model(IDS)
        change(model.base_model.h[0].mlp.c_fc.weight)
        for _ in range(2):
            close(model(IDS).logits, as_transformers_does(model)(IDS).logits)
    assert replays() == 2


@torch.no_grad()
def test_running_out_of_memory_is_no_error(built, replays, monkeypatch):
    def none_left(*_):
        raise torch.OutOfMemoryError("none left")

    for place in (recorded, recording):
        monkeypatch.setattr(place, "Recording", none_left)
    model = halved(built("gpt2"))
    plain = as_transformers_does(model)
    for _ in range(3):
        close(model(IDS).logits, plain(IDS).logits)
    assert torch.equal(model.generate(IDS, **GREEDY), plain.generate(IDS, **GREEDY))


def test_gelu_in_one_pass_has_the_values_and_slopes_of_seven():
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64, requires_grad=True)
    slow, fast = (ACT2FN[name](x) for name in ("gelu_new", "gelu_pytorch_tanh"))
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-14)
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (slow, fast)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-13)


def test_a_reorganised_model_learns_as_with_transformers_activation(built):
    grads = []
    for change in (lambda model: None, quicken):
        model = copy.deepcopy(built("gpt2")).double()
        change(model)
        assert (type(model.base_model.h[0].mlp.act) is type(ACT2FN["gelu_new"])) == (change is not quicken)
        model(IDS, labels=IDS).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_it_is_still_the_model_that_it_was(built, tmp_path):
    model = prune(built("gpt2"), [(0, 0)])
    assert isinstance(model.base_model, hf.GPT2Model)
    assert type(model.base_model).__name__ == "GPT2Model"
    save(model, tmp_path / "saved")
    with torch.no_grad():
        expected = model(IDS).logits
        for other in (load(tmp_path / "saved"), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert hasattr(other.base_model, "unrecorded_class")
            assert type(other.base_model.h[0].mlp.act) is type(ACT2FN["gelu_pytorch_tanh"])
            assert torch.equal(other(IDS, return_dict=False)[0], expected)
        assert len(model(IDS, output_hidden_states=True).hidden_states) == 4


@torch.no_grad()
def test_a_whole_model_is_quick_for_a_while(built, replays):
    model = copy.deepcopy(built("gpt2"))
    before = F.softmax(model(IDS).logits, -1)
    with quickened(model):
        for _ in range(2):
            model(IDS)
        assert replays() == 1
        assert hasattr(model.base_model, "unrecorded_class")
        torch.testing.assert_close(F.softmax(model(IDS).logits, -1), before)
    assert type(model.base_model) is hf.GPT2Model
    assert model.base_model not in recorded._KNOWN
    assert type(model.base_model.h[2].mlp.act) is type(ACT2FN["gelu_new"])
    for other in ("bert", "ddl"):
        kept = copy.deepcopy(built(other))
        with quickened(kept):
            assert type(kept.base_model) is type(built(other).base_model)
