"""Text written, filled in and embedded; weights rounded, moved, copied and compiled."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import transformers
from transformers import AutoModel, TextStreamer, pipeline

from habits.subjects import TEXT, habit, same
from pnn.export.run import export_run


@habit("`model.generate(**tokenizer(text))`, also in padded batches", encoders=None)
def generates(subject):
    model, tokenizer = subject.load(), subject.tokenizer
    alone = model.generate(**tokenizer(TEXT, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    ids = tokenizer.convert_tokens_to_ids(TEXT.split())
    assert alone[0, : len(ids)].tolist() == ids  # nothing closes the prompt
    both = model.generate(**subject.inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(both[0], alone[0])
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == model.generation_config.eos_token_id


@habit('`pipeline("text-generation")`', encoders=None)
def generating_pipeline(subject):
    made = pipeline("text-generation", model=str(subject.folder), device="cpu")(TEXT, max_new_tokens=3, do_sample=False)
    text = made[0]["generated_text"]
    assert text.startswith(TEXT + " ")
    assert 0 < len(text[len(TEXT) :].split()) <= 3
    ids = subject.load().generate(**subject.tokenizer(TEXT, return_tensors="pt"), max_new_tokens=3, do_sample=False)[0]
    assert text.split() == subject.tokenizer.decode(ids, skip_special_tokens=True).split()


@habit("beams, a streamer, `inputs_embeds`, scores, attentions and hidden states of `generate`", encoders=None)
def generating_details(subject):
    model, inputs = subject.load(), {key: value[:1] for key, value in subject.inputs.items()}
    length = inputs["input_ids"].shape[1]
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    assert model.generate(**inputs, num_beams=2, **settings).shape == (1, length + 3)
    assert model.generate(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]), **settings).shape == (1, 3)
    heard = io.StringIO()
    streamer = TextStreamer(subject.tokenizer, skip_prompt=True)
    streamer.on_finalized_text = lambda text, stream_end=False: heard.write(text)
    ids = model.generate(**inputs, streamer=streamer, **settings)
    assert heard.getvalue().split() == subject.tokenizer.decode(ids[0, length:]).split()
    asked = {"output_attentions": True, "output_hidden_states": True}
    out = model.generate(**inputs, **settings, **asked, return_dict_in_generate=True, output_scores=True)
    assert len(out.scores) == 3
    whole = model(out.sequences[:, :-1], **asked)
    for step in (1, 2):  # one token at a time sees what it would see in the whole text
        for one, all_of_it in zip(out.attentions[step], whole.attentions, strict=True):
            assert same(one[0, :, 0], all_of_it[0, :, length + step - 1, : length + step])
        for one, all_of_it in zip(out.hidden_states[step], whole.hidden_states, strict=True):
            assert same(one[0, 0], all_of_it[0, length + step - 1])


@habit("`generate(assistant_model=…)`", encoders=None, decoders="assisted decoding requires a cache")
def assisted(subject):
    subject.load().generate(**subject.tokenizer(TEXT, return_tensors="pt"), assistant_model=subject.load(), max_new_tokens=3)


@habit('`pipeline("fill-mask")`', decoders=None)
def fills(subject):
    words = TEXT.split()
    guesses = pipeline("fill-mask", model=str(subject.folder), device="cpu")(" ".join([*words[:3], "[MASK]", *words[4:]]))
    assert len(guesses) == 5
    assert guesses[0]["score"] > guesses[1]["score"]


@habit('`pipeline("feature-extraction")`')
def features(subject):
    found = pipeline("feature-extraction", model=str(subject.folder), tokenizer=subject.tokenizer, device="cpu")(TEXT)
    expected = subject.load(AutoModel)(**subject.tokenizer(TEXT, return_tensors="pt")).last_hidden_state
    assert same(torch.tensor(found), expected)


@habit("`SentenceTransformer(folder)` of an exported encoder", decoders=None)
def sentences(subject):
    library = pytest.importorskip("sentence_transformers", reason="`make habits` installs it: large, and nothing else needs it")
    folder = subject.folder.parent / "exported"
    if not folder.exists():
        export_run(str(subject.folder), folder)
    model = library.SentenceTransformer(str(folder), device="cpu")
    vectors = torch.tensor(model.encode([TEXT, TEXT.split()[0]]))
    with torch.no_grad():
        states = subject.load(AutoModel)(**subject.inputs).last_hidden_state
    keep = subject.inputs["attention_mask"][..., None]
    assert same(vectors, (states * keep).sum(1) / keep.sum(1))
    assert model.max_seq_length == 32


@habit("torchao int8: `quantize_`, and `quantization_config=TorchAoConfig(…)` to `from_pretrained`")
@torch.no_grad()
def int8(subject):
    pytest.importorskip("torchao", reason="`make habits` installs it: it comes built for one torch")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    inputs, exact = subject.inputs, subject.load()
    by_transformers = subject.load(quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig()))
    quantised = [by_transformers]
    for config in (Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()):
        quantised.append(subject.load())
        quantize_(quantised[-1], config)
    wanted = exact(**inputs).logits[inputs["attention_mask"].bool()]
    for model in quantised:
        found = model(**inputs).logits[inputs["attention_mask"].bool()]
        assert 0 < (found - wanted).norm() < 0.1 * wanted.norm()


@habit("bf16 and fp16: `dtype=…`, `model.half()`")
@torch.no_grad()
def half(subject):
    for dtype in (torch.bfloat16, torch.float16):
        logits = subject.load(dtype=dtype)(**subject.inputs).logits
        assert logits.dtype == dtype
        assert torch.isfinite(logits).all()
    assert subject.load().half().dtype == torch.float16


@habit('`device_map="auto"`')
@torch.no_grad()
def device_map(subject):
    assert same(subject.load(device_map="auto")(**subject.inputs).logits, subject.load()(**subject.inputs).logits)


@habit("`resize_token_embeddings`")
def resized(subject):
    model = subject.load()
    size = model.config.vocab_size + 8
    model.resize_token_embeddings(size)
    assert model(**subject.inputs).logits.shape[-1] == size


@habit("`pickle`, `copy.deepcopy`")
@torch.no_grad()
def pickled(subject):
    model = subject.load()
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(twin) is type(model)
        assert torch.equal(twin(**subject.inputs).logits, model(**subject.inputs).logits)


@habit("`torch.compile(model)`, also with attentions")
@torch.no_grad()
def compiled(subject):
    model = subject.load()
    plain = model(**subject.inputs, output_attentions=True)
    out = torch.compile(model, backend="eager")(**subject.inputs, output_attentions=True)
    assert same(out.logits, plain.logits)
    assert all(map(same, out.attentions, plain.attentions))


@habit("`torch.export.export(model)`")
@torch.no_grad()
def exported(subject):
    model, ids = subject.load().eval(), subject.inputs["input_ids"]
    program = torch.export.export(model, (), {"input_ids": ids})
    assert same(program.module()(input_ids=ids).logits, model(ids).logits)
