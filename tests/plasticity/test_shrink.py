"""`pnn shrink`: from a model to a smaller one that transformers loads, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from small_cycles import language

from pnn import files
from pnn.errors import UserError
from pnn.files import sha256
from pnn.plasticity import load, prune, unit_map
from pnn.plasticity.budget import fewer_parameters, group_of
from pnn.plasticity.phases import calibration
from pnn.plasticity.shrink import ShrinkSettings, shrink
from pnn.plasticity.unit_scores import score_units

QUICK = ("--learn-steps", 4, "--batch-size", 4, "--learning-rate", 0.003, "--score-rows", 8, "--validation-rows", 8)


@pytest.fixture
def saved(model_of, tokenizer, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model_of("gpt2").save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("text.txt").write_text(language())
    return tmp_path / "model"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir()}


def test_one_command_makes_a_smaller_model(pnn_command, saved):
    before = digests(saved)
    words = ("shrink", "model", "--parameters", "-20%", "--data", "text.txt", "--output", "small", *QUICK)
    code, out, err = pnn_command(*words)
    assert code == 0, err
    for said in ("before", "pruned", "learned", "perplexity", "fewer parameters", "reading 8 ×", "writing one text"):
        assert said in out
    assert digests(saved) == before
    assert not Path("small.unfinished").exists()
    smaller, full = (hf.AutoModelForCausalLM.from_pretrained(name) for name in ("small", "model"))
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (smaller, full)]
    assert 0.75 < sizes[0] / sizes[1] <= 0.8
    summary = json.loads(Path("small/summary.json").read_text())
    assert summary["after"]["parameters"] == sizes[0]
    assert summary["after"]["units"]["neuron"] == sum(map(len, unit_map(smaller, "neuron")))
    assert summary["before"]["perplexity"] > 1
    assert summary["writing"]["tokens_per_second"]["after"] > 0
    card = Path("small/README.md").read_text()
    assert "Made from `model`: 2" in card
    assert "reading 8 ×" in card
    assert "AutoModelForCausalLM" in card
    assert not {"small", "small.unfinished"} & {path.name for path in files._HELD}  # the folder is free again
    assert smaller.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False).shape == (1, 5)
    # the folder is there: the same command says so, and with --resume gives the same table without doing anything
    code, _, err = pnn_command(*words)
    assert (code, "small exists already" in err) == (2, True)
    code, again, err = pnn_command(*words, "--resume")
    assert code == 0, err
    assert again == out
    # a kill may have come before the work was removed
    Path("small.unfinished").mkdir()
    pnn_command(*words, "--resume")
    assert not Path("small.unfinished").exists()
    # and what is there is not passed off as something else
    code, _, err = pnn_command(*(("-40%" if word == "-20%" else word) for word in words), "--resume")
    assert code == 2
    assert "cannot resume small: fewer was 0.2 and is now 0.4" in " ".join(err.split())
    Path("other.txt").write_text("the fox of avon wore amber hats .\n" + Path("text.txt").read_text())
    code, _, err = pnn_command(*("other.txt" if word == "text.txt" else word for word in words), "--resume")
    assert (code, "cannot resume small: the text is another" in " ".join(err.split())) == (2, True)
    # what came out can be exported and shrunk again
    code, _, err = pnn_command("export", "small", "--output", "exported")
    assert code == 0, err
    assert "Made from `model`: 2" in Path("exported/README.md").read_text()
    code, _, err = pnn_command("shrink", "small", "--parameters", "-5%", "--data", "text.txt", "--output", "less", *QUICK)
    assert code == 0, err
    assert "; then " in Path("less/README.md").read_text()


def test_so_many_times_as_fast(pnn_command, saved, monkeypatch):
    """On a clock that counts parameters: how fast a small model is on a busy machine is nobody's promise."""
    monkeypatch.setattr(
        "pnn.plasticity.budget.reading_times",
        lambda models, length: {name: float(model.num_parameters()) for name, model in models.items()},
    )
    words = ("shrink", "model", "--speed", 1.2, "--data", "text.txt", "--kinds", "neurons,layers", *QUICK, "--json")
    code, out, err = pnn_command(*words)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["settings"]["faster"] == 1.2
    assert summary["after"]["units"]["head"] % 4 == 0  # heads go with their layers only
    assert load("runs/model-small").config.model_type == "gpt2"


def test_an_encoder_too(pnn_command, saved, model_of, tokenizer):
    model_of("bert").save_pretrained("bert")
    tokenizer.save_pretrained("bert")
    code, out, err = pnn_command("shrink", "bert", "--parameters", "-10%", "--data", "text.txt", "--output", "small", *QUICK)
    assert code == 0, err
    assert "writing" not in out
    hf.AutoModelForMaskedLM.from_pretrained("small")


class KilledError(Exception):
    pass


