"""Filling in [MASK]: packed and sorted, yet what the model says about each text alone; every refused text is named."""

import itertools
import random

import pytest
import torch
from transformers import pipeline

import pnn
from pnn.cli.tables import print_filled
from pnn.data import synthetic
from pnn.data.tokenizers import of_synthetic_language
from pnn.errors import UserError
from pnn.evaluation import fill as module
from pnn.evaluation.fill import fill
from pnn.models.loading import load_run

SIZES = {
    "vocab_size": 80,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}


def build(kind):
    torch.manual_seed(3)
    if kind == "pnn":
        return pnn.PNNForMaskedLM(pnn.PNNConfig(**SIZES, zero_init=False, dropout=0.5)).eval()
    return pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig(**SIZES, num_hidden_layers=3, dropout=0.5)).eval()


@pytest.fixture(params=["pnn", "bert"])
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def tokenizer():
    return of_synthetic_language(64)


@pytest.fixture(scope="module")
def texts():
    """Sixty texts of 1 to 30 words, a few of them with more than one mask."""
    draw = random.Random(0)
    out = []
    for paragraph in itertools.islice(synthetic.paragraphs(60, seed=5), 60):
        words = paragraph.split()[: draw.randrange(1, 31)]
        for place in draw.sample(range(len(words)), min(len(words), draw.choice([1, 1, 1, 2, 4]))):
            words[place] = "[MASK]"
        out.append(" ".join(words))
    return out


@torch.no_grad()
def alone(model, tokenizer, text, **changes):
    """Probabilities at a text's masks after every step, (steps + 1, masks, vocabulary): padded, one text, all logits."""
    inputs = tokenizer(text, return_tensors="pt")
    out = model(**inputs, output_states=True, **changes)
    at = inputs["input_ids"][0] == tokenizer.mask_token_id
    by_step = torch.stack([model.head(h)[0, at] for h in out.states])
    assert torch.equal(by_step[-1], out.logits[0, at])
    return by_step.softmax(-1)


@pytest.mark.parametrize("batch_tokens", [10, 200, 16384])
def test_every_prediction_is_that_of_the_text_alone(model, tokenizer, texts, batch_tokens, monkeypatch):
    """Whatever shares its batch and its block: here blocks of 25 texts, and logits of 3 masks at a time."""
    monkeypatch.setattr(module, "BLOCK_TEXTS", 25)
    monkeypatch.setattr(module, "HEAD_ROWS", 3)
    results = list(fill(model, tokenizer, texts, top=80, by_step=True, batch_tokens=batch_tokens))
    assert [result["text"] for result in results] == texts
    for text, result in zip(texts, results, strict=True):
        expected = alone(model, tokenizer, text)
        assert len(result["predictions"]) == len(result["by_step"]) == text.split().count("[MASK]") == expected.shape[1]
        for mask, predictions in enumerate(result["predictions"]):
            ids = tokenizer.convert_tokens_to_ids([p["token"] for p in predictions])
            found = torch.tensor([p["probability"] for p in predictions])
            assert sorted(ids) == list(range(80))
            assert torch.allclose(found, expected[-1, mask, ids], atol=1e-5)
        for mask, steps in enumerate(result["by_step"]):
            best = expected[:, mask].max(-1)
            assert [p["token"] for p in steps] == tokenizer.convert_ids_to_tokens(best.indices.tolist())
            assert [p["probability"] for p in steps] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_the_best_come_first_and_are_the_same_whatever_top_is(model, tokenizer, texts):
    everything = list(fill(model, tokenizer, texts, top=80))
    for few, all_of_them in zip(fill(model, tokenizer, texts, top=3), everything, strict=True):
        assert "by_step" not in few
        for three, eighty in zip(few["predictions"], all_of_them["predictions"], strict=True):
            assert three == eighty[:3]
            probabilities = [p["probability"] for p in eighty]
            assert probabilities == sorted(probabilities, reverse=True)
            assert sum(probabilities) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("kind", "steps"), [("pnn", 0), ("pnn", 2), ("pnn", 7), ("bert", 0), ("bert", 2)])
def test_steps_are_a_dial(kind, steps, tokenizer, texts):
    model = build(kind)
    for text, result in zip(texts, fill(model, tokenizer, texts, top=1, num_steps=steps, by_step=True), strict=True):
        expected = alone(model, tokenizer, text, num_steps=steps)[-1].max(-1)
        best = [predictions[0] for predictions in result["predictions"]]
        assert [p["token"] for p in best] == tokenizer.convert_ids_to_tokens(expected.indices.tolist())
        assert [p["probability"] for p in best] == pytest.approx(expected.values.tolist(), abs=1e-5)
        assert [rewritten[-1] for rewritten in result["by_step"]] == best
        assert {len(rewritten) for rewritten in result["by_step"]} == {steps + 1}


