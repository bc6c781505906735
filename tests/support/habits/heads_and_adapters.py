"""Other heads on a model's layers, and LoRA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

from habits.subjects import TEXT, habit, same

PROJECTIONS = ["qkv", "out", "up", "down"]


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
