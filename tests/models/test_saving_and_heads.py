"""Models are saved and loaded, carry heads for classes and choices, and work with transformers' own tools."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_models import CONFIGS, SMALL, build, count, every_model, masked_lm, shake, some_batch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
)

import pnn
from pnn.data import synthetic
from pnn.data.tokenizers import of_synthetic_language
from pnn.errors import UserError
from pnn.models.loading import load_model

# Saving and loading ---------------------------------------------------------------------------------------------------


@every_model
def test_a_saved_model_comes_back_identical_through_the_auto_class(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert not loaded.training
    ids, mask, packed, borders = some_batch()
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, loaded(ids, attention_mask=mask).logits)
        before, after = model(packed, cu_seqlens=borders).logits, loaded(packed, cu_seqlens=borders).logits
        assert torch.equal(before, after)
    assert count(loaded) == count(model)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()


def test_tied_weights_stay_tied_and_are_saved_once(tmp_path):
    model = build("pnn_tied")
    model.save_pretrained(tmp_path)
    vocabulary = [key for key, value in load_file(tmp_path / "model.safetensors").items() if value.shape == (60, 16)]
    assert vocabulary == ["encoder.embeddings.token.weight"]
    for each in (model, AutoModelForMaskedLM.from_pretrained(tmp_path)):
        assert each.head.decoder.weight is each.encoder.embeddings.token.weight
    untied = build("pnn_equations")
    assert untied.head.decoder.weight is not untied.encoder.embeddings.token.weight


def test_every_head_loads_through_its_auto_class(tmp_path):
    for name in ("pnn_equations", "bert"):
        build(name).save_pretrained(tmp_path / name)
        bert = name == "bert"
        for auto, expected in (
            (AutoModel, pnn.BertBaselineModel if bert else pnn.PNNModel),
            (AutoModelForSequenceClassification, type(classifier(name))),
            (AutoModelForMultipleChoice, type(chooser(name))),
        ):
            assert type(auto.from_pretrained(tmp_path / name)) is expected


def test_load_model_refuses_weights_that_are_missing_or_of_another_size(tmp_path):
    model = build("pnn_equations")
    model.save_pretrained(tmp_path)
    assert torch.equal(load_model(tmp_path).head.decoder.weight, model.head.decoder.weight)
    text = (tmp_path / "config.json").read_text(encoding="utf-8")
    config = json.loads(text)
    config |= {"num_steps": 4, "schedule": [0, 1, 0, 1]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match="missing keys"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(text.replace('"vocab_size": 60', '"vocab_size": 61'), encoding="utf-8")
    with pytest.raises(UserError, match=r"the weights are not those of the architecture|cannot load"):
        load_model(tmp_path)


def test_load_model_of_a_damaged_or_missing_folder_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="cannot load a model"):
        load_model(tmp_path / "nothing")
    build("pnn_equations").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot load a masked language model"):
        load_model(tmp_path)


def test_a_model_loaded_with_another_number_of_steps_can_be_saved(tmp_path):
    build("pnn_equations").save_pretrained(tmp_path / "four")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "four", num_steps=6)
    model.save_pretrained(tmp_path / "six")
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "six").config.num_steps == 6


@pytest.mark.parametrize("name", ["pnn_equations", "pnn_tied", "bert"])
def test_token_embeddings_can_be_resized(name):
    model = build(name)
    ids, mask, _, _ = some_batch()
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits
        model.resize_token_embeddings(67, mean_resizing=False)
        after = model(ids, attention_mask=mask).logits
    assert model.config.vocab_size == 67
    assert after.shape == (*ids.shape, 67)
    assert torch.allclose(before, after[..., :60], atol=1e-5)
    assert model.head.decoder.bias.shape == (67,)
    assert (model.head.decoder.weight is model.encoder.embeddings.token.weight) == (name == "pnn_tied")
    assert torch.isfinite(model(input_ids=torch.full((1, 3), 66), labels=torch.full((1, 3), 66)).loss)


# The other heads ------------------------------------------------------------------------------------------------------


def classifier(name, **more):
    config = CONFIGS[name](**more)
    torch.manual_seed(0)
    return shake(
        pnn.BertBaselineForSequenceClassification(config) if name == "bert" else pnn.PNNForSequenceClassification(config)
    )


def chooser(name):
    config = CONFIGS[name]()
    torch.manual_seed(0)
    return shake(pnn.BertBaselineForMultipleChoice(config) if name == "bert" else pnn.PNNForMultipleChoice(config))


both_kinds = pytest.mark.parametrize("name", ["pnn_equations", "bert"])


@both_kinds
def test_the_classifier_reads_the_first_tokens_last_state(name):
    model = classifier(name, num_labels=3)
    ids, mask, _, _ = some_batch()
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, token_type_ids=torch.ones_like(ids), output_states=True)
        assert out.logits.shape == (4, 3)
        assert out.loss is None
        assert torch.allclose(out.logits, model.classifier(out.states[-1][:, 0]), atol=1e-6)
        shorter = model(input_ids=ids, attention_mask=mask, num_steps=1).logits
        assert torch.allclose(shorter, model.classifier(out.states[1][:, 0]), atol=1e-6)
        changed = ids.clone()
        changed[mask == 0] = 3
        assert torch.allclose(model(input_ids=changed, attention_mask=mask).logits, out.logits, atol=1e-6)


@both_kinds
def test_classification_losses_equal_those_computed_by_hand(name):
    ids, mask, _, _ = some_batch()
    call = {"input_ids": ids, "attention_mask": mask}

    model = classifier(name, num_labels=3)
    labels = torch.tensor([0, 2, 1, 1])
    out = model(**call, labels=labels)
    by_hand = -torch.stack([row.softmax(0)[label].log() for row, label in zip(out.logits, labels, strict=True)]).mean()
    assert torch.allclose(out.loss, by_hand, atol=1e-5)

    targets = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    out = model(**call, labels=targets)
    p = out.logits.sigmoid()
    assert torch.allclose(out.loss, -(targets * p.log() + (1 - targets) * (1 - p).log()).mean(), atol=1e-5)

    model = classifier(name, num_labels=1)
    scores = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for given_labels in (scores, scores[:, None]):
        out = model(**call, labels=given_labels)
        assert torch.allclose(out.loss, sum((out.logits[i, 0] - scores[i]) ** 2 for i in range(4)) / 4, atol=1e-5)

    model = classifier(name, num_labels=3, problem_type="regression")
    out = model(**call, labels=targets)
    assert torch.allclose(out.loss, ((out.logits - targets) ** 2).mean(), atol=1e-5)


@both_kinds
def test_multiple_choice_scores_each_candidate_alone(name):
    model = chooser(name)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 60, (2, 3, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[:, 1, 4:] = 0
    labels = torch.tensor([2, 0])
    out = model(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids), labels=labels)
    assert out.logits.shape == (2, 3)
    by_hand = -torch.stack([out.logits[i].log_softmax(0)[label] for i, label in enumerate(labels)]).mean()
    assert torch.allclose(out.loss, by_hand, atol=1e-5)
    with torch.no_grad():
        swapped = model(input_ids=ids[:, [2, 1, 0]], attention_mask=mask[:, [2, 1, 0]]).logits
        assert torch.allclose(swapped, out.logits[:, [2, 1, 0]], atol=1e-6)
        elsewhere = (one.transpose(0, 1).contiguous().transpose(0, 1) for one in (ids, mask))  # not row after row in memory
        assert torch.allclose(model(*elsewhere).logits, out.logits, atol=1e-6)
        changed = ids.clone()
        changed[mask == 0] = 3
        assert torch.allclose(model(input_ids=changed, attention_mask=mask).logits, out.logits, atol=1e-6)


@both_kinds
@pytest.mark.parametrize("kind", ["single_label", "regression", "multi_label", "choice"])
def test_a_few_sgd_steps_lower_a_heads_loss(name, kind):
    ids, mask, _, _ = some_batch((7, 12, 3, 9))
    call = {"input_ids": ids, "attention_mask": mask}
    if kind == "choice":
        model = chooser(name)
        call = {"input_ids": ids.view(2, 2, -1), "attention_mask": mask.view(2, 2, -1)}
        labels = torch.tensor([1, 0])
    else:
        model = classifier(name, num_labels={"single_label": 2, "regression": 1, "multi_label": 3}[kind])
        labels = {
            "single_label": torch.tensor([0, 1, 1, 0]),
            "regression": torch.tensor([0.5, -1.0, 2.0, 0.0]),
            "multi_label": torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]),
        }[kind]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(10):
        loss = model(**call, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@both_kinds
def test_heads_started_from_a_masked_model_keep_its_encoder(name, tmp_path):
    source = build(name)
    source.save_pretrained(tmp_path)
    encoder = source.encoder.state_dict()
    for auto, more in (
        (AutoModelForSequenceClassification, {"num_labels": 3}),
        (AutoModelForMultipleChoice, {}),
    ):
        model = auto.from_pretrained(tmp_path, **more)
        loaded = model.encoder.state_dict()
        assert loaded.keys() == encoder.keys()
        assert all(torch.equal(loaded[key], encoder[key]) for key in encoder)
        assert model.classifier.weight.std() > 0
        assert torch.isfinite(model.classifier.weight).all()
        assert torch.count_nonzero(model.classifier.bias) == 0


# The Hugging Face ecosystem -------------------------------------------------------------------------------------------


def language_model(name):
    tokenizer = of_synthetic_language(32)
    torch.manual_seed(0)
    model = masked_lm(CONFIGS[name]().__class__(**SMALL | {"vocab_size": len(tokenizer), "max_position_embeddings": 32}))
    return model, tokenizer


@both_kinds
def test_the_fill_mask_pipeline_reads_a_saved_folder(name, tmp_path):
    model, tokenizer = language_model(name)
    shake(model).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert not list(Path(tmp_path).glob("*.bin"))
    words = next(synthetic.paragraphs(1, seed=0)).split()
    words[4] = "[MASK]"
    guesses = pipeline("fill-mask", model=str(tmp_path), device="cpu")(" ".join(words))
    with torch.no_grad():
        logits = model(**tokenizer(" ".join(words), return_tensors="pt")).logits[0, 5]
    top = logits.softmax(0).topk(5)
    assert [guess["token"] for guess in guesses] == top.indices.tolist()
    assert [guess["score"] for guess in guesses] == pytest.approx(top.values.tolist(), rel=1e-4)
    assert [guess["token_str"] for guess in guesses] == [synthetic.language().words[i] for i in top.indices]


@both_kinds
@pytest.mark.parametrize("with_token_types", [False, True])
def test_the_hugging_face_trainer_trains(name, with_token_types, tmp_path):
    model, tokenizer = language_model(name)
    examples = [dict(tokenizer(line, return_token_type_ids=with_token_types)) for line in synthetic.paragraphs(40, seed=1)]
    assert ("token_type_ids" in examples[0]) == with_token_types
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=5,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=examples,
        eval_dataset=examples[:8],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 5
    # every target counts once: the loss logged at the start is the loss of a uniform guess, not twice or half of it
    assert losses[0] == pytest.approx(math.log(len(tokenizer)), rel=0.1)
    assert losses[-1] < losses[0] - 0.2
    assert math.isfinite(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("head", ["PNNForSequenceClassification", "BertBaselineForMultipleChoice"])
def test_hf_trainer_trains_the_other_heads_too(head, tmp_path):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model_class = getattr(pnn, head)
    model = model_class(model_class.config_class(vocab_size=20, hidden_size=8, num_attention_heads=2, intermediate_size=8))
    shape = (3, 6) if "Choice" in head else (6,)
    rows = [{"input_ids": torch.randint(5, 20, shape), "labels": torch.tensor(i % 2)} for i in range(8)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    outcome = Trainer(model, arguments, train_dataset=rows).train()
    assert math.isfinite(outcome.training_loss)


@pytest.mark.parametrize("num_steps", [None, 0, 1])
@pytest.mark.parametrize("kind", ["pnn", "bert"])
def test_a_classifier_reads_the_first_token_alone_and_gives_the_same_logits(kind, num_steps):
    """Of the last step only what it reads is computed, unless states are asked for."""
    size = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "initializer_range": 0.2}
    torch.manual_seed(0)
    if kind == "pnn":
        config = pnn.PNNConfig(**size, zero_init=False)
        models = pnn.PNNForSequenceClassification(config), pnn.PNNForMultipleChoice(config)
    else:
        config = pnn.BertBaselineConfig(**size, num_hidden_layers=2)
        models = pnn.BertBaselineForSequenceClassification(config), pnn.BertBaselineForMultipleChoice(config)
    ids = torch.randint(5, 50, (4, 9))
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1], [7]])).long()
    for model, shape in zip(models, ((4, 9), (2, 2, 9)), strict=True):
        inputs = {"input_ids": ids.view(shape), "attention_mask": mask.view(shape), "num_steps": num_steps}
        whole = model.eval()(**inputs, output_states=True)
        torch.testing.assert_close(model(**inputs).logits, whole.logits)
        read = model.classifier(whole.states[-1][:, 0]).view_as(whole.logits)
        torch.testing.assert_close(whole.logits, read)
        assert len({round(value, 4) for value in whole.logits.flatten().tolist()}) > 1
