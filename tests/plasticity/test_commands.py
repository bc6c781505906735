"""`pnn plasticity cycle|score|prune|grow`: what they make, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from small_cycles import language

import pnn
from pnn.errors import UserError
from pnn.models.loading import load_any
from pnn.plasticity import Text, cycle, heads, load, prune, save


@pytest.fixture
def saved(model_of, tokenizer, tmp_path, monkeypatch) -> Path:
    """A model folder and text.txt in the current folder, which is this test's own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    model_of("gpt2").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Path("text.txt").write_text(language())
    return folder


QUICK = ("--learn-steps", 4, "--batch-size", 4, "--evaluate-every", 2, "--learning-rate", 0.003)


def test_the_command_makes_a_run_with_figures(pnn_command, saved):
    words = ("plasticity", "cycle", "model", "--data", "text.txt", "--output", "runs/new", *QUICK, "--resume")
    code, out, err = pnn_command(*words)
    assert code == 0, err
    assert "nothing to resume in runs/new: starting from the beginning" in err
    assert "perplexity" in out
    assert "fewer attention parameters" in out
    for name in ("cycle", "heads", "perplexity"):
        assert Path(f"runs/new/figures/{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(heads(load("runs/new/checkpoints/last"))) == 10
    code, _, err = pnn_command(*words)
    assert code == 0, err
    assert "nothing to resume" not in err
    code, out, err = pnn_command("evaluate", "runs/new", "--data", "text.txt")
    assert code == 0, err


def test_a_cycle_that_adds_heads_says_more(pnn_command, saved):
    options = ("--data", "text.txt", "--prune", 0, "--grow", 0.25, "--beyond", 1, *QUICK)
    code, out, err = pnn_command("plasticity", "cycle", "model", "--output", "runs/new", *options)
    assert code == 0, err
    assert "25.0 % more heads" in out
    assert "-" not in next(line for line in out.splitlines() if "more heads" in line)


@pytest.mark.parametrize("pruned", [False, True])
def test_a_classifier_is_named(pnn_command, saved, model_of, tokenizer, pruned):
    """What fine-tuning leaves: its layers would load as a language model's, its head would be missing."""
    size = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = hf.BertForSequenceClassification(hf.BertConfig(**size))
    (prune(model, [(0, 1)]) if pruned else model).save_pretrained("classifier")
    tokenizer.save_pretrained("classifier")
    code, _, err = pnn_command("plasticity", "score", "classifier", "--by", "magnitude")
    assert code == 2
    assert "ForSequenceClassification" in err
    with pytest.raises(UserError, match="give a language model"):
        cycle(model, Text(torch.ones(4, 8).long(), torch.ones(4, 8).long()), "runs/none")
    assert not Path("runs/none").exists()


def test_score_prune_and_grow(pnn_command, saved):
    code, out, err = pnn_command("plasticity", "score", "model", "--data", "text.txt", "--by", "entropy", "--json")
    assert code == 0, err
    assert len(json.loads(out)["scores"]) == 12
    code, out, err = pnn_command("plasticity", "score", "model", "--by", "magnitude")
    assert code == 0, err
    assert "lowest go first" in out
    Path("small").mkdir()  # a folder made beforehand is as good as none
    code, out, err = pnn_command(
        "plasticity", "prune", "model", "--ratio", 0.5, "--data", "text.txt", "--output", "small", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["heads"] == 6 == len(heads(load("small")))
    code, out, err = pnn_command("plasticity", "grow", "small", "--ratio", 0.2, "--data", "text.txt", "--output", "larger")
    assert code == 0, err
    assert "heads 6 → 8" in out
    assert len(heads(load_any("larger").model)) == 8


def refused(pnn_command, *arguments, says: str) -> None:
    code, _, err = pnn_command("plasticity", *arguments)
    lines = [line for line in err.splitlines() if line.startswith("pnn: ")]
    assert code == 2, err
    assert len(lines) == 1, err
    assert says in lines[0], lines[0]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--prune", 1), "would leave none of 12"),
        (("--prune", 0.5, "--grow", 0, "--rounds", 3), "round 3: pruning 0.5 of 3 heads would leave 2 in 3 layers"),
        (("--prune", 0.9), "at most 9 can go"),
        (("--prune", 1.5), "between 0 and 1"),
        (("--prune", 0.1, "--grow", 0.5), "but after pruning there is room for 1: grow fewer, or let"),
        (("--prune-by", "entropie"), 'did you mean "entropy"'),
        (("--grow-by", "balance"), 'did you mean "balanced"'),
        (("--init", "ones"), "there is no 'ones' to start new heads as"),
        (("--max-length", 99), "rows of 8 to 24 tokens"),
        (("--learning-rate", 0), "more than 0"),
        (("--multiplier", -1), "more than 0"),
        (("--validation", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_what_cannot_be_done_is_said_first(options, says, pnn_command, saved):
    before = {path: path.read_bytes() for path in saved.iterdir()}
    refused(pnn_command, "cycle", "model", "--data", "text.txt", "--output", "new", *options, says=says)
    assert not Path("new").exists()
    assert {path: path.read_bytes() for path in saved.iterdir()} == before


def test_text_that_is_too_short(pnn_command, saved):
    Path("short.txt").write_text(" ".join(language(20).split()[:60]))
    refused(pnn_command, "cycle", "model", "--data", "short.txt", "--output", "new", says="needs at least 4")
    Path("shorter.txt").write_text(" ".join(language(20).split()[:6]))
    said = "shorter than one row of 24 tokens (data.max_length, --max-length)"
    refused(pnn_command, "cycle", "model", "--data", "shorter.txt", "--output", "new", says=said)
    assert not Path("new").exists()


def test_a_model_that_nobody_knows(pnn_command, saved, tokenizer):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("other")
    tokenizer.save_pretrained("other")
    for command in ("cycle", "prune", "grow"):
        refused(pnn_command, command, "other", "--data", "text.txt", "--output", "new", says='the heads of a "gpt_neox" model')
    assert not Path("new").exists()


def test_folders_that_are_taken(pnn_command, saved):
    Path("taken").mkdir()
    Path("taken/note.txt").write_text("mine")
    for command in ("cycle", "prune", "grow"):
        refused(pnn_command, command, "model", "--data", "text.txt", "--output", "taken", says="taken exists already")
    refused(pnn_command, "cycle", "model", "--data", "text.txt", "--output", "taken", "--resume", says="no cycle.json")
    assert [path.name for path in Path("taken").iterdir()] == ["note.txt"]


def test_growing_where_there_is_no_place(pnn_command, saved):
    refused(
        pnn_command, "grow", "model", "--data", "text.txt", "--output", "new", says="there is room for 0: prune first, or let"
    )
    refused(pnn_command, "grow", "model", "--data", "text.txt", "--output", "new", says="with --beyond")
    refused(pnn_command, "prune", "model", "--output", "new", says="--data")
    # in words that fit the options of this command too, not only the cycle's
    refused(pnn_command, "prune", "model", "--output", "new", "--ratio", 25, says="cannot prune 25 of the heads: expected")
    refused(pnn_command, "prune", "model", "--output", "new", "--by", "best", says="there is no 'best' to prune by")
    assert not Path("new").exists()


def test_heads_that_a_score_cannot_tell_apart_are_told(pnn_command, tmp_path, monkeypatch, tokenizer):
    """k = F / ‖F‖ does not change with the scale of F, so the gradients to two heads are opposite."""
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 24}
    config = pnn.DDLConfig(**sizes, num_hidden_layers=2, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    save(pnn.DDLForCausalLM(config), "model", tokenizer)
    Path("text.txt").write_text(language())
    told = "heads of layers 0, 1 are worth the same: --by contribution may tell them apart"
    for by, says in (("gradient", True), ("contribution", False), ("random", False)):
        code, _, err = pnn_command("plasticity", "score", "model", "--data", "text.txt", "--by", by)
        assert code == 0, err
        assert (told in " ".join(err.split())) is says
