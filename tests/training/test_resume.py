"""Real processes, killed for real: a resumed run must end with the same bits as one that was never stopped."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
from forking import Process

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(start_pnn):
    return lambda config, run, *more: start_pnn("train", config, "--output", run, *more)


def finish(process: Process, expected: int = 0) -> str:
    assert process.wait() == expected, process.output()
    return process.output()


def wait_for_rows(run: Path, rows: int, process: Process) -> None:
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < rows:
        assert process.poll() is None, process.output()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def rows(run: Path) -> list[dict]:
    """The metrics, without what may differ: how fast it went."""
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("tokens_per_second", "seconds")} for row in parsed]


def assert_same_end(one: Path, other: Path) -> None:
    for file in ("model.safetensors", "optimizer.safetensors"):
        a, b = (run / "checkpoints" / "last" / file for run in (one, other))
        assert a.read_bytes() == b.read_bytes(), f"{file} differs"
    assert (one / "checkpoints" / "best").resolve().name == (other / "checkpoints" / "best").resolve().name
    assert rows(one) == rows(other)


@pytest.fixture(scope="module")
def unbroken(start, tmp_path_factory, write_config):
    """A run with dropout (its random numbers must come back too) that nothing interrupts."""
    folder = tmp_path_factory.mktemp("unbroken")
    config = write_config(folder / "tiny.yaml", model={"dropout": 0.1, "attention_dropout": 0.1})
    finish(start(config, folder / "run"))
    return config, folder / "run"


def test_killed_at_a_random_moment_and_resumed_ends_with_the_same_bits(start, unbroken, tmp_path):
    config, reference = unbroken
    run = tmp_path / "run"
    for attempt in range(2):  # killed twice, the second time while resuming
        process = start(config, run, *(["--resume"] if attempt else []))
        moment = random.randrange(1, 40)
        print(f"attempt {attempt}: kill -9 after {moment} more rows of metrics")
        done = (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0
        try:
            wait_for_rows(run, min(done + moment, 38) if not attempt else moment, process)
        finally:
            process.kill()
    finish(start(config, run, "--resume"))
    assert_same_end(reference, run)
    leftovers = [p.name for p in (run / "checkpoints").iterdir() if "partial" in p.name]
    assert not leftovers


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop_it_saves_first_and_goes_on_from_that_step(start, unbroken, tmp_path, number, code):
    config, reference = unbroken
    run = tmp_path / "run"
    process = start(config, run)
    wait_for_rows(run, 3, process)
    process.send_signal(number)
    output = finish(process, expected=code)
    assert "--resume" in output
    saved = json.loads((run / "checkpoints" / "last" / "trainer_state.json").read_text())["step"]
    assert saved == max(row["step"] for row in rows(run))  # nothing that was done is lost
    assert 3 <= saved < 40
    finish(start(config, run, "--resume"))
    assert_same_end(reference, run)


def test_told_to_stop_twice_it_still_saves(start, unbroken, tmp_path):
    """Schedulers signal a process and then its whole group."""
    config, _ = unbroken
    run = tmp_path / "run"
    process = start(config, run)
    wait_for_rows(run, 3, process)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    finish(process, expected=143)
    assert (run / "checkpoints" / "last" / "model.safetensors").exists()


def test_told_to_stop_when_updates_no_longer_listen_it_ends_with_the_same_code(pnn_command, tiny_config, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("pnn.training.run.train_run", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    code, _, _ = pnn_command("train", tiny_config("pnn"))
    signal.signal(signal.SIGTERM, before)
    assert code == 143


def test_resuming_a_run_that_has_no_checkpoint_yet_starts_it(start, unbroken, tmp_path):
    config, reference = unbroken
    run = tmp_path / "run"
    process = start(config, run)
    wait_for_rows(run, 1, process)
    process.kill()
    for folder in (run / "checkpoints").glob("*") if (run / "checkpoints").exists() else []:
        folder.unlink() if folder.is_symlink() else None
    finish(start(config, run, "--resume"))
    assert_same_end(reference, run)
