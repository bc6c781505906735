"""The launcher's files in launch/: accelerate reads them, and processes that it starts by them train together. Without GPUs the
same files start CPU processes (gloo), and two nodes are two launchers on one machine."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from forking import free_port

from pnn.config import load_config
from pnn.errors import UserError
from pnn.training.updates import fitting_batch_size

LAUNCH = Path(__file__).parents[2] / "launch"
FILES = {"one_node.yaml": (1, 8), "two_nodes.yaml": (2, 16)}


@pytest.mark.parametrize("name", FILES)
def test_accelerate_reads_the_file_and_the_papers_batch_can_be_shared(name):
    machines, processes = FILES[name]
    config = load_config_from_file(str(LAUNCH / name))  # an unknown key is an error
    assert (config.distributed_type, config.num_machines, config.num_processes) == (
        DistributedType.MULTI_GPU,
        machines,
        processes,
    )
    command = next(line for line in (LAUNCH / name).read_text().splitlines() if "--config_file" in line)
    assert f"--config_file launch/{name}" in command
    arguments = ["--config_file", str(LAUNCH / name), "--machine_rank", "1", "-m", "pnn", "train", "pnn_wikitext103"]
    parsed, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    assert (parsed.multi_gpu, parsed.num_processes, parsed.machine_rank) == (True, processes, 1)
    assert parsed.training_script_args == ["train", "pnn_wikitext103"]
    batch_size = fitting_batch_size(load_config("pnn_wikitext103").training.effective_batch_size, processes, 384)
    assert f"--batch-size {batch_size}" in (LAUNCH / name).read_text()


def test_a_batch_size_that_the_processes_cannot_share_is_answered_with_one_that_they_can():
    from pnn.training.updates import Plan

    with pytest.raises(UserError, match=r"384 × 8 processes: --batch-size 144 fits"):
        Plan.of(load_config("pnn_wikitext103"), None, processes=8)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="choose one that 7 divides"):
        Plan.of(load_config("pnn_wikitext103"), None, processes=7)  # type: ignore[arg-type]


def test_torchrun_hands_on_every_option_of_pnn_train():
    """It looks for abbreviations of its own options behind the script too: `--run` would not arrive. (Behind its parser it is
    what `accelerate launch` calls, below.)"""
    import typer
    from torch.distributed.run import parse_args

    from pnn.cli import app, evaluate, train  # noqa: F401  (a command registers itself; one alone would have no name)

    options = [name for option in typer.main.get_command(app).commands["train"].params for name in option.opts if "--" in name]
    assert "--output" in options
    for option in options:
        words = ["train", "config.yaml", option, "value"]
        assert parse_args(["--nproc-per-node", "2", "-m", "pnn", *words]).training_script_args == words
    with pytest.raises(SystemExit):  # the trap is still there
        parse_args(["--nproc-per-node", "2", "-m", "pnn", "train", "config.yaml", "--run", "value"])


def abort(nodes) -> None:
    """End the launchers that have not ended, and what they started. Each process says where it is."""
    of_nodes = [psutil.Process(node.pid) for node in nodes if node.poll() is None]
    for process in [child for one in of_nodes for child in [*one.children(recursive=True), one]]:
        process.send_signal(signal.SIGABRT)


@pytest.mark.slow
def test_two_nodes_train_together(start_pnn, tiny_config, tmp_path):
    """The launchers are forked, the processes that they start are new Pythons. (Two processes of one node train in
    tests/docs/test_pages.py, by launch/one_node.yaml and the command of docs/howto/many_gpus.md.)"""
    config, run = tiny_config(training={"max_steps": 12, "save_every": 6, "evaluate_every": 12}), tmp_path / "run"
    launch = ["--config_file", LAUNCH / "two_nodes.yaml", "--num_processes", 2]
    launch += ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()]
    train = ["-m", "pnn", "train", config, "--output", run, "--set", "training.device=cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    nodes = [
        start_pnn(*launch, "--machine_rank", rank, *train, script=Path(accelerate_launch.__file__), env=environment)
        for rank in range(2)
    ]
    deadline = time.monotonic() + 240
    while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
        time.sleep(0.05)
    abort(nodes)
    assert all(node.wait() == 0 for node in nodes), "\n".join(node.output()[-9000:] for node in nodes)
    assert json.loads((run / "environment.json").read_text())["hardware"]["processes"] == 2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert (run / "evaluation.json").exists()
