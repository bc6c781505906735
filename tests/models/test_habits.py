"""What people do with models of Hugging Face, done with each of ours: it works, or is refused in a sentence. The table of
docs/howto/huggingface.md is made from what stands here."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_models import SMALL, shake
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    TextStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)

import pnn
from pnn.data import synthetic
from pnn.data.tokenizers import of_synthetic_language
from pnn.export.run import export_run
from pnn.models.loading import save_tokenizer
from pnn.models.plastic import PlasticConfig
from pnn.models.registry import distinct_blocks

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "huggingface.md"
LINES = list(synthetic.paragraphs(8, seed=0))
TEXT = " ".join(LINES[0].split()[:6])
REORGANISED = ["PNN", "BERT baseline", "DDL"]
PROJECTIONS = ["qkv", "out", "up", "down"]


def is_decoder(name: str) -> bool:
    return "DDL" in name or "causal" in name


@dataclass
class Subject:
    """A model in a folder, with its tokenizer."""

    name: str
    folder: Path

    @property
    def causal(self) -> bool:
        return is_decoder(self.name)

    @property
    def reorganised(self) -> bool:
        return self.name.startswith("reorganised")

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Two texts, the shorter one padded."""
        return dict(self.tokenizer([TEXT, TEXT[: TEXT.index(" ")]], padding=True, return_tensors="pt"))

    def load(self, auto: Any = None, **options: Any) -> Any:
        return (auto or (AutoModelForCausalLM if self.causal else AutoModelForMaskedLM)).from_pretrained(self.folder, **options)

    def labels(self) -> torch.Tensor:
        inputs = self.inputs
        return torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], -100)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory) -> dict[str, Subject]:
    tokenizer = of_synthetic_language(32)
    size = SMALL | {"vocab_size": len(tokenizer), "max_position_embeddings": 32, "dropout": 0.1}
    ends = {"pad_token_id": 0, "bos_token_id": tokenizer.sep_token_id, "eos_token_id": tokenizer.sep_token_id}
    decoder = {key: value for key, value in size.items() if key != "dropout"} | ends
    torch.manual_seed(0)
    models = {
        "PNN": pnn.PNNForMaskedLM(pnn.PNNConfig(**size, schedule=[0, 1, 0])),
        "BERT baseline": pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig(**size, num_hidden_layers=3)),
        "DDL": pnn.DDLForCausalLM(pnn.DDLConfig(**decoder, num_hidden_layers=2, compressor="token")),
        "causal PNN": pnn.PNNForCausalLM(pnn.PNNCausalConfig(**size | ends, schedule=[0, 1, 0], initializer_range=0.2)),
    }
    models |= {f"reorganised {name}": pnn.plasticity.prune(shake(models[name]), [(0, 1)]) for name in REORGANISED}
    found = {}
    for name, model in models.items():
        folder = tmp_path_factory.mktemp("habits") / name.replace(" ", "_")
        model.save_pretrained(folder)
        save_tokenizer(tokenizer, model, folder)
        found[name] = Subject(name, folder)
    return found


# The habits -----------------------------------------------------------------------------------------------------------

WORKS = "works"


@dataclass
class Habit:
    does: Callable[[Subject], None]
    encoders: str | None  # WORKS, what the refusal says, or None where nobody would try
    decoders: str | None


HABITS: dict[str, Habit] = {}


def habit(name: str, encoders: str | None = WORKS, decoders: str | None = WORKS) -> Callable[..., Any]:
    def add(does: Callable[[Subject], None]) -> Callable[[Subject], None]:
        HABITS[name] = Habit(does, encoders, decoders)
        return does

    return add


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-5)


@habit("Auto classes (config, tokenizer, body, language model) and `save_pretrained`")
@torch.no_grad()
def auto_classes(subject):
    model, again = subject.load(), subject.folder.parent / "saved_again"
    config = AutoConfig.from_pretrained(subject.folder)
    assert type(config) is (PlasticConfig if subject.reorganised else type(model.config))  # what is left of which model
    body = AutoModel.from_pretrained(subject.folder)
    wanted = model(**subject.inputs, output_hidden_states=True)
    assert same(body(**subject.inputs).last_hidden_state, wanted.hidden_states[-1])
    model.save_pretrained(again)
    subject.tokenizer.save_pretrained(again)
    twin = Subject(subject.name, again)
    assert torch.equal(twin.load()(**twin.inputs).logits, wanted.logits)


