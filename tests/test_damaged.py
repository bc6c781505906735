"""What attacks found and was mended: files that say something else than they should, two processes at one folder, a kill in the
first moment of a study. Each ended in a traceback, a refusal to go on, or in nothing at all."""

from __future__ import annotations

import asyncio
import copy
import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from pnn import runs
from pnn.config import RunConfig
from pnn.data import run_tokens
from pnn.data.shards import TokenSet, read_manifest
from pnn.errors import UserError
from pnn.files import hold, let_go
from pnn.results import Environment, MaskedEvaluation, fits
from pnn.training.tracking import Metrics

FIXTURES = Path(__file__).parent / "fixtures"
SHARDS = FIXTURES / "shards" / "synthetic-255fa2ab993b"


def read(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def elsewhere(folder: Path):
    """The lock of another process: locks belong to open files, so a second one in this process is as good."""
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    yield
    os.close(other)


# Two processes --------------------------------------------------------------------------------------------------------


def test_a_folder_is_held_by_one_process_and_free_when_that_has_ended(tmp_path):
    with elsewhere(tmp_path), pytest.raises(UserError, match="another process is working in"):
        hold(tmp_path)
    hold(tmp_path)
    hold(tmp_path)  # once more by the same process: a notebook trains, then resumes
    probe = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    let_go(tmp_path)
    fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(probe)
    assert not list(tmp_path.iterdir())


def test_a_run_that_another_process_trains_is_not_touched(tmp_path):
    with elsewhere(tmp_path), pytest.raises(UserError, match="another process is working in"):
        runs.claim(tmp_path, RunConfig(), resume=True)
    assert not list(tmp_path.iterdir())


def test_a_run_that_another_process_began_meanwhile_is_not_begun_again(tmp_path):
    (tmp_path / "config.yaml").write_text("name: theirs\n")
    try:
        with pytest.raises(UserError, match="already holds another run"):
            runs.claim(tmp_path, RunConfig(), resume=False)
        assert (tmp_path / "config.yaml").read_text() == "name: theirs\n"
    finally:
        let_go(tmp_path)


def test_a_kill_while_old_checkpoints_go_leaves_none_of_them(tiny_config, tmp_path, monkeypatch):
    """The last thing that a run does with its checkpoints; nothing came after it that would have removed the rest."""
    from pnn.config import load_config
    from pnn.training import checkpoint
    from pnn.training.run import train_run

    class Killed(BaseException):
        pass

    def fatal(folder):
        if len(list(folder.parent.glob("step-*"))) > 2 and folder.parent.joinpath("step-000006").exists():
            raise Killed
        removed(folder)

    config = load_config(str(tiny_config(training={"max_steps": 6, "save_every": 2, "evaluate_every": 6})))
    removed = checkpoint.remove_folder
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "remove_folder", fatal)
        with pytest.raises(Killed):
            train_run(config, tmp_path / "run", quiet=True)
    train_run(config, tmp_path / "run", resume=True, quiet=True)
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert left == ["best", "last", "step-000004", "step-000006"]


# Prepared text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "80"),
        ("mean_length", None),
        ("dtype", "float64"),
        ("shards", []),
        ("shards", [{"tokens": "tokens-00000.bin"}]),
        ("recipe", {"source": {}}),
        ("text", {"lines_": 3}),
        ("text", {"lines": 3, "lines_cut": 2}),  # of no tokens
    ],
)
def test_a_manifest_with_other_values(tmp_path, key, value):
    shutil.copytree(SHARDS, tmp_path / "shards")
    manifest = read(SHARDS / "manifest.json")
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps(manifest | {key: value}))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path / "shards")


def test_a_manifest_names_files_of_its_own_folder_only(tmp_path):
    shutil.copytree(SHARDS, tmp_path / "shards")
    manifest = read(SHARDS / "manifest.json")
    manifest["shards"][0]["tokens"] = "../shards/tokens-00000.bin"
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path / "shards")


def test_lengths_that_are_not_those_of_the_tokens(tmp_path):
    shutil.copytree(SHARDS, tmp_path / "shards")
    lengths = tmp_path / "shards" / "lengths-00000.bin"
    raw = bytearray(lengths.read_bytes())
    raw[0] ^= 1
    lengths.write_bytes(raw)
    with pytest.raises(UserError, match="do not match"):
        TokenSet(tmp_path / "shards")


@pytest.mark.parametrize("damaged", ["[]", "{}x", '{"train": {"folder": "x"}}', '{"validation": 3}'])
def test_tokens_json_with_other_values(tmp_path, damaged):
    (tmp_path / "tokens.json").write_text(damaged)
    with pytest.raises(UserError, match=r"tokens\.json"):
        run_tokens.recorded(tmp_path)


# What a run says of itself --------------------------------------------------------------------------------------------


