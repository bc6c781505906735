"""Decoders of transformers' own, trained by our loss instead of theirs: the same numbers, and no logits."""

import copy

import pytest
import torch
import transformers as hf

from pnn.models.lean import leave_out_logits, padded_vocabulary, with_logits_again
from pnn.objectives import IGNORE

SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 37}
CONFIGS = {
    "gpt2": hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=37, n_positions=16, bos_token_id=0, eos_token_id=0),
    "opt": hf.OPTConfig(  # as OPT-350M: a narrower vocabulary, and a projection between it and the last state
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, vocab_size=37,
        word_embed_proj_dim=8, do_layer_norm_before=False,
    ),
    "llama": hf.LlamaConfig(**SIZE, num_key_value_heads=1, tie_word_embeddings=True),
}  # fmt: skip
CAPPED = hf.Gemma2Config(**SIZE, num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.5)


def decoder(config):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # fresh weights predict every token alike
    return model


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    out = model(use_cache=False, **inputs)
    out.loss.backward()
    return out, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("targets", [None, 50], ids=["their mean", "of 50"])
def test_loss_and_gradients_are_those_of_transformers(name, targets):
    model = decoder(CONFIGS[name])
    rows = torch.randint(37, (3, 9))
    mask = torch.ones_like(rows)
    mask[1, :4] = 0
    inputs = {"input_ids": rows, "attention_mask": mask, "labels": rows.masked_fill(mask == 0, IGNORE)}
    inputs |= {} if targets is None else {"num_items_in_batch": targets}
    plain, wanted = loss_and_gradients(model, **inputs)
    leave_out_logits(model)
    lean, found = loss_and_gradients(model, **inputs)
    assert lean.logits is None
    torch.testing.assert_close(lean.loss, plain.loss)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_without_labels_nothing_changes():
    model, rows = decoder(CONFIGS["gpt2"]), torch.randint(37, (2, 5))
    logits, text = model(rows).logits, model.generate(rows, max_new_tokens=4, do_sample=False)
    leave_out_logits(model)
    assert torch.equal(model(rows).logits, logits)
    assert torch.equal(model.generate(rows, max_new_tokens=4, do_sample=False), text)
    with_logits_again(model)
    assert model(rows, labels=rows).logits.shape == (2, 5, 37)


def test_a_copy_computes_with_its_own_weights():
    model, rows = decoder(CONFIGS["llama"]), torch.randint(37, (2, 5))
    leave_out_logits(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(rows, labels=rows).loss.item() == pytest.approx(torch.tensor(37.0).log().item())
    assert model(rows, labels=rows).loss.item() != pytest.approx(other(rows, labels=rows).loss.item(), abs=0.01)


def test_a_model_that_caps_its_logits_keeps_its_own_loss():
    model, rows = decoder(CAPPED), torch.randint(37, (2, 5))
    wanted = model(rows, labels=rows).loss
    leave_out_logits(model)
    out = model(rows, labels=rows)
    assert out.logits is not None
    assert torch.equal(out.loss, wanted)


PADDED = {
    "gpt2": lambda: decoder(CONFIGS["gpt2"]),
    "llama": lambda: decoder(CONFIGS["llama"]),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZE)).eval(),
    "bert, untied": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZE, tie_word_embeddings=False)).eval(),
}


@pytest.mark.parametrize("name", PADDED)
def test_a_padded_head_gives_the_same_logits_and_more(monkeypatch, name):
    model, rows = PADDED[name](), torch.randint(37, (2, 5))
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))  # its tensors stay where they are
    plain, before, generator = model(rows).logits, dict(model.named_parameters()), torch.get_rng_state()
    with padded_vocabulary(model):
        padded = model(rows).logits
    assert padded.shape == (2, 5, 128)
    torch.testing.assert_close(padded[..., :37], plain)
    assert not padded[..., 37:].any()
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert torch.equal(torch.get_rng_state(), generator)  # nothing is drawn, so nothing is filled with random numbers


def test_padding_is_for_gpus_and_leaves_a_model_as_it_was():
    model, rows = decoder(CONFIGS["gpt2"]), torch.randint(37, (2, 5))
    head = model.get_output_embeddings()
    with padded_vocabulary(model):
        assert model(rows).logits.shape == (2, 5, 37)
    assert model.get_output_embeddings() is head


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_on_a_gpu_padded_logits_are_the_same(name):
    model, rows = decoder(CONFIGS[name]).cuda(), torch.randint(37, (2, 5), device="cuda")
    head, plain = model.get_output_embeddings(), model(rows).logits
    with padded_vocabulary(model):
        padded = model(rows).logits
    assert padded.shape == (2, 5, 128)
    assert model.get_output_embeddings() is head
    torch.testing.assert_close(padded[..., :37], plain, rtol=1e-4, atol=1e-5)
