"""The cycle: it improves a model, keeps complete records, and a killed one goes on to the same bits."""

from __future__ import annotations

import copy
import importlib
import json
import math
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from forking import Process

import pnn
from pnn.bench.flops import inference_flops
from pnn.data import synthetic
from pnn.data.masking import SpecialTokens
from pnn.data.tokenizers import of_synthetic_language
from pnn.errors import UserError
from pnn.evaluation.reading import load_any
from pnn.plasticity import CycleSettings, Text, cycle, heads, load, prune
from pnn.plasticity.heads import head_map
from pnn.plasticity.measure import flops_per_token, held_out_loss, missing_capacity, size
from pnn.plasticity.text import read_text
from pnn.runs import read_json, read_metrics

module = importlib.import_module("pnn.plasticity.cycle")  # as an attribute, the name is the function's
journal = importlib.import_module("pnn.plasticity.journal")
DATA = Path(__file__).parents[3] / "shared" / "data"
SHORT = CycleSettings(learn_steps=12, learning_rate=3e-3, evaluate_every=4, batch_rows=4, score_rows=8)
LENGTH = 24


@pytest.fixture(autouse=True)
def no_long_timing(monkeypatch):
    monkeypatch.setattr("pnn.plasticity.measure.SECONDS", 0.0)


def language(count: int = 120) -> str:
    return "\n\n".join(synthetic.paragraphs(count, seed=0))


@pytest.fixture(scope="module")
def tokenizer():
    return of_synthetic_language(LENGTH)


@pytest.fixture(scope="module")
def rows(tokenizer) -> torch.Tensor:
    ids = [token for line in language().splitlines() for token in tokenizer.encode(line)]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


@pytest.fixture(scope="module")
def text(rows) -> Text:
    return Text(rows[:-16], rows[-16:], source="embedded")


@pytest.fixture(scope="module")
def model_of(tokenizer):
    """`model_of("gpt2")`: a fresh tiny model that reads the embedded language."""
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": LENGTH}

    def make(kind: str) -> hf.PreTrainedModel:
        torch.manual_seed(3)
        if kind == "gpt2":
            config = hf.GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_head=4, n_layer=3, n_positions=LENGTH)
            config.bos_token_id = config.eos_token_id = tokenizer.sep_token_id
            return hf.GPT2LMHeadModel(config).eval()
        if kind == "ddl":
            return pnn.DDLForCausalLM(pnn.DDLConfig(**sizes, num_hidden_layers=3)).eval()
        if kind == "bert":
            return hf.BertForMaskedLM(hf.BertConfig(**sizes, intermediate_size=48, num_hidden_layers=3)).eval()
        assert kind == "pnn"
        return pnn.PNNForMaskedLM(pnn.PNNConfig(**sizes, intermediate_size=48, schedule=[0, 1, 2, 0])).eval()

    return make


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def records_of(folder: Path) -> list[dict]:
    return read_metrics(folder / "metrics.jsonl")


def summary_of(folder: Path) -> dict:
    """Without what may differ: when it was, where it lies and how fast it went."""
    return {k: v for k, v in read_json(folder / "summary.json").items() if k not in ("timestamp", "speed", "experiment_name")}


def assert_same_end(one: Path, other: Path) -> None:
    assert (one / "checkpoints/last/model.safetensors").read_bytes() == (
        other / "checkpoints/last/model.safetensors"
    ).read_bytes()
    assert records_of(one) == records_of(other)
    assert summary_of(one) == summary_of(other)
    assert sorted(path.name for path in (one / "checkpoints").iterdir()) == sorted(
        path.name for path in (other / "checkpoints").iterdir()
    )


# Measuring ------------------------------------------------------------------------------------------------------------