def test_metrics_lose_a_last_line_that_was_cut_off_and_nothing_else(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    assert runs.read_metrics(path) == [{"step": 1}, {"step": 2}]
    for damaged in (
        b'{"step": 1}\n{"st\n{"step": 3}\n',
        b'{"step": 1}\n\xff\n{"step": 3}\n',
        b'{"step": 1}\n3\n',
        b'{"loss": 1}\n',
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged in line"):
            Metrics(path, 3)
        assert path.read_bytes() == damaged  # resuming used to drop what followed


@pytest.mark.parametrize("run", ["pnn", "bert"])
def test_what_a_run_wrote_fits_and_what_was_damaged_does_not(run):
    evaluation = read(FIXTURES / run / "evaluation.json")
    assert fits(evaluation, MaskedEvaluation)
    assert fits(evaluation | {"of a later version": 1}, MaskedEvaluation)
    wrong = [
        None,
        [],
        {**evaluation, "accuracy": "0.5"},
        {**evaluation, "accuracy_interval": [0.5]},
        {**evaluation, "targets": True},
    ]
    wrong += [{key: value for key, value in evaluation.items() if key != "loss"}, {**evaluation, "sets": {"x": {}}}]
    assert not any(fits(one, MaskedEvaluation) for one in wrong)


def test_an_environment_of_another_kind(tmp_path):
    environment = read(FIXTURES / "pnn" / "environment.json")
    assert fits(environment, Environment)
    for key, value in (("git", 0.5), ("hardware", {"gpus": [1], "cpu": "x", "threads": 1}), ("versions", None)):
        damaged = copy.deepcopy(environment) | {key: value}
        (tmp_path / "environment.json").write_text(json.dumps(damaged))
        with pytest.raises(UserError, match=r"environment\.json"):
            runs.read_environment(tmp_path)


def test_an_evaluation_replaces_a_damaged_one(tmp_path):
    from pnn.evaluation.run import _tasks_in

    for damaged in ("0.5", "{", '{"tasks": 3}', '{"tasks": {"checkpoint": "x"}}'):
        (tmp_path / "evaluation.json").write_text(damaged)
        assert _tasks_in(tmp_path / "evaluation.json") is None


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "x"), ("intermediate_size", 10**30), ("vocab_size", [])])
def test_a_model_whose_config_has_other_values(tmp_path, key, value):
    from pnn.models.loading import load_model

    shutil.copytree(FIXTURES / "exported", tmp_path / "model")
    config = read(tmp_path / "model" / "config.json")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(UserError, match="model"):
        load_model(tmp_path / "model")


def test_a_reorganised_model_whose_heads_are_no_numbers(tmp_path):
    from pnn.models.loading import load_model

    shutil.copytree(FIXTURES / "pruned", tmp_path / "model")
    (tmp_path / "model" / "checksums.json").unlink()
    config = read(tmp_path / "model" / "config.json")
    config["head_map"][0][0] = "0"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="head_map"):
        load_model(tmp_path / "model")


def test_a_generation_config_that_cannot_be_used(pnn_command, tmp_path):
    shutil.copytree(next((FIXTURES / "ddl" / "checkpoints").glob("step-*")), tmp_path / "model")
    (tmp_path / "model" / "checksums.json").unlink(missing_ok=True)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"bos_token_id": [None]}))
    code, _, err = pnn_command("generate", tmp_path / "model", "the monk", "--max-new-tokens", 2)
    assert code == 2, err
    assert "generation_config.json" in err


def test_a_checkpoint_whose_tokenizer_has_lost_its_mask(pnn_command, trained_run, tmp_path):
    shutil.copytree(trained_run, tmp_path / "run", symlinks=True)
    for step in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (step / "checksums.json").unlink()
        (step / "tokenizer_config.json").unlink()
    assert pnn_command("evaluate", tmp_path / "run")[0] == 0  # the vocabulary still names it
    for file in (tmp_path / "run" / "checkpoints").glob("step-*/tokenizer.json"):
        file.write_text(file.read_text().replace('"[MASK]"', '"[HIDDEN]"'))
    code, _, err = pnn_command("evaluate", tmp_path / "run")
    assert code == 2, err
    assert "mask" in err


def test_an_update_that_breaks_the_weights_is_told(pnn_command, tiny_config, tmp_path):
    config = tiny_config(training={"max_steps": 1, "learning_rate": 1.0e30, "warmup_steps": 0})
    code, _, err = pnn_command("train", config, "--output", tmp_path / "run")
    assert code == 2
    assert "non-finite at step 1" in err


# A study's first moment -----------------------------------------------------------------------------------------------


def test_a_study_that_was_killed_before_its_plan_can_be_begun_again(tmp_path, monkeypatch):
    from pnn.files import is_taken
    from pnn.studies.plasticity import study
    from pnn.studies.plasticity.arms import StudySettings

    class Killed(BaseException):
        pass

    def fatal(path, value):
        raise Killed

    monkeypatch.setattr(study, "write_json", fatal)
    with pytest.raises(Killed):
        study._start(tmp_path / "study", [], StudySettings())
    assert not is_taken(tmp_path / "study")  # it used to hold folders, and no plan by which it is known


# The explorer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "status"), [(b'{"fn_index": 7}', 400), (b'{"fn_index": 1}', 500), (b"[", 500)])
def test_only_what_the_page_does_not_have_is_the_senders_mistake(body, status):
    from pnn.explore.server import KnownFunctions

    sent = []

    async def fails(scope, receive, send):
        assert (await receive())["body"] == body  # it was read before, and is there to be read again
        await send({"type": "http.response.start", "status": 500, "headers": []})

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    asked = {"type": "http", "method": "POST", "path": "/gradio_api/queue/join"}
    asyncio.run(KnownFunctions(fails, [0, 1])(asked, receive, send))
    assert sent[0]["status"] == status
