"""Evaluation: the same masks for every model and batch size, numbers that match a plain computation, honest intervals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pnn
from pnn.cli import tables
from pnn.config import DataConfig
from pnn.data import synthetic
from pnn.data.masking import SpecialTokens, content_keys, select
from pnn.data.shards import prepare
from pnn.evaluation.masked import evaluate_masked
from pnn.models.loading import load_model

BOX = Path(__file__).parents[2] / "models" / "pnn-base"


@pytest.fixture(scope="module")
def prepared(prepared_folder):
    data = DataConfig(synthetic_paragraphs=400, validation_sequences=60, max_length=64, prepared=str(prepared_folder))
    return prepare(data, lambda items, _: items)


def tiny(**changes):
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "initializer_range": 0.3, "zero_init": False}
    return pnn.PNNForMaskedLM(pnn.PNNConfig(**({"vocab_size": 80, "max_position_embeddings": 64} | sizes | changes)))


def test_numbers_equal_a_plain_computation(prepared):
    """One sequence at a time, padded path, masks drawn here: the same accuracy and loss at every step."""
    model = tiny().eval()
    result = evaluate_masked(model, prepared.validation, prepared.validation_sequences, mask_seed=5)
    special = SpecialTokens(prepared.tokenizer.mask_token_id, 80, tuple(prepared.tokenizer.all_special_ids))
    right, loss, targets = np.zeros(5), np.zeros(5), 0
    for index in prepared.validation_sequences:
        ids = prepared.validation.take(np.array([index]))
        keys = torch.from_numpy(np.repeat(content_keys(ids, np.array([len(ids)])), len(ids)))
        tokens = torch.from_numpy(ids)
        chosen = select(tokens, keys, torch.arange(len(ids)), special, 0.15, 5)
        with torch.no_grad():
            states = model(torch.where(chosen, special.mask, tokens)[None], output_states=True).states
        for step, state in enumerate(states):
            logits = model.head(state[0, chosen])
            right[step] += int((logits.argmax(-1) == tokens[chosen]).sum())
            loss[step] += F.cross_entropy(logits, tokens[chosen], reduction="sum").item()
        targets += int(chosen.sum())
    assert result["targets"] == targets
    assert result["accuracy_by_step"] == pytest.approx(list(right / targets))
    assert result["loss_by_step"] == pytest.approx(list(loss / targets), rel=1e-4)
    assert result["gain_over_first_step"]["value"] == pytest.approx((right[-1] - right[1]) / targets)


def test_batch_size_changes_nothing(prepared):
    model = tiny()
    results = [
        evaluate_masked(model, prepared.validation, prepared.validation_sequences, batch_tokens=tokens)
        for tokens in (64, 300, 100_000)
    ]
    for other in results[1:]:
        assert other["targets"] == results[0]["targets"]
        assert other["accuracy_by_step"] == results[0]["accuracy_by_step"]
        assert other["ceiling"] == pytest.approx(results[0]["ceiling"])


def test_several_draws_are_those_of_this_seed_and_the_next(prepared):
    def evaluated(**how):
        return evaluate_masked(tiny(), prepared.validation, prepared.validation_sequences, **how)["by_sequence"]

    first, second, both = evaluated(mask_seed=5), evaluated(mask_seed=6), evaluated(mask_seed=5, mask_draws=2)
    assert first["targets"] != second["targets"]
    for key in ("targets", "correct"):
        assert both[key] == [a + b for a, b in zip(first[key], second[key], strict=True)]


def test_every_model_is_asked_the_same(prepared):
    bert = pnn.BertBaselineConfig(
        vocab_size=80,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=16,
        num_hidden_layers=2,
        max_position_embeddings=64,
    )
    models = (tiny(), tiny(num_steps=2), pnn.BertBaselineForMaskedLM(bert))
    results = [evaluate_masked(model, prepared.validation, prepared.validation_sequences) for model in models]
    assert len({(r["targets"], r["ceiling"]) for r in results}) == 1
    assert [len(r["accuracy_by_step"]) for r in results] == [5, 3, 3]


def test_always_guessing_the_commonest_token_is_scored_on_the_same_targets(prepared):
    """A model that says nothing but this token is right as often."""
    model = tiny()
    found = evaluate_masked(model, prepared.validation, prepared.validation_sequences)["commonest"]
    guess = prepared.tokenizer.convert_tokens_to_ids(found["token"])
    with torch.no_grad():
        model.head.decoder.weight.zero_()
        model.head.decoder.bias.zero_()
        model.head.decoder.bias[guess] = 1.0
    assert evaluate_masked(model, prepared.validation, prepared.validation_sequences)["accuracy"] == found["accuracy"]
    assert 0 < found["accuracy"] < 1


def test_kinds_add_up_to_the_whole(prepared):
    result = evaluate_masked(tiny(), prepared.validation, prepared.validation_sequences)
    kinds = result["by_kind"].values()
    assert sum(kind["targets"] for kind in kinds) == result["targets"]
    assert sum(kind["share"] for kind in kinds) == pytest.approx(1)
    for whole, part in (("accuracy", "accuracy"), ("ceiling", "ceiling")):
        assert sum(kind["share"] * kind[part] for kind in kinds) == pytest.approx(result[whole])


def test_a_model_in_training_mode_is_left_in_it(prepared):
    model = tiny(dropout=0.5).train()
    once = evaluate_masked(model, prepared.validation, prepared.validation_sequences)
    assert model.training
    assert once == evaluate_masked(model, prepared.validation, prepared.validation_sequences)  # no dropout in between


def test_command_writes_what_it_prints_and_takes_other_text(pnn_command, trained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    (tmp_path / "other.txt").write_text("the fox of avon wore amber hats . it has old amber boots .\n" * 20)
    code, out, err = pnn_command("evaluate", run, "--data", tmp_path / "other.txt", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result == json.loads((run / "evaluation.json").read_text())
    other = result["sets"][str(tmp_path / "other.txt")]
    assert other["sequences"] == 20
    code, out, err = pnn_command("evaluate", run)
    assert code == 0, err
    assert f"{100 * result['accuracy']:.1f}" in out
    before = (run / "evaluation.json").read_text()
    code, out, err = pnn_command("evaluate", run, "--num-steps", 2, "--json")
    assert code == 0, err
    assert json.loads((run / "evaluation_num_steps_2.json").read_text()) == json.loads(out)
    assert (run / "evaluation.json").read_text() == before
    best = run / "checkpoints" / "best"
    code, out, err = pnn_command("evaluate", best.resolve(), "--num-steps", 6, "--json")
    assert code == 0, err
    assert len(json.loads(out)["accuracy_by_step"]) == 7


def test_of_many_steps_a_table_shows_some(trained_run, monkeypatch):
    drawn = []
    monkeypatch.setattr(tables, "show", drawn.append)
    result = json.loads((trained_run / "evaluation.json").read_text())
    tables.print_evaluation({"run": result | {"accuracy_by_step": [0.5] * 1001, "sets": {}}})
    headers = [column.header for column in drawn[0].columns]
    assert headers[:13] == ["text", "0", "1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "end"]


def test_averaged_weights_have_a_row_of_their_own(pnn_command, tiny_config, tmp_path):
    config = tiny_config(training={"max_steps": 4, "average_decay": 0.9})
    for words in (("train", config, "--output", tmp_path / "run"), ("evaluate", tmp_path / "run")):
        code, out, err = pnn_command(*words)
        assert code == 0, err
        result = json.loads((tmp_path / "run" / "evaluation.json").read_text())
        (row,) = (line for line in out.splitlines() if "averaged weights" in line)
        assert f"{100 * result['average']['accuracy']:.1f}" in row


def test_only_texts_with_a_known_best_have_that_column(pnn_command, trained_run, tmp_path):
    (tmp_path / "other.txt").write_text("the fox of avon wore amber hats . it has old amber boots .\n" * 20)
    bare = shutil.copytree((trained_run / "checkpoints" / "best").resolve(), tmp_path / "bare")
    assert "best possible" not in pnn_command("evaluate", bare, "--data", tmp_path / "other.txt")[1]


def test_a_missing_weight_is_an_error_not_a_random_number(trained_run, tmp_path):
    from safetensors.torch import load_file, save_file

    from pnn.errors import UserError

    shutil.copytree((trained_run / "checkpoints" / "best").resolve(), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["encoder.refiners.0.gate.query.weight"]
    (tmp_path / "model" / "checksums.json").unlink()
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"gate\.query\.weight"):
        load_model(tmp_path / "model")


def test_the_ceiling_is_left_out_where_it_does_not_apply(prepared_folder):
    """Paragraphs cut short, or another tokenizer: no ceiling and no kinds, instead of wrong ones."""
    for changes in ({"max_length": 16}, {"tokenizer": str(BOX)}):
        data = DataConfig(**({"synthetic_paragraphs": 60, "validation_sequences": 20, "max_length": 64} | changes))
        data.prepared = str(prepared_folder)
        cut = prepare(data, lambda items, _: items)
        model = tiny(vocab_size=len(cut.tokenizer))
        result = evaluate_masked(model, cut.validation, cut.validation_sequences)
        assert result["targets"] > 0
        assert "ceiling" not in result
        assert "by_kind" not in result


def test_the_harder_corpus_has_its_own_ceiling_and_kinds(prepared_folder):
    data = DataConfig(train="synthetic_hard", synthetic_paragraphs=60, validation_sequences=30, max_length=64)
    data.prepared = str(prepared_folder)
    hard = prepare(data, lambda items, _: items)
    lang = synthetic.language("synthetic_hard")
    assert len(hard.tokenizer) == len(lang.words)
    result = evaluate_masked(tiny(vocab_size=len(lang.words)), hard.validation, hard.validation_sequences, mask_probability=0.3)
    targets, best = np.zeros(len(synthetic.KINDS)), 0.0
    special = SpecialTokens(hard.tokenizer.mask_token_id, len(lang.words), tuple(hard.tokenizer.all_special_ids))
    for index in hard.validation_sequences:
        ids = hard.validation.take(np.array([index]))
        keys = torch.from_numpy(np.repeat(content_keys(ids, np.array([len(ids)])), len(ids)))
        chosen = select(torch.from_numpy(ids), keys, torch.arange(len(ids)), special, 0.3, 0).numpy()
        targets += np.bincount(lang.kind_of_word[ids[chosen]], minlength=len(targets))
        best += synthetic.best_prediction_probability(ids[1:-1], chosen[1:-1], "synthetic_hard").sum()
    assert result["ceiling"] == pytest.approx(best / targets.sum())
    assert {kind: one["targets"] for kind, one in result["by_kind"].items()} == dict(zip(synthetic.KINDS, targets, strict=True))