def test_every_token_counts_the_same(model_of, text):
    model = model_of("gpt2")
    found = held_out_loss(model, text)
    with torch.no_grad():
        logits = model(text.held_out).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), text.held_out[:, 1:].flatten())
    assert found["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["targets"] == text.held_out[:, 1:].numel()
    low, high = found["loss_interval"]
    assert low < found["loss"] < high


def test_masks_are_the_texts_own(model_of, rows, tokenizer):
    special = SpecialTokens(tokenizer.mask_token_id, len(tokenizer), tuple(tokenizer.all_special_ids))
    text = Text(rows[:-16], rows[-16:], special)
    found = held_out_loss(model_of("bert"), text)
    assert 0.08 < found["targets"] / text.held_out.numel() < 0.2
    assert held_out_loss(model_of("bert"), text) == found
    one, again = (text.for_update(5, 4, seed=1) for _ in range(2))
    assert torch.equal(one["labels"], again["labels"])
    assert not torch.equal(one["input_ids"], text.for_update(5, 4, seed=2)["input_ids"])


def test_flops_are_those_of_the_bench_and_fall_with_heads(model_of):
    model = model_of("ddl")
    assert flops_per_token(model, LENGTH) == inference_flops(model.config, LENGTH / 2, 1.0)
    smaller = prune(model, [(0, 1), (2, 3)])
    per_head = 2 * 4 * 32 * 8 + 4 * (LENGTH / 2) * 8
    assert flops_per_token(model, LENGTH) - flops_per_token(smaller, LENGTH) == 2 * per_head
    assert size(model, LENGTH)["attention_parameters"] - size(smaller, LENGTH)["attention_parameters"] == 2 * 4 * 32 * 8


def test_capacity_is_missing_only_where_heads_went(model_of, text):
    smaller = prune(model_of("gpt2"), [(0, 1), (2, 3)])
    missing = missing_capacity(smaller, text.batches(text.train[:8], 4))
    assert missing[1] is None
    assert sum(value for value in missing if value is not None) == pytest.approx(1)


def test_batches_follow_from_the_step(text):
    size_, count = 4, len(text.train)
    epoch = [text.for_update(step, size_, seed=0)["input_ids"] for step in range(count // size_)]
    seen = {tuple(row.tolist()) for batch in epoch for row in batch}
    assert seen <= {tuple(row.tolist()) for row in text.train}
    assert len(torch.cat(epoch).unique(dim=0)) >= len(text.train.unique(dim=0)) - size_
    assert torch.equal(text.for_update(3, size_, 0)["input_ids"], epoch[3])


# The cycle ------------------------------------------------------------------------------------------------------------

FIELDS = {
    "initial": {"model_name", "total_heads", "active_heads", "perplexity", "head_map", "parameters", "flops_per_token"},
    "pruning": {
        "pruning_level",
        "pruning_strategy",
        "heads_pruned",
        "active_heads_after_pruning",
        "pruned_heads",
        "scores",
    },
    "measurement": {"cycle", "pruned_perplexity", "perplexity_change", "perplexity_change_percent", "missing_capacity"},
    "growth": {"growth_strategy", "growth_percentage", "heads_added", "active_heads_after_growth", "added_heads", "perplexity"},
    "training": {"step", "train_loss"},
    "evaluation": {"step", "perplexity", "sample"},
    "final": {
        "cycle",
        "final_perplexity",
        "active_heads",
        "active_heads_percentage",
        "perplexity_change_from_initial",
        "perplexity_change_from_initial_percent",
        "perplexity_recovery",
        "recovery",
    },
}


@pytest.mark.parametrize("kind", ["gpt2", "ddl"])
def test_a_cycle_improves_and_says_what_it_did(kind, model_of, text, tokenizer, tmp_path):
    model = model_of(kind)
    before = copy.deepcopy(model)
    result = cycle(model, text, tmp_path / "run", SHORT, tokenizer=tokenizer, name="tiny")
    assert same_weights(model, before)
    assert not hasattr(model.config, "head_map") or model.config.head_map is None
    records = records_of(tmp_path / "run")
    by_phase = {phase: [one for one in records if one["phase"] == phase] for phase in FIELDS}
    for phase, wanted in FIELDS.items():
        for record in by_phase[phase]:
            assert wanted <= record.keys(), phase
    assert [len(by_phase[phase]) for phase in FIELDS] == [1, 1, 1, 1, SHORT.learn_steps, 3, 1]
    initial, pruned, grown, final = (by_phase[phase][0] for phase in ("initial", "measurement", "growth", "final"))
    assert final["perplexity"] < 0.9 * min(pruned["perplexity"], initial["perplexity"])
    assert grown["perplexity"] == pytest.approx(pruned["perplexity"], rel=1e-5)  # new heads start at zero
    assert by_phase["evaluation"][-1]["perplexity"] == final["perplexity"]
    assert all(isinstance(one["sample"], str) and one["sample"] for one in by_phase["evaluation"])
    # 12 heads: 3 go, 1 grows
    assert (initial["total_heads"], by_phase["pruning"][0]["heads_pruned"], grown["heads_added"]) == (12, 3, 1)
    assert final["active_heads"] == len(heads(result)) == 10
    assert final["head_map"] == head_map(result) == grown["head_map"]
    assert final["parameters"] == sum(p.numel() for p in result.parameters()) < initial["parameters"]
    summary = read_json(tmp_path / "run/summary.json")
    for key in ("experiment_name", "model_name", "dataset", "cycles", "strategies", "timestamp", "settings", "speed"):
        assert key in summary
    assert (summary["final_perplexity"], summary["final_active_heads"]) == (final["perplexity"], 10)
    assert summary["fewer_heads"] == pytest.approx(2 / 12)
    assert same_weights(load(tmp_path / "run/checkpoints/last"), result)
    assert same_weights(load_any(tmp_path / "run").model, result)  # the folder is a RUN for every command


@pytest.mark.parametrize("kind", ["bert", "pnn"])
def test_encoders_too(kind, model_of, rows, tokenizer, tmp_path):
    special = SpecialTokens(tokenizer.mask_token_id, len(tokenizer), tuple(tokenizer.all_special_ids))
    cycle(model_of(kind), Text(rows[:-16], rows[-16:], special), tmp_path / "run", SHORT, tokenizer=tokenizer)
    records = records_of(tmp_path / "run")
    assert records[-1]["perplexity"] < records[0]["perplexity"]
    assert all(one["sample"] is None for one in records if one["phase"] == "evaluation")


@pytest.mark.parametrize(
    "changes",
    [
        {"prune_by": "entropy", "grow_by": "entropy_gap", "per_layer": True},
        {"prune_by": "magnitude", "grow_by": "balanced", "init": "clone"},
        {"prune_by": "contribution", "grow_by": "importance"},
        {"prune_by": "combined", "grow_by": "random", "whole_layers": True, "prune": 0.9},
        {"prune": 0.0, "grow": 0.0},
        {"prune": 0.0, "grow": 0.3, "beyond": 1},
        {"learn_steps": 0},
    ],
)
def test_strategies_and_controls(changes, model_of, text, tmp_path):
    settings = CycleSettings(**{**vars(SHORT), "learn_steps": 2, **changes})
    result = cycle(model_of("gpt2"), text, tmp_path / "run", settings)
    pruned, grown = math.floor(12 * settings.prune + 1e-9), math.floor(12 * settings.grow + 1e-9)
    assert len(heads(result)) == 12 - pruned + grown


def test_rounds_and_a_second_cycle_on_what_was_saved(model_of, text, tmp_path):
    settings = CycleSettings(**{**vars(SHORT), "rounds": 2, "learn_steps": 4})
    cycle(model_of("gpt2"), text, tmp_path / "two", settings)
    finals = [one for one in records_of(tmp_path / "two") if one["phase"] == "final"]
    assert [one["cycle"] for one in finals] == [1, 2]
    assert [one["active_heads"] for one in finals] == [10, 8]  # 12 − 3 + 1, 10 − 3 + 1
    assert sorted(path.name for path in (tmp_path / "two/checkpoints").iterdir()) == ["last", "round-2-learned"]
    third = cycle(load(tmp_path / "two/checkpoints/last"), text, tmp_path / "three", SHORT)
    records = records_of(tmp_path / "three")
    assert (records[0]["active_heads"], records[0]["total_heads"]) == (8, 12)
    assert len(heads(third)) == 8 - 2 + 1
    assert records[-1]["perplexity"] < records[0]["perplexity"]


# Killed and resumed ---------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As sudden as a signal: nobody catches it."""


@pytest.fixture(scope="module")
def unbroken(model_of, text, tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    pnn.plasticity.measure.SECONDS, before = 0.0, pnn.plasticity.measure.SECONDS
    cycle(model_of("gpt2"), text, folder, TWO_ROUNDS, tokenizer=tokenizer)
    pnn.plasticity.measure.SECONDS = before
    return folder


TWO_ROUNDS = CycleSettings(**{**vars(SHORT), "rounds": 2, "learn_steps": 6, "evaluate_every": 3})


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("held_out_loss", 1),  # the first measurement
        ("score", 1),
        ("missing_capacity", 1),
        ("grow", 1),
        ("held_out_loss", 5),  # in the middle of learning
        ("score", 2),  # the second round
        ("learn", 2),
        ("speeds", 1),
    ],
)
def test_killed_in_any_phase(name, calls, unbroken, model_of, text, tokenizer, tmp_path, monkeypatch):
    whole, count = getattr(module, name), 0

    def fatal(*args, **kwargs):
        nonlocal count
        count += 1
        if count == calls:
            raise Killed
        return whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fatal)
        with pytest.raises(Killed):
            cycle(model_of("gpt2"), text, tmp_path / "run", TWO_ROUNDS, tokenizer=tokenizer)
    cycle(model_of("gpt2"), text, tmp_path / "run", TWO_ROUNDS, tokenizer=tokenizer, resume=True)
    assert_same_end(tmp_path / "run", unbroken)


@pytest.mark.parametrize("phase", [0, 1, 3, 4])
def test_killed_before_it_could_say_that_a_phase_was_done(phase, unbroken, model_of, text, tokenizer, tmp_path, monkeypatch):
    finish = journal.Journal.finish_phase

    def fatal(self, ends_round):
        if self.done == phase:
            raise Killed
        finish(self, ends_round)

    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "finish_phase", fatal)
        with pytest.raises(Killed):
            cycle(model_of("gpt2"), text, tmp_path / "run", TWO_ROUNDS, tokenizer=tokenizer)
    cycle(model_of("gpt2"), text, tmp_path / "run", TWO_ROUNDS, tokenizer=tokenizer, resume=True)
    assert_same_end(tmp_path / "run", unbroken)