@pytest.mark.parametrize("phase", [0, 1, 2])
def test_killed_in_any_phase_it_gives_the_same_bits(model_of, text, tmp_path, monkeypatch, phase):
    from pnn.plasticity.journal import Journal

    plan = ShrinkSettings(fewer=0.2, learn_steps=3, batch_rows=2, evaluate_every=2, score_rows=4)
    straight, expected, *_ = shrink(model_of("gpt2"), text, tmp_path / "straight", plan)
    finish = Journal.finish_phase

    def stop(self, ends_round):
        if self.done == phase:
            raise KilledError
        finish(self, ends_round)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish_phase", stop)
        with pytest.raises(KilledError):
            shrink(model_of("gpt2"), text, tmp_path / "work", plan)
    resumed, summary, *_ = shrink(model_of("gpt2"), text, tmp_path / "work", plan, resume=True)
    assert all(torch.equal(value, straight.state_dict()[name]) for name, value in resumed.state_dict().items())
    assert {key: summary[key] for key in ("before", "pruned", "after")} == {
        key: expected[key] for key in ("before", "pruned", "after")
    }
    with pytest.raises(UserError, match="fewer was 0"):
        shrink(model_of("gpt2"), text, tmp_path / "work", ShrinkSettings(fewer=0.3), resume=True)


def test_units_are_scored_anew_in_every_round(model_of, text, tmp_path):
    """Half of the budget goes by scores of the whole model, the other half by scores of what is left, on other rows; groups of
    neurons stay as large as they were."""
    model, plan = model_of("gpt2"), ShrinkSettings(fewer=0.3, rounds=2, repair=False, learn_steps=0, score_rows=8)
    shrunk = shrink(model, text, tmp_path / "two", plan)[0]
    by_hand, whole = model, model.num_parameters()
    for round_ in (1, 2):
        scores = score_units(by_hand, calibration(text, plan.as_cycle(), round_), "fisher", plan.units)
        share = 1 - (1 - 0.15 * round_) * whole / by_hand.num_parameters()
        by_hand = prune(by_hand, fewer_parameters(by_hand, scores, share, model))
    once = shrink(model, text, tmp_path / "one", replace(plan, rounds=1))[0]
    maps = [[unit_map(one, kind) for kind in plan.units] for one in (shrunk, by_hand, once)]
    assert maps[0] == maps[1] != maps[2]
    assert all(0.68 * whole < one.num_parameters() <= 0.7 * whole for one in (shrunk, once))
    size = group_of(len(unit_map(model, "neuron")[0]))
    assert size > group_of(min(map(len, unit_map(shrunk, "neuron"))))  # what is left of a layer alone would be cut finer
    assert all(len(row) % size == 0 for row in unit_map(shrunk, "neuron"))
    with pytest.raises(UserError, match="--rounds 0: expected at least 1"):
        replace(plan, rounds=0)


def test_a_score_of_matrices_chooses_within_them(model_of, text, tmp_path):
    """As many of each kind in each layer as by default, the least by the surgeon's error."""
    model = model_of("gpt2")
    shared, within = (
        shrink(
            model, text, tmp_path / by, ShrinkSettings(fewer=0.15, by=by, rounds=1, repair=False, learn_steps=0, score_rows=8)
        )[0]
        for by in ("fisher", "surgeon")
    )
    batches = calibration(text, ShrinkSettings(fewer=0.15, score_rows=8).as_cycle(), 1)
    scores = score_units(model, batches, "surgeon", ("head", "neuron"))
    other = 0
    for kind in ("head", "neuron"):
        for layer, (row, by_fisher) in enumerate(zip(unit_map(within, kind), unit_map(shared, kind), strict=True)):
            assert len(row) == len(by_fisher)
            most = scores.of[kind][layer].argsort(descending=True)[: len(row)]
            assert sorted(most.tolist()) == row
            other += row != by_fisher
    assert other


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--parameters", "-99%"), "−99 % of the parameters cannot go: heads, neurons and layers that may go hold"),
        (("--parameters", "-40%", "--kinds", "heads"), "−40 % of the parameters cannot go: heads that may go hold"),
        (("--parameters", "20%"), "say how many fewer, in per cent, such as -20%"),
        (("--parameters", "-0%"), "more than 0 and less than 100 %"),
        (("--speed", 0.9), "expected more than 1"),
        (("--speed", 500, "--kinds", "neurons"), "--speed 500: without all the neurons that may go the model reads"),
        ((), "give either --parameters"),
        (("--parameters", "-20%", "--speed", 1.3), "or --speed (how fast)"),
        (("--parameters", "-20%", "--kinds", "channels"), "unknown kind of unit 'channel'"),
        (("--parameters", "-20%", "--kinds", "width"), "width goes only from models whose one state passes RMSNorms alone"),
        (("--parameters", "-20%", "--by", "fishr"), "unknown score of units 'fishr'"),
        (("--parameters", "-20%", "--data", "short.txt"), 'the text "short.txt" is shorter than one row of 24 tokens'),
    ],
)
def test_what_it_refuses_in_a_sentence(pnn_command, saved, options, says):
    Path("short.txt").write_text("the fox of avon\n")
    before = digests(saved)
    data = () if "--data" in options else ("--data", "text.txt")
    code, _, err = pnn_command("shrink", "model", *options, *data, "--output", "small")
    assert code == 2
    assert says in " ".join(err.split())
    assert {path.name for path in Path().iterdir()} - {"prepared"} == {"model", "short.txt", "text.txt"}  # tokens may be kept
    assert digests(saved) == before
