"""What a model gives out, which attention it takes, and how the Trainer trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, DataCollatorForLanguageModeling, Trainer, TrainingArguments

import pnn
from habits.subjects import LINES, Subject, habit, same
from pnn.models.plastic import PlasticConfig
from pnn.models.registry import distinct_blocks


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
        assert isinstance(trainer.model(**batch, return_dict=False), tuple)
    assert reported == pytest.approx(torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()).item(), rel=1e-4)
    learnt = trainer.model.train()(**batch)
    assert same(learnt.loss, learnt.last_loss) == ("BERT" in subject.name)  # a PNN still learns from all its steps
