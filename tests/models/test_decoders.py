"""What every decoder of ours does: generation with and without cache, padding, beams, causality, saving."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from small_decoders import CAUSAL_PNN, SMALL, build, every_decoder, tokens
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, pipeline

from pnn.data.tokenizers import of_synthetic_language
from pnn.models.decoder_cache import DecoderCache
from pnn.models.decoder_steps import Steps, capacity_for
from pnn.models.loading import save_tokenizer

one_of_each = pytest.mark.parametrize("name", ["channel", "PNN"])


@every_decoder
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
    assert (torch.cat(steps, 1) - full).abs().max() < 2e-5  # a token of the past moves logits of a causal PNN by 2e-4 and more


@every_decoder
@pytest.mark.parametrize("length", [1, 3])
def test_greedy_text_is_the_same_with_and_without_cache(name, length):
    model, ids = build(name), tokens(2, length)
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


@every_decoder
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


@pytest.mark.parametrize("name", ["token", "channel", "additive", "two rounds", *CAUSAL_PNN])
@pytest.mark.parametrize("padding", [0, 2])
def test_beams_and_samples_reorder_every_part_of_the_cache(name, padding):
    model, ids = build(name), tokens(2, 3 + padding)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, "num_return_sequences": 2, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_scores": True}  # some models write the same without what came before
    cached, full = (model.generate(ids, attention_mask=mask, use_cache=cache, **settings) for cache in (True, False))
    assert torch.equal(cached.sequences, full.sequences)
    assert torch.allclose(cached.sequences_scores, full.sequences_scores, atol=1e-5)
    alone = model.generate(ids[:1, padding:], attention_mask=mask[:1, padding:], **settings)
    assert torch.equal(cached.sequences[:2, padding:], alone.sequences)
    assert torch.allclose(cached.sequences_scores[:2], alone.sequences_scores, atol=1e-5)


@every_decoder
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


@one_of_each
@pytest.mark.parametrize("padding", [0, 2])
def test_generating_asks_once_whether_there_is_padding(name, padding, monkeypatch):
    """Asking waits for a GPU: once for the prompt, never for a token."""
    model, ids = build(name), tokens(2, 4)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    asked, everything = [], torch.Tensor.all
    monkeypatch.setattr(torch.Tensor, "all", lambda x, *rest: asked.append(x.shape) or everything(x, *rest))
    model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert ids.shape in asked
    assert not any(shape[-1] > 4 for shape in asked if len(shape) == 2)


@one_of_each
def test_logits_to_keep_gives_the_last_rows(name):
    model, ids = build(name), tokens(2, 7)
    full = model(ids).logits
    assert torch.equal(model(ids, logits_to_keep=2).logits, full[:, -2:])
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, full[:, [1, 4]])


@every_decoder
def test_no_token_sees_the_future(name):
    model, ids = build(name), tokens(1, 12)
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % SMALL["vocab_size"]
    moved = (model(ids).logits - model(changed).logits).abs().amax(-1)[0] > 1e-7
    assert not moved[:7].any()
    assert moved[7:].all()


@every_decoder
def test_a_saved_model_comes_back_identical_and_generates(name, tmp_path):
    model, ids = build(name), tokens(2, 6)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is type(model)
    assert torch.equal(again(ids).logits, model(ids).logits)
    tied = again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings


@one_of_each
def test_the_text_generation_pipeline_reads_a_saved_folder(name, tmp_path):
    tokenizer = of_synthetic_language(40)
    model = build(name, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    save_tokenizer(tokenizer, model, tmp_path)
    write = pipeline("text-generation", model=str(tmp_path))
    text = write("the fox", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert text.startswith("the fox")
    assert len(text.split()) > 2


@one_of_each
def test_hf_trainer_trains(name, tmp_path):
    model = build(name).train()
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


@one_of_each
def test_too_much_and_too_little_text_raise(name):
    model = build(name)
    with pytest.raises(ValueError, match="a sequence of 41 tokens, but the model takes 40"):
        model(tokens(1, 41))
    with pytest.raises(ValueError, match="empty prompt"):
        model(torch.empty(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    out = model(tokens(1, 40))
    assert isinstance(out.past_key_values, DecoderCache)
    with pytest.raises(ValueError, match="a sequence of 41 tokens"):
        model(tokens(1, 1), past_key_values=out.past_key_values)
