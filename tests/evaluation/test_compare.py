"""Comparing runs: planted differences are found and none is found where there is none; pairs, families and words are right."""

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
from pnn.evaluation import compare
from pnn.evaluation.compare import SequenceTotals, compare_runs, differences, sentence, short_names
from pnn.stats import Estimate


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
        assert run["loss"] == pytest.approx(measured["loss"], rel=1e-5)
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


def test_another_tokenizer_is_compared_by_lines_and_said(three, tmp_path):
    tokenizer = trained_on(synthetic.paragraphs(50, seed=1), 60, 64)  # fewer pieces than the language has words
    other = save(tmp_path / "other", small(tokenizer), tokenizer)
    result = compared(three[0], other)
    assert not result["same_targets"]
    assert result["runs"][0]["targets"] != result["runs"][1]["targets"]
    assert "tokenizers differ" in result["notes"][-1]


def test_text_that_another_run_may_have_seen_is_said(three, tmp_path):
    run = copy_of(three[2], tmp_path / "d")
    config = (run / "config.yaml").read_text()
    assert "validation_sequences: 50\n" in config
    (run / "config.yaml").write_text(config.replace("validation_sequences: 50\n", "validation_sequences: 20\n"))
    assert compared(three[0], run)["notes"] == [
        "d holds out other text than a (data.validation_sequences): it may have seen this one."
    ]
    assert compared(*three)["notes"] == []


# Without models -------------------------------------------------------------------------------------------------------


def simulated(rng, accuracies, sequences=80):
    """Runs that find the same sequences hard, with these accuracies over all."""
    targets = rng.integers(1, 20, sequences)
    difficulty = rng.normal(0, 0.1, sequences)
    runs = [rng.binomial(targets, np.clip(p + difficulty, 0, 1)).astype(float) for p in accuracies]
    return [SequenceTotals(right, 3.0 * targets - right, targets.astype(float)) for right in runs]


def test_of_many_runs_that_are_alike_hardly_ever_one_difference_holds(monkeypatch):
    monkeypatch.setattr(compare, "DRAWS", 400)
    rng, rounds, wrong, found = np.random.default_rng(0), 150, 0, 0
    names, pairs = list("abcdef"), [(0, k) for k in range(1, 6)]
    for _ in range(rounds):
        wrong += differences(names, simulated(rng, [0.5] * 6), pairs)["hold"] > 0
        found += differences(names, simulated(rng, [0.5] * 5 + [0.65]), pairs)["rows"][-1]["accuracy"]["verdict"] == "holds"
    assert wrong / rounds < 0.1  # five at 5 % each would come to 20 % or so
    assert found / rounds > 0.9


def test_what_is_hard_for_both_cancels():
    easy = np.repeat([0.0, 10.0], 40)
    totals = [SequenceTotals(np.clip(easy + k, 0, 11), easy, np.full(80, 11.0)) for k in (0, 1)]
    (row,) = differences(["a", "b"], totals, [(0, 1)])["rows"]
    assert row["accuracy"]["interval"] == pytest.approx([1 / 11, 1 / 11])  # each alone: 0.45 ± 0.1


def test_more_pairs_widen_the_intervals():
    totals = simulated(np.random.default_rng(1), [0.5, 0.55, 0.5, 0.5, 0.5])
    names = list("abcde")
    (alone,) = differences(names, totals, [(0, 1)])["rows"]
    among = differences(names, totals, [(i, j) for i in range(5) for j in range(i + 1, 5)])["rows"][0]
    assert among["accuracy"]["difference"] == alone["accuracy"]["difference"]
    assert among["accuracy"]["interval"][0] < alone["accuracy"]["interval"][0]
    assert among["accuracy"]["interval"][1] > alone["accuracy"]["interval"][1]


def test_totals_of_other_sequences_are_refused():
    rng = np.random.default_rng(0)
    totals = [*simulated(rng, [0.5], 1200), *simulated(rng, [0.5], 30)]
    with pytest.raises(UserError, match="a and b cannot be compared: the same text gives them 1,200 and 30 sequences"):
        differences(["a", "b"], totals, [(0, 1)])


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        ((-0.013, -0.017, -0.009), "b is 1.3 points below a (0.9–1.7): holds"),
        ((0.013, 0.009, 0.017), "b is 1.3 points above a (0.9–1.7): holds"),
        ((0.001, -0.003, 0.005), "b differs from a by 0.1 points (−0.3 to 0.5): undecided"),
        ((-0.0001, -0.004, 0.003), "b differs from a by 0.0 points (−0.4 to 0.3): undecided"),
        ((0.002, 0.0002, 0.0038), "b is 0.20 points above a (0.02–0.38): holds"),
        ((0.0, -0.01, 0.01), "b differs from a by 0.0 points (−1.0 to 1.0): undecided"),
        ((0.0, 0.0, 0.0), "b gets as many right as a in every sequence: equal"),
    ],
)
def test_the_words_follow_from_the_numbers(estimate, said):
    assert sentence("b", "a", Estimate(*estimate)) == said


def test_names_are_as_short_as_tells_runs_apart():
    assert short_names(["runs/x/", "runs/y"]) == ["x", "y"]
    assert short_names(["runs/x/checkpoints/best", "runs/y/checkpoints/best"]) == ["x/checkpoints/best", "y/checkpoints/best"]
    assert short_names(["a/run", "b/run"]) == ["a/run", "b/run"]
