"""Out of memory: one sentence that says what to change, exit code 2, and a run folder that can be gone on with.

The error is raised by a hook in a real run: CUDA's by its type (there is no GPU here to fill), the host's by asking for more
than there is.
"""

import json
import os
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from pnn.memory import is_out_of_memory, out_of_memory_says
from pnn.models import PNNForMaskedLM, PNNModel
from pnn.runs import verify_checkpoint

TOO_MUCH = 1 << 55


def cuda():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.49 GiB.")


def host():
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def numpy():
    np.empty(TOO_MUCH, dtype=np.uint8)


def wrapped():
    """As a recorded pass does it: the graph that cannot be ended complains louder than the memory that ended it."""
    try:
        cuda()
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@contextmanager
def memory_for(calls, kind, fail=cuda):
    """Modules of this type can be called so often; the next call finds no memory."""
    left = [calls]

    def hook(module, inputs):
        if isinstance(module, kind):
            left[0] -= 1
            if left[0] < 0:
                fail()

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def sentence(called):
    code, _, err = called
    assert code == 2, err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("pnn: ")]
    assert len(lines) == 1, err
    return lines[0]


@pytest.mark.parametrize("fail", [cuda, host, numpy, wrapped])
def test_every_kind_is_known_and_nothing_else(fail):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        fail()
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(ValueError, match="a bug"), out_of_memory_says(lambda: ""):
        raise ValueError("a bug")


@pytest.mark.parametrize("fail", [cuda, host, numpy, wrapped])
def test_while_training_then_resumed_with_a_smaller_batch(pnn_command, tiny_config, tmp_path, fail):
    config, run = tiny_config(training={"max_steps": 10, "save_every": 4, "evaluate_every": 100}), tmp_path / "run"
    with memory_for(13, PNNForMaskedLM, fail):  # two micro-batches an update: it ends in the seventh
        said = sentence(pnn_command("train", config, "--output", run))
    for words in ("out of memory at step 7", "8 sequences", "--batch-size 4", "batch of 16", "step-000004", "--resume"):
        assert words in said
    verify_checkpoint((run / "checkpoints" / "last").resolve())
    assert not list((run / "checkpoints").glob(".*"))
    code, _, err = pnn_command("train", config, "--output", run, "--resume", "--batch-size", "4")
    assert code == 0, err
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 11))
    assert (run / "evaluation.json").exists()


def test_before_the_first_checkpoint_and_with_nothing_left_to_halve(pnn_command, tiny_config, tmp_path):
    config = tiny_config(training={"batch_size": 1, "max_steps": 2})
    with memory_for(0, PNNForMaskedLM):
        said = sentence(pnn_command("train", config, "--output", tmp_path / "run"))
    for words in ("at step 1", "data.max_length", "no checkpoint was saved yet"):
        assert words in said
    assert "--batch-size" not in said
    code, _, err = pnn_command("train", config, "--output", tmp_path / "run", "--resume")
    assert code == 0, err


def test_while_evaluating_during_training(pnn_command, tiny_config, tmp_path):
    config, run = tiny_config(training={"max_steps": 6, "save_every": 2, "evaluate_every": 3}), tmp_path / "run"
    with memory_for(6, PNNModel):  # three updates of two micro-batches
        said = sentence(pnn_command("train", config, "--output", run))
    for words in ("at step 3", "--set evaluation.batch_tokens=8192", "step-000002", "--resume"):
        assert words in said
    code, _, err = pnn_command("train", config, "--output", run, "--resume", "--set", "evaluation.batch_tokens=8192")
    assert code == 0, err


@pytest.mark.parametrize("fail", [cuda, host])
def test_while_evaluating_and_filling(pnn_command, trained_run, tmp_path, fail):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    before = (run / "evaluation.json").read_bytes()
    with memory_for(0, PNNModel, fail):
        said = sentence(pnn_command("evaluate", run))
        assert f"pnn evaluate {run} --batch-tokens 8192" in said
        said = sentence(pnn_command("fill", run, "the old [MASK] sat .", "--batch-tokens", "64"))
        assert f"pnn fill {run} --batch-tokens 32" in said
    assert (run / "evaluation.json").read_bytes() == before
    code, _, err = pnn_command("evaluate", run, "--batch-tokens", "100")
    assert code == 0, err
    after = json.loads((run / "evaluation.json").read_text())
    assert after["loss"] == pytest.approx(json.loads(before)["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"vocab_size": 1 << 50}}, ("out of memory", "GB of weights", "would fit")),
        ({"model": {"vocab_size": 1 << 60}}, ("overflow",)),
        ({"model": {"num_steps": 10**9}}, ("model: num_steps is 1,000,000,000", "10,000")),
        ({"training": {"batch_size": 10**9, "effective_batch_size": 10**9}}, ("out of memory", "smaller model or batch")),
    ],
)
def test_what_cannot_fit_is_told_before_anything_is_allocated(pnn_command, tiny_config, tmp_path, changes, words):
    said = sentence(pnn_command("train", tiny_config(**changes), "--output", tmp_path / "run"))
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists()


ONE_OF_TWO = """
import os, sys
sys.path.insert(0, {folder!r})
from test_out_of_memory import PNNForMaskedLM, memory_for
from pnn.cli import main
with memory_for(9 if os.environ["RANK"] == {rank!r} else 1000, PNNForMaskedLM):
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_process_of_two_does_not_keep_the_other_waiting(start_processes, pnn_command, tiny_config, tmp_path, rank):
    config, run, script = tiny_config(training={"max_steps": 20, "save_every": 4}), tmp_path / "run", tmp_path / "train.py"
    script.write_text(ONE_OF_TWO.format(folder=os.path.dirname(__file__), rank=rank))
    processes = start_processes(2, "train", config, "--output", run, script=script)
    codes = [process.wait(120) for process in processes]  # gloo would wait for half an hour
    failed = processes[int(rank)]
    assert codes[int(rank)] == 2, failed.output()
    assert codes[1 - int(rank)] != 0
    assert "pnn: out of memory at step 10" in failed.output()
    assert "--batch-size 4" in failed.output()
    assert (run / "checkpoints" / "last").resolve().name == "step-000008"
    code, _, err = pnn_command("train", config, "--output", run, "--resume")  # one process can go on with it
    assert code == 0, err
