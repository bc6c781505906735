"""Deep Delta decoders: published sizes, generation with and without cache, padding, and what a closed gate leaves."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, DynamicCache, Trainer, TrainingArguments, pipeline

import pnn
from pnn.config import load_config, shipped_configs
from pnn.data.tokenizers import of_synthetic_language
from pnn.models.ddl_cache import DDLCache
from pnn.models.ddl_steps import Steps, capacity_for
from pnn.models.sections import build_model, model_config
from pnn.nn.delta_rule import DeltaResidual

SMALL = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 40}
VARIANTS = {
    "additive": {"residual": "additive", "value_channels": 1},
    "scalar": {"value_channels": 1},
    "token, repeated": {"compressor": "token", "expand_input": False},
    "token": {"compressor": "token"},
    "channel, repeated": {"expand_input": False},
    "channel": {},
    "write only": {"residual": "write_only"},
    "write only, scalar": {"residual": "write_only", "value_channels": 1},
    "additive, expanded": {"residual": "additive"},
    "additive, token": {"residual": "additive", "compressor": "token"},
    "paper": {"reading": "paper"},
    "paper, token": {"reading": "paper", "compressor": "token"},
    "long kernels": {"compressor": "token", "compressor_kernel_size": 7, "expansion_kernel_size": 6, "value_channels": 3},
}
every_variant = pytest.mark.parametrize("name", VARIANTS)
PUBLISHED = {  # row → parameters of the small and the medium size, from the paper's architecture
    "additive": (123_590_400, 353_508_352),
    "scalar": (123_627_312, 353_606_752),
    "token_repeated": (123_842_476, 354_164_052),
    "token": (123_854_764, 354_180_436),
    "channel_repeated": (123_722_668, 353_856_852),
    "": (123_734_956, 353_873_236),
}


def build(name, **more):
    torch.manual_seed(0)
    model = pnn.DDLForCausalLM(pnn.DDLConfig(**(SMALL | VARIANTS[name] | more))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def tokens(rows, length, seed=0):
    return torch.randint(0, SMALL["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "counts"), PUBLISHED.items())
@pytest.mark.parametrize("size", ["small", "medium"])
def test_the_published_rows_have_their_published_sizes(row, counts, size):
    config = load_config(f"ddl_{size}" + (f"_{row}" if row else ""))
    with torch.device("meta"):
        model = build_model(model_config(config.model))
    assert sum(p.numel() for p in model.parameters()) == counts[size == "medium"]


def test_the_default_config_is_the_papers_ddl():
    with torch.device("meta"):
        assert sum(p.numel() for p in pnn.DDLForCausalLM(pnn.DDLConfig()).parameters()) == 123_734_956


@pytest.mark.parametrize("size", ["small", "medium", "mini"])
def test_rows_of_a_size_differ_in_their_residual_stream_alone(size):
    base = load_config(f"ddl_{size}")
    for name in shipped_configs():
        if name.startswith(f"ddl_{size}_"):
            config = load_config(name)
            assert (config.data, config.training, config.evaluation) == (base.data, base.training, base.evaluation)
            changed = {key for key, value in config.model.items() if base.model[key] != value}
            assert changed <= {"residual", "value_channels", "compressor", "expand_input"}


# Generation -----------------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("length", [1, 2, 3, 17])
def test_cached_decoding_is_the_full_forward(name, length):
    model, ids = build(name), tokens(2, length + 6)
    full = model(ids).logits
    out = model(ids[:, :length])
    steps = [out.logits]
    for at in (length, length + 1, length + 2):
        out = model(ids[:, at : at + 1], past_key_values=out.past_key_values)
        steps.append(out.logits)
    steps.append(model(ids[:, length + 3 :], past_key_values=out.past_key_values).logits)  # several tokens at once
    assert (torch.cat(steps, 1) - full).abs().max() < 1e-4


@every_variant
@pytest.mark.parametrize("length", [1, 3])
def test_greedy_text_is_the_same_with_and_without_cache(name, length):
    model, ids = build(name), tokens(2, length)
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


@every_variant
def test_left_padding_changes_nothing(name):
    model = build(name)
    prompts = [tokens(1, n, seed=n) for n in (1, 4, 9)]
    longest = 9
    ids = torch.cat([F.pad(p, (longest - p.shape[1], 0), value=3) for p in prompts])
    mask = torch.cat([F.pad(torch.ones_like(p), (longest - p.shape[1], 0)) for p in prompts])
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, **settings)
    logits = model(ids, attention_mask=mask).logits
    for row, prompt in enumerate(prompts):
        assert torch.equal(together[row, longest:], model.generate(prompt, **settings)[0, prompt.shape[1] :])
        assert torch.allclose(logits[row, longest - prompt.shape[1] :], model(prompt).logits[0], atol=1e-5)


@pytest.mark.parametrize("name", ["token", "channel", "additive"])
def test_beams_and_samples_reorder_every_part_of_the_cache(name):
    model, ids = build(name), tokens(2, 3)
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, "num_return_sequences": 2, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


@every_variant
@pytest.mark.parametrize("padding", [0, 3])
@torch.no_grad()
def test_a_step_on_buffers_is_the_models_own_step(name, padding):
    """What is recorded on a GPU, computed here as it is: with room for more tokens, and back again."""
    model, ids = build(name), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    first = {"input_ids": ids[:, :5], "attention_mask": mask[:, :5]}
    cache, twin = (model(**first).past_key_values for _ in range(2))
    steps = Steps(cache, capacity_for(6, 12))
    steps.take(cache, mask[:, :5].bool())
    cache.forget()
    cache.steps = steps
    for at in range(5, 9):
        steps.feed(ids[:, at : at + 1], None, None)
        expected = model(ids[:, at : at + 1], attention_mask=mask[:, : at + 1], past_key_values=twin).logits
        assert cache.get_seq_length() == twin.get_seq_length()
        assert torch.allclose(steps.run(model), expected, atol=1e-5)
    rest = {"input_ids": ids[:, 9:], "attention_mask": mask}  # three tokens at once: the cache takes everything back
    copied = copy.deepcopy(cache)  # as does a copy
    ours, again, theirs = (model(**rest, past_key_values=one).logits for one in (cache, copied, twin))
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert torch.allclose(again, theirs, atol=1e-5)
    assert cache.steps is None
    assert steps.owner is None


def test_buffers_have_room_and_never_more_than_the_model_takes():
    assert [capacity_for(tokens, 1024) for tokens in (1, 128, 129, 500, 1000)] == [256, 256, 512, 1024, 1024]


@pytest.mark.parametrize("padding", [0, 2])
def test_generating_asks_once_whether_there_is_padding(padding, monkeypatch):
    """Asking waits for a GPU: once for the prompt, never for a token."""
    model, ids = build("channel"), tokens(2, 4)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    asked, everything = [], torch.Tensor.all
    monkeypatch.setattr(torch.Tensor, "all", lambda x, *rest: asked.append(x.shape) or everything(x, *rest))
    model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert ids.shape in asked
    assert not any(shape[-1] > 4 for shape in asked if len(shape) == 2)


def test_a_cache_can_be_chosen_from_repeated_and_reset():
    model, ids = build("token"), tokens(3, 5)
    cache = model(ids).past_key_values
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 5]))  # rows 0, 1, 2 again
    again = model(tokens(3, 6)[:, 5:], past_key_values=cache).logits
    assert torch.allclose(again, model(torch.cat((ids, tokens(3, 6)[:, 5:]), 1)).logits[:, -1:], atol=1e-5)
    with pytest.raises(NotImplementedError, match="cannot be cut back"):
        cache.crop(-1)


def test_histories_keep_a_few_tokens_and_not_the_whole_prompt():
    cache = build("token")(tokens(2, 30)).past_key_values
    assert len(cache.histories) == 2 * 2 + 2  # two a block, the input's and the readout's
    for history in cache.histories.values():
        assert history.shape[1] == 3
        assert history.untyped_storage().nbytes() == history.nbytes


def test_a_cache_without_histories_is_refused():
    with pytest.raises(ValueError, match="give it a DDLCache, not a DynamicCache"):
        build("token")(tokens(1, 3), past_key_values=DynamicCache())


def test_logits_to_keep_gives_the_last_rows():
    model, ids = build("channel"), tokens(2, 7)
    full = model(ids).logits
    assert torch.equal(model(ids, logits_to_keep=2).logits, full[:, -2:])
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, full[:, [1, 4]])


# What the model computes ----------------------------------------------------------------------------------------------


@every_variant
def test_no_token_sees_the_future(name):
    model, ids = build(name), tokens(1, 12)
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % SMALL["vocab_size"]
    moved = (model(ids).logits - model(changed).logits).abs().amax(-1)[0] > 1e-7
    assert not moved[:7].any()
    assert moved[7:].all()


@pytest.mark.parametrize("name", [name for name, changes in VARIANTS.items() if changes.get("residual") != "additive"])
def test_shut_gates_leave_the_embeddings_read_out(name):
    """To the bit: the network is embed, expand, compress, normalise, head, whatever its branches say."""
    model, ids = build(name), tokens(2, 9)
    inner = model.model
    read_out = model.head(inner.norm(inner.readout(inner.expand(inner.embeddings(ids)))))
    assert (model(ids).logits - read_out).abs().max() > 0.1  # gates as they are
    for module in model.modules():
        if isinstance(module, DeltaResidual):
            module.gate.bias.data.fill_(-1000.0)
    out = model(ids, output_gates=True)
    assert not any(gate.any() for gate in out.gates)
    assert torch.equal(out.logits, read_out)


def test_states_and_gates_come_on_request():
    model, ids = build("channel"), tokens(2, 5)
    assert model(ids).states is None
    out = model(ids, output_states=True, output_gates=True)
    assert [tuple(state.shape) for state in out.states] == [(2, 5, 4, 16)] * 3
    assert [tuple(gate.shape) for gate in out.gates] == [(2, 5)] * 4
    assert all(((gate > 0) & (gate < 2)).all() for gate in out.gates)
    assert len(model.model.blocks[0].attention_residual._forward_hooks) == 0


def test_the_loss_is_the_next_tokens_cross_entropy():
    model, ids = build("channel"), tokens(3, 8)
    labels = ids.clone()
    labels[0, :4] = -100
    logits = model(ids).logits
    wanted = F.cross_entropy(logits[:, :-1].reshape(-1, 60), labels[:, 1:].reshape(-1), ignore_index=-100)
    assert model(ids, labels=labels).loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    assert model(ids, labels=ids, num_items_in_batch=7).loss.item() == pytest.approx(
        F.cross_entropy(logits[:, :-1].reshape(-1, 60), ids[:, 1:].reshape(-1), reduction="sum").item() / 7, abs=1e-5
    )
    assert model(ids, labels=ids, output_logits=False).logits is None


def test_initial_values_are_those_of_the_published_code():
    torch.manual_seed(0)
    model = pnn.DDLForCausalLM(pnn.DDLConfig(**(SMALL | {"hidden_size": 256, "num_hidden_layers": 4})))
    block = model.model.blocks[0]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.5 / 16, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.5 / 16 / 2, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.5 / 16 / 2, rel=0.05)
    assert block.compress.kernel.std().item() == pytest.approx(0.5 / 16, rel=0.15)
    assert torch.equal(block.compress.read, torch.full((4,), 0.25))
    assert model.model.embeddings.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention_residual.gate.bias.item() == 0.0
    assert 0 < block.attention_residual.value.bias.abs().max().item() <= 1 / 16
    e = torch.randn(2, 5, 256)
    assert torch.equal(model.model.expand(e), e.unsqueeze(2).expand(-1, -1, 4, -1))  # starts as a repetition
    low = pnn.DDLForCausalLM(pnn.DDLConfig(**SMALL, beta_init=0.1))
    assert 2 * torch.sigmoid(low.model.blocks[0].mlp_residual.gate.bias).item() == pytest.approx(0.1)


def test_attention_is_what_its_equation_says():
    model = build("additive")
    attention, c = model.model.blocks[0].attention, torch.randn(1, 6, 16)
    heads, width = 2, 8
    q, k, v = attention.qkv(c).view(1, 6, 3, heads, width).unbind(2)
    angle = torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)

    def rotated(x):
        out = torch.empty_like(x)
        out[..., :4] = x[..., :4] * angle.cos()[:, None] - x[..., 4:] * angle.sin()[:, None]
        out[..., 4:] = x[..., 4:] * angle.cos()[:, None] + x[..., :4] * angle.sin()[:, None]
        return out

    def normed(x, weight):
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    q, k = normed(rotated(q), attention.query_norm.weight), normed(rotated(k), attention.key_norm.weight)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(width)
    scores = scores.masked_fill(~torch.ones(6, 6).tril().bool(), -math.inf)
    wanted = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(1, 6, 16)
    context = None

    def keep(module, args):
        nonlocal context
        context = args[1]

    handle = attention.register_forward_pre_hook(keep)
    model(tokens(1, 6), use_cache=False)
    handle.remove()
    assert torch.allclose(attention(c, context), attention.out(wanted), atol=1e-5)


# Around the model -----------------------------------------------------------------------------------------------------


@every_variant
def test_a_saved_model_comes_back_identical_and_generates(name, tmp_path):
    model, ids = build(name), tokens(2, 6)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is pnn.DDLForCausalLM
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.head.weight is again.model.embeddings.weight


def test_the_text_generation_pipeline_reads_a_saved_folder(tmp_path):
    tokenizer = of_synthetic_language(40)
    model = build("channel", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    write = pipeline("text-generation", model=str(tmp_path))
    assert len(write("the fox", max_new_tokens=3, do_sample=False)[0]["generated_text"].split()) >= 2


def test_hf_trainer_trains(tmp_path):
    model = build("channel").train()
    rows = [{"input_ids": row, "labels": row} for row in tokens(16, 10)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=8,
        per_device_train_batch_size=4,
        report_to=[],
        learning_rate=1e-2,
        use_cpu=True,
        logging_steps=1,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"value_channels": 0}, "value_channels=0, but at least one is needed"),
        ({"residual": "rewrite"}, "residual='rewrite' is none of delta, write_only, additive"),
        ({"compressor": "tokens"}, "compressor='tokens' is none of channel, token"),
        ({"reading": "text"}, "reading='text' is none of code, paper"),
        ({"compressor_kernel_size": 41}, "compressor_kernel_size=41 is longer than the context of 40 tokens"),
        ({"expansion_kernel_size": 0}, "expansion_kernel_size=0, but at least one is needed"),
        ({"beta_init": 2.5}, "beta_init=2.5 does not lie between 0 and 2"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=16"),
        ({"num_attention_heads": 16}, "heads of 1 numbers cannot be rotated"),
    ],
)
def test_impossible_configs_raise(wrong, message):
    with pytest.raises(StrictDataclassError) as error:
        pnn.DDLConfig(**(SMALL | wrong))
    assert message in str(error.value.__cause__ or error.value)


def test_too_much_and_too_little_text_raise():
    model = build("channel")
    with pytest.raises(ValueError, match="a sequence of 41 tokens, but the model takes 40"):
        model(tokens(1, 41))
    with pytest.raises(ValueError, match="empty prompt"):
        model(torch.empty(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    out = model(tokens(1, 40))
    assert isinstance(out.past_key_values, DDLCache)
    with pytest.raises(ValueError, match="a sequence of 41 tokens"):
        model(tokens(1, 1), past_key_values=out.past_key_values)
