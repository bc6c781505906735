"""Comparing runs: planted differences are found and none is found where there is none; a report says the same of them."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import pnn
from pnn.config import EvaluationSet
from pnn.data import synthetic
from pnn.data.tokenizers import of_synthetic_language, trained_on
from pnn.errors import UserError
from pnn.evaluation.compare import _some, compare_runs
from pnn.evaluation.run import evaluate_run
from pnn.numbers import interval
from pnn.report.loading import load_runs
from pnn.report.page import write_report


def copy_of(run, target, change=None):
    """A run folder like another, its best checkpoint's weights changed."""
    shutil.copytree(run, target, symlinks=True)
    if change is not None:
        best = (target / "checkpoints" / "best").resolve()
        weights = load_file(best / "model.safetensors")
        change(weights)
        save_file(weights, best / "model.safetensors", metadata={"format": "pt"})
        (best / "checksums.json").unlink()
    return target


def permute_head(weights):
    """Every answer becomes the next word of the vocabulary."""
    for name in ("head.decoder.weight", "head.decoder.bias"):
        weights[name] = weights[name].roll(1, dims=0).contiguous()


def compared(*names, **more):
    return compare_runs([str(name) for name in names], progress=lambda items, _: items, device="cpu", **more)


@pytest.fixture(scope="module")
def three(trained_run, tmp_path_factory):
    """A trained run, an exact copy, and a copy that answers with the wrong words."""
    folder = tmp_path_factory.mktemp("compared")
    return (
        copy_of(trained_run, folder / "a"),
        copy_of(trained_run, folder / "b"),
        copy_of(trained_run, folder / "c", permute_head),
    )


def test_numbers_are_those_of_evaluate(three):
    result = compared(*three)
    measured = json.loads((three[0] / "evaluation.json").read_text())
    for run in result["runs"][:2]:
        assert run["targets"] == measured["targets"]
        assert run["accuracy"] == pytest.approx(measured["accuracy"])
        assert run["accuracy_interval"] == pytest.approx(measured["accuracy_interval"])
        assert run["loss"] == pytest.approx(measured["loss"])
        assert (run["parameters"], run["steps"]) == (measured["parameters"], 4)
    assert result["sequences"] == measured["sequences"]


def test_a_planted_difference_holds_and_a_copy_is_equal(three):
    result = compared(*three)
    copy, wrong = result["against_first"]["rows"]
    for measure in ("accuracy", "loss"):
        assert copy[measure] == {"difference": 0, "interval": [0, 0], "verdict": "equal"}  # to the last bit
        assert wrong[measure]["verdict"] == "holds"
    low, high = wrong["accuracy"]["interval"]
    assert low < wrong["accuracy"]["difference"] < high < 0
    assert wrong["accuracy"]["difference"] == pytest.approx(result["runs"][2]["accuracy"] - result["runs"][0]["accuracy"])
    assert wrong["loss"]["difference"] == pytest.approx(result["runs"][2]["loss"] - result["runs"][0]["loss"])
    assert wrong["loss"]["interval"][0] > 0
    assert copy["sentence"] == "b gets as many right as a in every sequence: equal"
    assert wrong["sentence"].startswith("c is ")
    assert " points below a (" in wrong["sentence"]
    assert wrong["sentence"].endswith("): holds")
    assert (result["against_first"]["comparisons"], result["against_first"]["hold"]) == (2, 1)
    pairs = result["all_pairs"]
    assert [(row["against"], row["run"]) for row in pairs["rows"]] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert (pairs["comparisons"], pairs["hold"]) == (3, 2)


def test_turned_round_a_difference_is_its_negative(three):
    (there,) = compared(three[0], three[2])["against_first"]["rows"]
    (back,) = compared(three[2], three[0])["against_first"]["rows"]
    assert back["accuracy"]["difference"] == -there["accuracy"]["difference"]
    assert back["accuracy"]["interval"] == pytest.approx([-end for end in reversed(there["accuracy"]["interval"])])
    assert " points above c (" in back["sentence"]


def test_the_same_twice(three):
    assert json.dumps(compared(*three)) == json.dumps(compared(*three))


def test_fewer_sequences_are_spread_over_the_text(three):
    whole, part = compared(*three[:2]), compared(*three[:2], sequences=10)
    assert part["sequences"] == 10
    assert part["runs"][0]["targets"] < whole["runs"][0]["targets"]
    assert compared(*three[:2], sequences=10**6)["runs"] == whole["runs"]