def test_the_pipeline_of_transformers_says_the_same(model, tokenizer, texts):
    theirs = pipeline("fill-mask", model=model, tokenizer=tokenizer)
    for text, result in zip(texts, fill(model, tokenizer, texts, top=2), strict=True):
        answer = theirs(text, top_k=2)
        answers = [answer] if len(result["predictions"]) == 1 else answer
        for expected, found in zip(answers, result["predictions"], strict=True):
            assert [p["token"] for p in found] == [e["token_str"] for e in expected]
            assert [p["probability"] for p in found] == pytest.approx([e["score"] for e in expected], abs=1e-5)


def test_texts_are_read_a_block_at_a_time_and_predictions_come_before_the_end(model, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_TEXTS", 10)
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield "the [MASK] of avon"

    results = fill(model, tokenizer, endless())
    assert next(results)["text"] == "the [MASK] of avon"
    assert len(read) == 20  # a second block is under way when the first is put into words


def test_a_model_in_training_mode_is_left_in_it_and_answers_without_dropout(model, tokenizer, texts):
    expected = list(fill(model, tokenizer, texts))
    model.train()
    assert list(fill(model, tokenizer, texts)) == expected
    assert model.training


def test_a_tokenizer_saved_with_truncation_cuts_nothing_off(model, tokenizer):
    cutting = of_synthetic_language(64)
    cutting.backend_tokenizer.enable_truncation(5)
    text = "the fox of avon wore amber hats . it has old [MASK] boots ."
    assert list(fill(model, cutting, [text])) == list(fill(model, tokenizer, [text]))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("the fox of avon", r"text 31 has no \[MASK\]"),
        ("the [mask] of avon", r"text 31 has no \[MASK\]"),
        ("", "text 31 is empty"),
        (" \t ", "text 31 is empty"),
        ("fox " * 62 + "[MASK]", "text 31 has 65 tokens, but the model takes 64"),
        ("[MASK] " + "fox " * 62, "text 31 has 65 tokens, but the model takes 64"),
        ("the \udcff [MASK]", "text 31 is not valid UTF-8"),
    ],
)
def test_a_text_that_cannot_be_filled_is_named(model, tokenizer, wrong, says, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_TEXTS", 20)
    good = "fox " * 61 + "[MASK]"  # 64 tokens with their frame: just fits
    with pytest.raises(UserError, match=says):
        list(fill(model, tokenizer, [*[good] * 30, wrong, good, ""]))


def test_no_text_at_all_and_a_senseless_top(model, tokenizer):
    with pytest.raises(UserError, match="empty"):
        list(fill(model, tokenizer, []))
    for top in (0, -1, 81):
        with pytest.raises(UserError, match=f"--top {top}"):
            list(fill(model, tokenizer, ["[MASK]"], top=top))
    nameless = of_synthetic_language(64)
    nameless.mask_token = None
    with pytest.raises(UserError, match="no mask token"):
        list(fill(model, nameless, ["[MASK]"]))


def test_words_outside_the_vocabulary_are_counted(model, tokenizer, capsys):
    known, strange = fill(model, tokenizer, ["the fox [MASK] .", "the zebra of Zanzibar [MASK] ."])
    assert "unknown" not in known
    assert strange["unknown"] == 2
    print_filled(known, "step", [1])
    assert "vocabulary" not in capsys.readouterr().out
    print_filled(strange, "step", [1])
    assert "2 words of it are not in the model's vocabulary" in capsys.readouterr().out


def test_steps_that_were_not_trained_to_be_read_are_grey(model, tokenizer, capsys):
    (filled,) = fill(model, tokenizer, ["the fox [MASK] ."], by_step=True)
    steps = len(filled["by_step"][0]) - 1
    print_filled(filled, "step", range(1, steps + 1))
    assert "grey" not in capsys.readouterr().out
    print_filled(filled, "step", [steps])
    assert "grey: steps that were not trained to be read" in capsys.readouterr().out


def test_a_run_is_loaded_with_its_own_tokenizer(trained_run):
    loaded = load_run(trained_run)
    text = "the fox of avon wore amber hats . it has old [MASK] boots ."
    (result,) = fill(loaded.model, loaded.tokenizer, [text], top=1)
    theirs = pipeline("fill-mask", model=str(trained_run / "checkpoints" / "best"))
    assert result["predictions"][0][0]["token"] == theirs(text)[0]["token_str"]
