"""`pnn compare` as people type it: the table, the JSON, and every way to get it wrong."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

ABLATIONS = Path(__file__).parents[2] / "docs" / "ablations.md"


@pytest.fixture
def two(trained_run, tmp_path):
    """A trained run, copied twice."""
    for name in ("first", "second"):
        shutil.copytree(trained_run, tmp_path / name, symlinks=True)
    return tmp_path / "first", tmp_path / "second"


def fails(pnn_command, *arguments, says):
    code, out, err = pnn_command("compare", *arguments)
    lines = [line for line in err.splitlines() if line.startswith("pnn: ")]
    assert (code, len(lines), out) == (2, 1, ""), err
    assert "Traceback" not in err
    for text in says:
        assert text in lines[0], lines[0]


def test_the_table_says_what_the_json_holds(pnn_command, two, tmp_path):
    out_file = tmp_path / "comparison.json"
    code, out, err = pnn_command("compare", *two, "--output", out_file)
    assert code == 0, err
    result = json.loads(out_file.read_text())
    for run in result["runs"]:
        assert run["name"] in out
        assert f"{run['parameters'] / 1000:.1f}K" in out
        assert f"{100 * run['accuracy']:.1f}" in out
        assert f"{run['loss']:.3f}" in out
    assert "second gets as many right as first in every sequence: equal" in out
    code, printed, err = pnn_command("compare", *two, "--json")
    assert code == 0, err
    assert json.loads(printed) == result  # and again the same


def test_several_differences_are_counted(pnn_command, two, tmp_path):
    shutil.copytree(two[0], tmp_path / "third", symlinks=True)
    code, out, err = pnn_command("compare", *two, tmp_path / "third", "--sequences", 20)
    assert code == 0, err
    assert "2 differences at once" in out
    assert "20 sequences of synthetic" in out


def test_other_text(pnn_command, two, tmp_path):
    (tmp_path / "text.txt").write_text("the fox of avon wore amber hats . it has old amber boots .\n" * 20)
    pattern = tmp_path / "tex[t].txt"  # not for rich to read as markup
    code, out, err = pnn_command("compare", *two, "--data", pattern, "--json")
    assert code == 0, err
    assert json.loads(out)["sequences"] == 20
    code, out, err = pnn_command("compare", *two, "--data", pattern)
    assert code == 0, err
    assert "tex[t].txt" in out.replace("\n", "")


def test_bad_input_is_a_sentence_and_nothing_is_written(pnn_command, two, tmp_path):
    first, second = two
    out = tmp_path / "out.json"
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "one.txt").write_text("a single line of more than twenty characters\n")
    fails(pnn_command, first, "--output", out, says=("at least two runs",))
    fails(pnn_command, first, first, "--output", out, says=("the same checkpoint",))
    best = (first / "checkpoints" / "best").resolve()
    fails(pnn_command, first, best, "--output", out, says=("the same checkpoint", str(best)))
    fails(pnn_command, first, empty, "--output", out, says=(str(empty), "holds no checkpoint"))
    fails(pnn_command, first, tmp_path / "nowhere", "--output", out, says=("no run or checkpoint", "nowhere"))
    fails(pnn_command, first, second, "--data", tmp_path / "no.txt", "--output", out, says=("no.txt",))
    fails(pnn_command, first, second, "--data", tmp_path / "one.txt", "--output", out, says=("too little text",))
    fails(pnn_command, first, second, "--undo-wikitext-marks", "--output", out, says=("--data",))
    fails(pnn_command, first, second, "--output", tmp_path / "no" / "out.json", says=("there is no folder",))
    fails(pnn_command, first, second, "--output", empty, says=("is a folder",))
    assert not out.exists()
    assert not (tmp_path / "no").exists()
    assert not any(empty.iterdir())


def test_a_damaged_checkpoint_is_not_compared(pnn_command, two):
    weights = (two[1] / "checkpoints" / "best").resolve() / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[len(raw) // 2] ^= 1
    weights.write_bytes(raw)
    fails(pnn_command, *two, says=("model.safetensors", "checksum"))


def test_the_runs_are_left_as_they_were(pnn_command, two):
    before = {path: path.stat().st_mtime_ns for run in two for path in run.rglob("*")}
    assert pnn_command("compare", *two)[0] == 0
    assert {path: path.stat().st_mtime_ns for run in two for path in run.rglob("*")} == before


def test_the_help_has_an_example(pnn_command):
    code, out, _ = pnn_command("compare", "--help")
    assert code == 0
    assert "Example: pnn compare" in out


def documented():
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", ABLATIONS.read_text(encoding="utf-8"), flags=re.S))
    return [line for line in blocks.splitlines() if line.startswith("pnn ")]


def parsed(command):
    from typer.main import get_command

    from pnn.cli import app, compare, train  # noqa: F401  (each registers its command)

    words = shlex.split(command)
    assert words[0] == "pnn"
    return get_command(app).commands[words[1]].make_context(words[1], words[2:]).params


@pytest.mark.parametrize("command", documented())
def test_the_documented_ablations_can_be_trained(pnn_command, command, monkeypatch):
    """Each command goes through the real parser, and its config with its settings becomes a model."""
    from pnn.models.sections import build_model, model_config
    from pnn.training import run

    if command.startswith("pnn compare "):
        assert parsed(command)["runs"]
        return
    started = []
    monkeypatch.setattr(run, "train_run", lambda config, folder, resume: started.append((config, folder)))
    code, _, err = pnn_command(*shlex.split(command)[1:])
    assert code == 0, err
    ((config, folder),) = started
    with torch.device("meta"):
        model = build_model(model_config(config.model, vocab_size=80))
    name = folder.name
    if steps := re.search(r"steps_(\d)", name):
        assert model.config.num_steps == int(steps[1])
    if width := re.search(r"ffn_(\d+)", name):
        assert model.config.intermediate_size == int(width[1])
    assert (model.config.gate == "none") == ("no_gate" in name)
    assert model.config.tie_word_embeddings == ("tied_head" in name)
    assert model.config.delta_norm == ("published" in name)
    assert model.config.num_refiners == (4 if "four_refiners" in name else 1)


def test_the_documented_counts_are_the_models():
    from pnn.config import load_config
    from pnn.models.sections import build_model, model_config

    rows = re.findall(r"^\| (`.*?) \|.*\| ([\d,]+) \|$", ABLATIONS.read_text(encoding="utf-8"), flags=re.M)
    names = [(name, int(number.replace(",", ""))) for cell, number in rows for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) == 10
    for name, number in names:
        with torch.device("meta"):
            model = build_model(model_config(load_config(name).model))
        assert sum(p.numel() for p in model.parameters()) == number, name