def test_fewer_sequences_come_evenly_from_beginning_to_end():
    assert _some(5, None, np.arange(100, 110))[1].tolist() == [100, 102, 104, 106, 108]
    assert _some(3, None, np.arange(10))[1].tolist() == [0, 3, 6]


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small(tokenizer, kind=pnn.PNNConfig, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": len(tokenizer)}
    return {pnn.PNNConfig: pnn.PNNForMaskedLM, pnn.BertBaselineConfig: pnn.BertBaselineForMaskedLM}[kind](
        kind(**({"max_position_embeddings": 64} | sizes | more))
    )


def test_a_bert_baseline_takes_part_as_a_bare_checkpoint(three, tmp_path):
    tokenizer = of_synthetic_language(64)
    bert = save(tmp_path / "bert", small(tokenizer, pnn.BertBaselineConfig, num_hidden_layers=2), tokenizer)
    result = compared(three[0], bert)
    assert [run["steps"] for run in result["runs"]] == [4, None]
    assert result["same_targets"]
    assert result["runs"][0]["targets"] == result["runs"][1]["targets"]
    assert result["notes"] == ["What bert was trained on is not known: it may have seen this text."]
    with_run_last = compared(bert, three[0])  # the first run folder says what to compare on
    assert with_run_last["runs"][1] == result["runs"][0]
    other = save(tmp_path / "other", small(tokenizer), tokenizer)
    with pytest.raises(UserError, match="--data"):
        compared(bert, other)


def test_other_text_serves_bare_checkpoints(three, tmp_path):
    tokenizer = of_synthetic_language(64)
    text = tmp_path / "text.txt"
    text.write_text("".join(line + "\n" for line in synthetic.paragraphs(30, seed=5)))
    bare = save(tmp_path / "bare", small(tokenizer), tokenizer)
    result = compared(three[0], bare, other=EvaluationSet(str(text)))
    assert (result["sequences"], result["notes"]) == (30, [])
    assert result["source"] == str(text)


def test_all_read_what_the_shortest_can(three, tmp_path):
    tokenizer = of_synthetic_language(12)
    short = save(tmp_path / "short", small(tokenizer, max_position_embeddings=12), tokenizer)
    result = compared(three[0], short)
    assert result["max_length"] == 12
    assert result["runs"][0]["targets"] == result["runs"][1]["targets"]
    assert result["runs"][0]["targets"] < compared(*three[:2])["runs"][0]["targets"]


def test_accuracies_of_different_tokens_are_not_compared(three, tmp_path):
    tokenizer = trained_on(synthetic.paragraphs(50, seed=1), 60, 64)  # fewer pieces than the language has words
    other = save(tmp_path / "other", small(tokenizer), tokenizer)
    with pytest.raises(UserError, match=r"have different tokenizers, so their accuracies per token do not compare"):
        compared(three[0], other)


def test_text_that_another_run_may_have_seen_is_said(three, tmp_path):
    run = copy_of(three[2], tmp_path / "d")
    config = (run / "config.yaml").read_text()
    assert "validation_sequences: 50\n" in config
    (run / "config.yaml").write_text(config.replace("validation_sequences: 50\n", "validation_sequences: 20\n"))
    assert compared(three[0], run)["notes"] == [
        "d holds out other text than a (data.validation_sequences): it may have seen this one."
    ]
    assert compared(*three)["notes"] == []


def test_a_report_on_three_gives_what_compare_gives_of_three(three, undrawn, tmp_path):
    """Its verdict in the same word, and why the same two runs alone have a narrower interval."""
    runs = [copy_of(run, tmp_path / run.name) for run in three]
    for place, run in enumerate(runs):
        if place == 1:
            change_answers(run)
        evaluate_run(run, progress=lambda items, _: items, device="cpu")
    best = max(runs, key=lambda run: json.loads((run / "evaluation.json").read_text())["accuracy"])
    page = write_report(runs, tmp_path / "report.html").read_text()
    ordered = [best, *(run for run in runs if run != best)]
    for row in compared(*ordered)["against_first"]["rows"]:
        ends = sorted(-end for end in row["accuracy"]["interval"])
        digits = 1 if min(map(abs, ends)) >= 0.0005 else 2
        assert f"{interval(ends, digits)}: {row['accuracy']['verdict']}" in page
    assert "These 2 intervals are right together in 95\u00a0% of cases, so each is wider" in page


def change_answers(run):
    """A little: the head's biases are shaken."""
    best = (run / "checkpoints" / "best").resolve()
    weights = load_file(best / "model.safetensors")
    noise = torch.randn(weights["head.decoder.bias"].shape, generator=torch.Generator().manual_seed(0))
    weights["head.decoder.bias"] += 0.3 * noise
    save_file(weights, best / "model.safetensors", metadata={"format": "pt"})
    (best / "checksums.json").unlink()


def test_a_report_gives_the_interval_of_compare(three, undrawn, tmp_path):
    """From files alone, and exactly: both pair the runs by the same totals."""
    good, bad = copy_of(three[0], tmp_path / "good"), copy_of(three[2], tmp_path / "bad")
    for run in (good, bad):
        evaluate_run(run, progress=lambda items, _: items, device="cpu")
    (row,) = compared(good, bad)["against_first"]["rows"]
    for run in (good, bad):
        shutil.rmtree(run / "checkpoints")
    low, high = sorted(-end for end in row["accuracy"]["interval"])
    page = write_report([good, bad], tmp_path / "report.html").read_text()
    assert f"<b>good</b> is {-100 * row['accuracy']['difference']:.1f}\u00a0points ahead of <b>bad</b>" in page
    assert f"(95\u00a0% interval {interval((low, high))}: holds)" in page
    assert "are paired" in page
    assert "right together in 95\u00a0% of cases, so each is wider" not in page

    (bad / "evaluation_by_sequence.json").unlink()  # a run of an older version
    page = write_report([good, bad], tmp_path / "report.html").read_text()
    assert f"(95\u00a0% interval {interval((low, high))}: holds)" not in page
    assert "as independent" in page
    assert "bad kept no totals by sequence" in page


def test_totals_of_another_evaluation_are_not_used(three, tmp_path):
    run = copy_of(three[0], tmp_path / "run")
    evaluate_run(run, progress=lambda items, _: items, device="cpu")
    held = run / "evaluation_by_sequence.json"
    totals = json.loads(held.read_text())
    assert len(totals["validation"]["targets"]) == 50
    assert load_runs([run])[0].by_sequence == totals["validation"]
    totals["validation"]["correct"][0] += 1
    held.write_text(json.dumps(totals))
    assert load_runs([run])[0].by_sequence is None
