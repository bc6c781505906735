"""A run on the CPU chooses its number of threads once, says it, writes it down, and keeps it when it is resumed."""

import json

import pytest
import torch

from pnn.training import threads
from pnn.training.threads import choose_threads, fastest


@pytest.fixture
def unset(monkeypatch):
    """As where nobody has said how many threads to take; two at most."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def planted(monkeypatch, times):
    """The layers are computed, but take the times that are written here."""

    def take_turns(runs, *args, **kwargs):
        for run in runs.values():
            run()
        return {name: times[name] for name in runs}

    monkeypatch.setattr(threads, "take_turns", take_turns)


def write_environment(run, number):
    run.mkdir()
    known = {"hardware": {"gpus": [], "cpu": "", "threads": number}, "versions": {"torch": "", "transformers": ""}}
    (run / "environment.json").write_text(json.dumps(known))


def test_the_number_that_takes_least_time_altogether_is_chosen(monkeypatch, unset):
    planted(monkeypatch, {"8": [1.0, 1.0, 9.0], "4": [1.5, 1.5, 1.5], "2": [2.0, 2.0, 2.0], "1": [3.0, 3.0, 3.0]})
    assert fastest(8, 16) == 4  # eight are faster in most turns and stall in one


def test_one_core_needs_no_measurement(monkeypatch):
    monkeypatch.setattr(threads, "take_turns", None)
    assert fastest(1, 16) == 1


def test_it_is_measured(unset):
    assert fastest(2, 64) in (1, 2)
    assert fastest(2, 10**8) in (1, 2)  # whoever asks for such a width is told so, but not by an allocator


def test_what_the_user_says_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_environment(tmp_path / "run", 2)
    assert choose_threads(tmp_path / "run", True, 16) == "with 1 thread (OMP_NUM_THREADS)"
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("before", [1, 2])
def test_a_resumed_run_takes_the_number_that_it_began_with(tmp_path, monkeypatch, unset, before):
    monkeypatch.setattr(threads, "fastest", None)
    write_environment(tmp_path / "run", before)
    assert choose_threads(tmp_path / "run", True, 16) == f"with {before} thread{'s' * (before == 2)}, as it began"
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("known", [64, None])
def test_where_that_number_is_not_to_be_had_it_is_chosen_anew(tmp_path, monkeypatch, unset, known):
    planted(monkeypatch, {"2": [5.0], "1": [3.0]})
    if known is not None:  # of a machine with more cores
        write_environment(tmp_path / "run", known)
    assert choose_threads(tmp_path / "run", True, 16) == "with 1 thread (2 are slower just now)"
    assert torch.get_num_threads() == 1


def test_a_run_says_and_records_it_and_leaves_the_process_as_it_was(tmp_path, monkeypatch, unset, pnn_command, tiny_config):
    planted(monkeypatch, {"2": [5.0], "1": [3.0]})
    config, run = tiny_config(), tmp_path / "run"
    code, _, err = pnn_command("train", config, "--output", run, "--max-steps", 2)
    assert code == 0, err
    assert "on cpu with 1 thread (2 are slower just now)" in err
    assert json.loads((run / "environment.json").read_text())["hardware"]["threads"] == 1
    assert torch.get_num_threads() == 2
    planted(monkeypatch, {"2": [3.0], "1": [5.0]})
    code, _, err = pnn_command("train", config, "--output", run, "--max-steps", 2, "--resume")
    assert code == 0, err
    assert "with 1 thread, as it began" in err
    assert json.loads((run / "environment.json").read_text())["hardware"]["threads"] == 1