@habit("`output_hidden_states=True`, in the call or in the config")
@torch.no_grad()
def hidden_states(subject):
    model, inputs = subject.load(), subject.inputs
    out = model(**inputs, output_hidden_states=True, output_states=True)
    assert len(out.hidden_states) == len(out.states)
    assert {tuple(h.shape) for h in out.hidden_states} == {(*inputs["input_ids"].shape, 16)}
    assert same(model.get_output_embeddings()(out.hidden_states[-1]), out.logits)
    if not subject.causal:
        assert all(map(torch.equal, out.hidden_states, out.states))
    assert "hidden_states" not in model(**inputs)
    model.config.output_hidden_states = True
    assert same(model(**inputs).hidden_states[1], out.hidden_states[1])


@habit('`output_attentions=True`, with any `attn_implementation`; in the config with `"eager"`')
@torch.no_grad()
def attentions(subject):
    model, inputs = subject.load(), subject.inputs
    out = model(**inputs, output_attentions=True)
    applied = getattr(model.config, "schedule", None) or range(model.config.num_hidden_layers)
    left = [block.attention.num_heads for block in distinct_blocks(model)]
    assert (1 in left) == subject.reorganised
    length = inputs["input_ids"].shape[1]
    assert [tuple(one.shape) for one in out.attentions] == [(2, left[block], length, length) for block in applied]
    padding = inputs["attention_mask"] == 0
    for one in out.attentions:
        assert same(one.sum(-1), torch.ones(one.shape[:-1]))
        seen = one.permute(0, 2, 1, 3)[~padding]  # by real tokens
        hidden = padding.repeat_interleave((~padding).sum(1), 0)[:, None].expand_as(seen)
        assert (seen[hidden] == 0).all()
    assert same(out.logits, model(**inputs).logits)
    eager = subject.load(attn_implementation="eager")
    eager.config.output_attentions = True
    assert all(map(same, eager(**inputs).attentions, out.attentions))


@habit("`return_dict=False`, in the call or in the config")
def return_dict(subject):
    model, inputs = subject.load(), subject.inputs
    named = model(**inputs, labels=subject.labels())
    for out in (
        model(**inputs, labels=subject.labels(), return_dict=False),
        subject.load(return_dict=False)(**inputs, labels=subject.labels()),
    ):
        assert isinstance(out, tuple)
        assert torch.equal(out[0], named.loss)
        assert torch.equal(out[1], named.logits)
    (last,) = subject.load(AutoModel)(**inputs, return_dict=False)
    assert last.shape == (*inputs["input_ids"].shape, 16)


@habit('`attn_implementation="sdpa"` or `"eager"`, `set_attn_implementation`')
@torch.no_grad()
def attention_names(subject):
    inputs, model = subject.inputs, subject.load()
    for name in ("sdpa", "eager"):
        assert same(subject.load(attn_implementation=name)(**inputs).logits, model(**inputs).logits)
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name


CHOOSES = "chooses its fast attention by itself"


@habit('`attn_implementation="flash_attention_2"`', CHOOSES, CHOOSES)
def flash_attention(subject):
    subject.load(attn_implementation="flash_attention_2")


@habit('`attn_implementation="flex_attention"`', CHOOSES, CHOOSES)
def flex_attention(subject):
    subject.load().set_attn_implementation("flex_attention")


@habit("`gradient_checkpointing_enable()`")
def checkpointing(subject):
    grads, calls = [], []
    for kind in (None, False, True):
        model = subject.load().train()
        if kind is not None:
            model.gradient_checkpointing_enable({"use_reentrant": kind})
            assert model.is_gradient_checkpointing
        counted = []
        distinct_blocks(model)[0].attention.register_forward_hook(lambda *_, counted=counted: counted.append(1))
        torch.manual_seed(1)  # dropout
        with_cache = {"use_cache": True} if subject.causal else {}
        model(**subject.inputs, labels=subject.labels(), output_attentions=True, **with_cache).loss.backward()
        grads.append([p.grad for p in model.parameters()])
        calls.append(len(counted))
    assert calls[1] == calls[2] == 2 * calls[0]  # computed again
    for plain, *others in zip(*grads, strict=True):
        assert all(same(plain, other) for other in others)


def trained(subject, tmp: Path, **options: Any) -> Trainer:
    """By HF Trainer, two updates."""
    collate = DataCollatorForLanguageModeling(subject.tokenizer, mlm=not subject.causal, mlm_probability=0.3, seed=0)
    settings = {"max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    callbacks = options.pop("callbacks", None)
    trainer = Trainer(
        subject.load(),
        TrainingArguments(str(tmp), disable_tqdm=True, logging_steps=1, **settings, **options),
        train_dataset=[dict(subject.tokenizer(line, truncation=True)) for line in LINES],
        eval_dataset=[dict(subject.tokenizer(line, truncation=True)) for line in LINES],
        data_collator=collate,
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


@habit("HF `Trainer`, also with `gradient_checkpointing=True`")
def trainer_flag(subject):
    losses = []
    for flag in (False, True):
        trainer = trained(subject, subject.folder.parent / "trainer", gradient_checkpointing=flag)
        assert trainer.model.is_gradient_checkpointing == flag
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@habit("`out.last_loss` beside the weighted `out.loss`", decoders=None)
def last_loss(subject):
    out = subject.load()(**subject.inputs, labels=subject.labels())
    by_hand = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), subject.labels().flatten())
    assert same(out.last_loss, by_hand)
    assert same(out["last_loss"], out.step_losses[-1])
    assert same(out.loss, out.last_loss) == ("BERT" in subject.name)