def test_a_finished_cycle_is_left_as_it_is(unbroken, model_of, text, tokenizer):
    before = {path: path.read_bytes() for path in unbroken.rglob("*") if path.is_file()}
    result = cycle(model_of("gpt2"), text, unbroken, TWO_ROUNDS, tokenizer=tokenizer, resume=True)
    assert same_weights(result, load(unbroken / "checkpoints/last"))
    assert {path: path.read_bytes() for path in unbroken.rglob("*") if path.is_file()} == before


def test_only_the_same_cycle_is_resumed(unbroken, model_of, text, tokenizer):
    other = CycleSettings(**{**vars(TWO_ROUNDS), "prune": 0.5})
    with pytest.raises(UserError, match=r"prune was 0\.3 and is now 0\.5"):
        cycle(model_of("gpt2"), text, unbroken, other, tokenizer=tokenizer, resume=True)
    with pytest.raises(UserError, match="the text is another"):
        cycle(model_of("gpt2"), Text(text.train[1:], text.held_out), unbroken, TWO_ROUNDS, resume=True)
    model = model_of("gpt2")
    model.transformer.wte.weight.data[0] += 1
    with pytest.raises(UserError, match="the model is another"):
        cycle(model, text, unbroken, TWO_ROUNDS, resume=True)


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(model_of, tokenizer, tmp_path, monkeypatch) -> Path:
    """A model folder and text.txt in the current folder, which is this test's own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    model_of("gpt2").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Path("text.txt").write_text(language())
    return folder


QUICK = ("--learn-steps", 4, "--batch-rows", 4, "--evaluate-every", 2, "--learning-rate", 0.003)


def test_the_command_makes_a_run_with_figures(pnn_command, saved):
    code, out, err = pnn_command("plasticity", "cycle", "model", "--data", "text.txt", "--output", "runs/new", *QUICK)
    assert code == 0, err
    assert "perplexity" in out
    assert "fewer attention parameters" in out
    for name in ("cycle", "heads", "perplexity"):
        assert Path(f"runs/new/figures/{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(heads(load("runs/new/checkpoints/last"))) == 10
    code, _, err = pnn_command("plasticity", "cycle", "model", "--data", "text.txt", "--output", "runs/new", *QUICK, "--resume")
    assert code == 0, err
    code, out, err = pnn_command("evaluate", "runs/new", "--data", "text.txt")
    assert code == 0, err


def test_score_prune_and_grow(pnn_command, saved):
    code, out, err = pnn_command("plasticity", "score", "model", "--data", "text.txt", "--by", "entropy", "--json")
    assert code == 0, err
    assert len(json.loads(out)["scores"]) == 12
    code, out, err = pnn_command("plasticity", "score", "model", "--by", "magnitude")
    assert code == 0, err
    assert "lowest go first" in out
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
        (("--prune", 0.9), "9 is the most"),
        (("--prune", 1.5), "between 0 and 1"),
        (("--prune", 0.1, "--grow", 0.5), "room for 1"),
        (("--prune-by", "entropie"), 'did you mean "entropy"'),
        (("--grow-by", "balance"), 'did you mean "balanced"'),
        (("--init", "ones"), "there is no 'ones' to start new heads as"),
        (("--length", 99), "rows of 8 to 24 tokens"),
        (("--learning-rate", 0), "above 0"),
        (("--multiplier", -1), "above 0"),
        (("--validation", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_what_cannot_be_done_is_said_first(options, says, pnn_command, saved):
    before = {path: path.read_bytes() for path in saved.iterdir()}
    refused(pnn_command, "cycle", "model", "--data", "text.txt", "--output", "new", *options, says=says)
    assert not Path("new").exists()
    assert {path: path.read_bytes() for path in saved.iterdir()} == before


@pytest.mark.parametrize("kind", ["bert", "pnn"])
def test_an_encoder_reads_lines_as_it_was_trained_on_them(kind, model_of, tokenizer, tmp_path):
    lines = [line for line in language().splitlines() if line.strip()][:40]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    model = model_of(kind)
    text = read_text(model, tokenizer, str(tmp_path / "lines.txt"), progress=lambda items, _: items)
    wanted = [tokenizer.encode(line, truncation=True, max_length=LENGTH) for line in lines]
    assert len({len(ids) for ids in wanted}) > 1
    rows = [*text.train, *text.held_out]
    assert [[token for token in row.tolist() if token != tokenizer.pad_token_id] for row in rows] == wanted
    batch = next(text.batches(text.held_out, 2))
    assert batch["labels"][batch["attention_mask"] == 0].eq(-100).all()
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    short = int(batch["attention_mask"][0].sum())
    one = model(input_ids=batch["input_ids"][:1, :short]).logits
    assert torch.allclose(logits[0, :short], one[0], atol=1e-5)


def test_text_that_is_too_short(pnn_command, saved):
    Path("short.txt").write_text(" ".join(language(20).split()[:60]))
    refused(pnn_command, "cycle", "model", "--data", "short.txt", "--output", "new", says="4 are the fewest")
    Path("shorter.txt").write_text(" ".join(language(20).split()[:6]))
    said = "shorter than one row of 24 tokens (data.max_length, --length)"
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
    refused(pnn_command, "grow", "model", "--data", "text.txt", "--output", "new", says="room for 0")
    refused(pnn_command, "prune", "model", "--output", "new", says="--data")
    # in words that fit the options of this command too, not only the cycle's
    refused(pnn_command, "prune", "model", "--output", "new", "--ratio", 25, says="cannot prune 25 of the heads: a share lies")
    refused(pnn_command, "prune", "model", "--output", "new", "--by", "best", says="there is no 'best' to prune by")
    assert not Path("new").exists()


# Real kills and a real model ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(model_of, tokenizer, start_pnn, tmp_path_factory):
    """A folder with a model, a text and a cycle that nothing interrupted: `start("killed")` begins another one there."""
    folder = tmp_path_factory.mktemp("real")
    model_of("gpt2").save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(language())
    options = ("--rounds", 2, "--learn-steps", 20, "--evaluate-every", 5, "--learning-rate", 0.003)

    def start(output: str, *more: str) -> Process:
        words = ("plasticity", "cycle", "model", "--data", "text.txt", "--output", output, *options, *more)
        return start_pnn(*words, patches={"pnn.plasticity.measure.SECONDS": 0.0})

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        whole = start("whole")
        assert whole.wait() == 0, whole.output()
    return folder, start


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 3, 9, 30])
def test_killed_for_real(lines, real, monkeypatch):
    folder, start = real
    monkeypatch.chdir(folder)
    killed = folder / f"killed-{lines}"
    process = start(killed.name)
    metrics, deadline = killed / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        assert process.poll() is None, process.output()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (killed / "summary.json").exists()
    again = start(killed.name, "--resume")
    assert again.wait() == 0, again.output()
    assert_same_end(killed, folder / "whole")


def stories(folder: Path, count: int, length: int) -> str:
    """What the model itself writes: text that it knows as well as anything can be known."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = torch.full((count, 1), tokenizer.bos_token_id)
        made = model.generate(start, do_sample=True, top_k=0, max_new_tokens=length, pad_token_id=tokenizer.eos_token_id)
    return "\n\n".join(" ".join(one.split()) for one in tokenizer.batch_decode(made, skip_special_tokens=True))


@pytest.mark.slow
def test_a_cycle_of_a_pretrained_model(pnn_command, tmp_path, monkeypatch):
    model = DATA / "models" / "stories15M"
    if not model.exists():
        pytest.skip("no stories15M beside the repository")
    monkeypatch.chdir(tmp_path)
    Path("stories.txt").write_text(stories(model, 32, 96))
    settings = ("--length", 64, "--batch-rows", 4, "--learn-steps", 16, "--evaluate-every", 16)
    code, _, err = pnn_command("plasticity", "cycle", model, "--data", "stories.txt", "--output", "stories", *settings)
    assert code == 0, err
    records = records_of(Path("stories"))
    pruned, final = (next(one for one in records if one["phase"] == phase) for phase in ("measurement", "final"))
    assert (records[0]["heads"], pruned["heads"], final["heads"]) == (36, 26, 29)  # ⌊0.3 · 36⌋ go, ⌊0.1 · 36⌋ grow
    assert records[0]["perplexity"] < final["perplexity"] < pruned["perplexity"]
    assert final["parameters"] == records[0]["parameters"] - 7 * 4 * 288 * 48
    assert next(load("stories/checkpoints/last").parameters()).dtype == torch.float32
