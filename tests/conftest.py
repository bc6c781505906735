"""What several test files share: tiny runs, and the command line called in this process."""

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

pytest.register_assert_rewrite("habits")  # their assertions explain themselves too
gc.disable()  # until all is imported: there is no garbage in it

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for the hub
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # as the command sets it, too late for this process
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side; also what makes sums come out in one order

import torch  # noqa: E402

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: its kernels then run on the CPU

TINY = {
    "model": {"type": "pnn", "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "initializer_range": 0.1},
    "data": {"train": "synthetic", "synthetic_paragraphs": 400, "validation_sequences": 50, "max_length": 64},
    "training": {
        "max_steps": 40,
        "batch_size": 8,
        "effective_batch_size": 16,
        "learning_rate": 2.0e-3,
        "warmup_steps": 5,
        "log_every": 1,
        "evaluate_every": 20,
        "save_every": 7,
        "tensorboard": False,
    },
}


def pytest_collection_finish():
    gc.freeze()  # what was imported is never looked at again: half of what looking for garbage takes
    gc.enable()


def merged(base: dict, changes: dict) -> dict:
    out = dict(base)
    for key, value in changes.items():
        out[key] = merged(base.get(key, {}), value) if isinstance(value, dict) else value
    return out


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory) -> Path:
    """Token shards, shared by all tests of a worker."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture(scope="session")
def write_config(prepared_folder):
    """Write a tiny config with changes to a YAML file: `write_config(path, training={"max_steps": 3})`."""

    def write(path: Path, **changes) -> Path:
        config = merged(merged(TINY, {"data": {"prepared": str(prepared_folder)}}), changes)
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.fixture
def tiny_config(tmp_path, write_config):
    def write(name: str = "tiny", **changes) -> Path:
        return write_config(tmp_path / f"{name}.yaml", **changes)

    return write


@pytest.fixture
def pnn_command(monkeypatch, capsys):
    """Call the command line in this process: `code, out, err = pnn_command("train", "x.yaml")`."""

    def call(*arguments) -> tuple[int, str, str]:
        from pnn.cli import main

        monkeypatch.setattr(sys, "argv", ["pnn", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="session", autouse=True)
def _brief_timing():
    """A model's speed is measured, in as little time as that can be done."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pnn.plasticity.measure.SECONDS", 0.0)
        yield


@pytest.fixture
def small_product(monkeypatch):
    """What the machine's rate is measured with, where the rate is not looked at."""
    from pnn.bench.timing import Budget

    monkeypatch.setattr("pnn.bench.timing.CPU_PRODUCT", 64)
    monkeypatch.setattr("pnn.bench.timing.SUSTAINED", Budget(seconds=0.01, blocks=2, warmup=1))


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made but not drawn, which takes longest. tests/figures draws each of them."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **how: file.write(b"\x89PNG"))


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    from forking import Server

    server = Server(tmp_path_factory.mktemp("output"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def start_pnn(fork_server):
    """The command line in a real process: `process = start_pnn("train", "x.yaml")`."""
    return fork_server.start


@pytest.fixture
def forked_python(fork_server, monkeypatch):
    """Where Python is started by its path, also by torchrun, a process is forked: same words, folder, environment, outputs and
    exit code. tests/training/test_launch.py has launchers that start new Pythons."""
    monkeypatch.setattr("sys.executable", str(fork_server.python()))
    monkeypatch.setenv("PYTHON_EXEC", str(fork_server.python()))


@pytest.fixture
def forked_jobs(start_pnn, monkeypatch):
    """Trainings that a sweep or the quickstart starts are forked too. tests/cli/test_commands.py has a quickstart, and
    tests/test_sweep.py a sweep, that starts new Pythons."""

    def start(job, threads, log):
        return start_pnn(*job.words, output=Path(f"/proc/{os.getpid()}/fd/{log.fileno()}"))

    monkeypatch.setattr("pnn.training.jobs.Job.start", start)
    monkeypatch.setattr("pnn.training.jobs.POLL", 0.02)


@pytest.fixture(scope="session")
def start_processes(start_pnn):
    """Several at once that know of each other, as launchers start them: `start_processes(2, "train", "x.yaml")`."""
    from forking import free_port

    def start(count: int, *arguments, script: Path | None = None):
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)} for rank in range(count)]
        of_one = [group | rank for rank in ranks] if count > 1 else [{}]
        return [start_pnn(*arguments, script=script, env={**os.environ, **more}) for more in of_one]

    return start


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory, prepared_folder) -> Path:
    """A finished tiny run. Copy it before changing anything."""
    from pnn.config import RunConfig, from_dict, validate
    from pnn.training.run import train_run

    run = tmp_path_factory.mktemp("trained") / "tiny"
    config = merged(TINY, {"name": "tiny", "data": {"prepared": str(prepared_folder)}, "training": {"max_steps": 20}})
    train_run(validate(from_dict(RunConfig, config)), run, quiet=True)
    return run


@pytest.fixture(scope="module")  # while it runs, nothing else in this process can run an event loop
def chromium():
    """This machine's own browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