@habit("`Trainer(…, callbacks=[pnn.LastLoss()])`: `eval_loss` is the last step's", decoders=None)
def last_loss_in_trainer(subject):
    trainer = trained(subject, subject.folder.parent / "trainer", per_device_eval_batch_size=8, callbacks=[pnn.LastLoss()])
    batches, collate = [], trainer.data_collator
    trainer.data_collator = lambda rows: batches.append(collate(rows)) or batches[-1]
    reported = trainer.evaluate()["eval_loss"]
    (batch,) = batches
    with torch.no_grad():
        logits = trainer.model(**batch).logits.flatten(0, 1)
    assert reported == pytest.approx(torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()).item(), rel=1e-4)
    learnt = trainer.model.train()(**batch)
    assert same(learnt.loss, learnt.last_loss) == ("BERT" in subject.name)  # a PNN still learns from all its steps


# Heads


def learns(model, inputs, **targets) -> None:
    """A few updates lower the loss."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(**inputs, **targets).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def keeps_layers(subject, model) -> None:
    weights = subject.load().base_model.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in model.base_model.state_dict().items())


@habit('`AutoModelForSequenceClassification`, `pipeline("text-classification")`')
def sequence_classification(subject):
    model, inputs = subject.load(AutoModelForSequenceClassification, num_labels=3).eval(), subject.inputs
    keeps_layers(subject, model)
    out = model(**inputs, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == len(out.attentions) + 1
    head = model.score if subject.causal else model.classifier
    last = out.hidden_states[-1][torch.arange(2), -1 if subject.causal else 0]  # padding lies on the left of a decoder's text
    assert same(out.logits, head(last))
    alone = model(**subject.tokenizer(TEXT, return_tensors="pt")).logits
    assert same(alone, out.logits[:1])
    learns(model, inputs, labels=torch.tensor([2, 0]))
    found = pipeline("text-classification", model=model.eval(), tokenizer=subject.tokenizer)(TEXT)
    assert found[0]["label"] == "LABEL_2"


@habit('`AutoModelForTokenClassification`, `pipeline("token-classification")`', decoders="AutoModelForTokenClassification")
def token_classification(subject):
    model, inputs = subject.load(AutoModelForTokenClassification, num_labels=3).eval(), subject.inputs
    keeps_layers(subject, model)
    labels = torch.where(inputs["attention_mask"].bool(), inputs["input_ids"] % 3, -100)
    out = model(**inputs, labels=labels, output_hidden_states=True)
    assert same(out.logits, model.classifier(out.hidden_states[-1]))
    real = labels != -100
    assert same(out.loss, -out.logits[real].log_softmax(-1)[torch.arange(int(real.sum())), labels[real]].mean())
    learns(model, inputs, labels=labels)
    found = pipeline("token-classification", model=model.eval(), tokenizer=subject.tokenizer, ignore_labels=[])(TEXT)
    assert [one["word"] for one in found] == TEXT.split()


@habit("`AutoModelForQuestionAnswering`", decoders="AutoModelForQuestionAnswering")
def question_answering(subject):
    model, inputs = subject.load(AutoModelForQuestionAnswering).eval(), subject.inputs
    keeps_layers(subject, model)
    length = inputs["input_ids"].shape[1]
    positions = {"start_positions": torch.tensor([2, 1]), "end_positions": torch.tensor([4, length + 3])}  # the last was cut
    out = model(**inputs, **positions)
    starts, ends = out.start_logits.log_softmax(-1), out.end_logits.log_softmax(-1)
    by_hand = -((starts[0, 2] + starts[1, 1]) / 2 + ends[0, 4]) / 2
    assert out.start_logits.shape == out.end_logits.shape == (2, length)
    assert same(out.loss, by_hand)
    learns(model, inputs, **positions)
    assert model.eval()(**inputs).start_logits.argmax(-1).tolist() == [2, 1]


@habit("`AutoModelForMultipleChoice`", decoders="AutoModelForMultipleChoice")
def multiple_choice(subject):
    model, inputs = subject.load(AutoModelForMultipleChoice), subject.inputs
    choices = {key: value[None] for key, value in inputs.items()}
    learns(model, choices, labels=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"shape \(batch, choices, length\), not \(2, "):
        model(**inputs)


# PEFT


def adapted(subject, auto, task: str | None, **inputs: Any) -> None:
    """LoRA: it learns, its adapter loads again, and merging changes nothing."""
    peft = pytest.importorskip("peft", reason="in the extra dev")
    folder = subject.folder.parent / f"adapter_{task}"

    def read(model) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(**subject.inputs)[0]

    torch.manual_seed(0)
    model = peft.get_peft_model(subject.load(auto), peft.LoraConfig(task_type=task, r=2, target_modules=PROJECTIONS))
    before = read(model)
    if inputs:
        learns(model, subject.inputs, **inputs)
    else:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_()
    assert not same(read(model), before)
    frozen = dict(model.get_base_model().named_parameters())
    assert not frozen[next(name for name in frozen if name.endswith("qkv.base_layer.weight"))].requires_grad
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(subject.load(auto), folder)
    assert same(read(again), read(model))
    merged = again.merge_and_unload()
    assert torch.allclose(read(merged), read(model), atol=1e-3)
    merged.save_pretrained(folder / "merged")
    assert torch.equal(read(auto.from_pretrained(folder / "merged")), read(merged))


@habit("PEFT LoRA, `SEQ_CLS`: train, save, load, merge")
def lora_for_sequences(subject):
    adapted(subject, AutoModelForSequenceClassification, "SEQ_CLS", labels=torch.tensor([1, 0]))


@habit("PEFT LoRA, `TOKEN_CLS`", decoders=None)
def lora_for_tokens(subject):
    adapted(subject, AutoModelForTokenClassification, "TOKEN_CLS", labels=subject.inputs["input_ids"] % 2)


@habit("PEFT LoRA, `QUESTION_ANS`", decoders=None)
def lora_for_questions(subject):
    places = torch.tensor([1, 0])
    adapted(subject, AutoModelForQuestionAnswering, "QUESTION_ANS", start_positions=places, end_positions=places)


@habit("PEFT LoRA, `FEATURE_EXTRACTION`")
def lora_for_features(subject):
    adapted(subject, AutoModel, "FEATURE_EXTRACTION")


@habit("PEFT LoRA, masked model without a task type", decoders=None)
def lora_for_masks(subject):
    adapted(subject, AutoModelForMaskedLM, None, labels=subject.labels())


@habit("PEFT LoRA, `CAUSAL_LM`", encoders=None)
def lora_for_text(subject):
    adapted(subject, AutoModelForCausalLM, "CAUSAL_LM", labels=subject.labels())


@habit("PEFT with gradient checkpointing")
def lora_checkpointed(subject):
    peft = pytest.importorskip("peft", reason="in the extra dev")
    model = subject.load()
    model.gradient_checkpointing_enable()
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=PROJECTIONS)).train()
    model(**subject.inputs, labels=subject.labels()).loss.backward()
    grads = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert all(grad is not None for grad in grads)
    assert any(grad.abs().max() > 0 for grad in grads)


# Text


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


# Weights


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


# What is done with them -----------------------------------------------------------------------------------------------

NAMES = ["PNN", "BERT baseline", "DDL", "causal PNN", *(f"reorganised {name}" for name in REORGANISED)]
TRIED = [
    (name, subject)
    for name, one in HABITS.items()
    for subject in NAMES
    if (one.decoders if is_decoder(subject) else one.encoders) is not None
]


@pytest.mark.parametrize(("name", "subject"), TRIED)
def test_it_works_or_is_refused_in_a_sentence(name, subject, subjects):
    tried, one = HABITS[name], subjects[subject]
    said = tried.decoders if one.causal else tried.encoders
    if said == WORKS:
        tried.does(one)
        return
    with pytest.raises((ValueError, RuntimeError)) as refusal:
        tried.does(one)
    assert said in str(refusal.value).splitlines()[0]


def cell(said: str | None) -> str:
    if said is None:
        return "–"
    if said.startswith("AutoModel"):
        return "refused: no such head"
    return said if said == WORKS else f"refused: “{said}”"


def test_the_page_has_every_habit():
    rows = [f"| {name} | {cell(one.encoders)} | {cell(one.decoders)} |" for name, one in HABITS.items()]
    table = "\n".join(["| habit | PNN, BERT baseline | DDL, causal PNN |", "|---|---|---|", *rows])
    assert table in PAGE.read_text(encoding="utf-8"), f"the table of {PAGE.name} should be:\n\n{table}"


def test_a_forgotten_import_is_named_on_the_page(subjects):
    script = "import sys, transformers; transformers.AutoConfig.from_pretrained(sys.argv[1])"
    folder = str(subjects["PNN"].folder)
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, timeout=120)
    sentence = "but Transformers does not recognize this architecture"
    assert sentence in done.stderr
    assert sentence in PAGE.read_text(encoding="utf-8")
