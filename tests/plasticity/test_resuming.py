"""A cycle that was killed goes on to the same bits."""

from __future__ import annotations

import importlib
import shutil
import signal
import time
from pathlib import Path

import pytest
from forking import Process
from small_cycles import SHORT, language, records_of, same_weights

from pnn.errors import UserError
from pnn.plasticity import CycleSettings, Text, cycle, load
from pnn.runs import read_json

cycle_module = importlib.import_module("pnn.plasticity.cycle")  # as an attribute, the name is the function's
journal = importlib.import_module("pnn.plasticity.journal")
phases = importlib.import_module("pnn.plasticity.phases")


def summary_of(folder: Path) -> dict:
    """Without what may differ: when it was, where it lies and how fast it went."""
    return {k: v for k, v in read_json(folder / "summary.json").items() if k not in ("timestamp", "speed", "experiment_name")}


def assert_same_end(one: Path, other: Path) -> None:
    assert (one / "checkpoints/last/model.safetensors").read_bytes() == (
        other / "checkpoints/last/model.safetensors"
    ).read_bytes()
    assert records_of(one) == records_of(other)
    assert summary_of(one) == summary_of(other)
    files = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in (one, other)]
    assert files[0] == files[1]


class Killed(BaseException):
    """As sudden as a signal: nobody catches it."""


@pytest.fixture(scope="module")
def unbroken(model_of, text, tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    cycle(model_of("gpt2"), text, folder, TWO_ROUNDS, tokenizer=tokenizer)
    return folder


TWO_ROUNDS = CycleSettings(**{**vars(SHORT), "rounds": 2, "learn_steps": 6, "evaluate_every": 3})


@pytest.mark.parametrize(
    ("module", "name", "calls"),
    [
        (phases, "held_out_loss", 1),  # the first measurement
        (phases, "score", 1),
        (cycle_module, "missing_capacity", 1),
        (phases, "grow", 1),
        (phases, "held_out_loss", 5),  # in the middle of learning
        (phases, "score", 2),  # the second round
        (phases, "learn", 2),
        (cycle_module, "speeds", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_killed_in_any_phase(module, name, calls, unbroken, model_of, text, tokenizer, tmp_path, monkeypatch):
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
            (self.folder / ".state.json.partial-4194305").write_text("{")  # no such process
            (self.folder / "environment.json").unlink()  # as if it had been killed right after cycle.json
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


@pytest.mark.parametrize("state", ["[1, 2]", "{}", '{"phases": "3", "records": 1, "model": null, "finished": null}', "null"])
def test_a_state_of_another_shape(state, unbroken, model_of, text, tokenizer, tmp_path):
    shutil.copytree(unbroken, tmp_path / "run", symlinks=True)
    (tmp_path / "run/state.json").write_text(state)
    metrics = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"state\.json does not say how far"):
        cycle(model_of("gpt2"), text, tmp_path / "run", TWO_ROUNDS, tokenizer=tokenizer, resume=True)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == metrics


# Real kills -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(model_of, tokenizer, start_pnn, tmp_path_factory):
    """A folder with a model, a text and a cycle that nothing interrupted: `start("killed")` begins another one there."""
    folder = tmp_path_factory.mktemp("real")
    model_of("gpt2").save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(language())
    options = ("--rounds", 2, "--learn-steps", 12, "--evaluate-every", 4, "--learning-rate", 0.003)
    options += ("--validation-rows", 8)

    def start(output: str, *more: str) -> Process:
        words = ("plasticity", "cycle", "model", "--data", "text.txt", "--output", output, *options, *more)
        return start_pnn(*words, patches={"pnn.figures.plasticity.CYCLE_FIGURES": {}})

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
