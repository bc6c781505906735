"""What earlier code wrote still loads and computes what it did: a small folder of each kind, and every committed config.
`fixtures/make.sh` says how the folders were made."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import pnn
from pnn.config import load_config, shipped_configs
from pnn.models.sections import model_config
from pnn.runs import read_json, read_metrics

FIXTURES = Path(__file__).parent / "fixtures"
ROOT = Path(__file__).parents[1]
RUNS = ("pnn", "bert", "ddl")


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """A folder with all of them, as they were left, to work in."""
    shutil.copytree(FIXTURES, tmp_path / "old", symlinks=True)
    (tmp_path / "old" / "shards").rename(tmp_path / "old" / "prepared")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def numbers(value, prefix=""):
    """Every number of a JSON value by its path."""
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {at: x for key, one in entries for at, x in numbers(one, f"{prefix}/{key}").items()}
    return {prefix: value} if isinstance(value, int | float) else {}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shards", ["there", "gone"])
def test_a_run_is_evaluated_as_it_was(old, pnn_command, run, shards):
    """But for intervals: those of few sequences have become wider, by Student's t."""
    if shards == "gone":
        shutil.rmtree("prepared")
    before = read_json(old / run / "evaluation.json")
    code, out, err = pnn_command("evaluate", run, "--json")
    assert code == 0, err
    found = numbers(json.loads(out))
    wanted = {key: value for key, value in numbers(before).items() if "interval" not in key}
    assert len(wanted) > 10
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_goes_on_where_it_was_stopped(old, pnn_command, run):
    before = read_metrics(old / run / "metrics.jsonl")
    prepared = sorted(Path("prepared").iterdir())
    code, _, err = pnn_command("train", f"{run}/config.yaml", "--output", run, "--resume")
    assert code == 0, err
    after = read_metrics(old / run / "metrics.jsonl")
    assert [row["step"] for row in after] == [row["step"] for row in before]
    losses = [row["loss"] for row in before if "loss" in row]
    assert len(losses) == 6
    assert [row["loss"] for row in after if "loss" in row] == pytest.approx(losses, rel=1e-4)
    assert (old / run / "checkpoints" / "last").resolve().name == "step-000006"
    assert sorted(Path("prepared").iterdir()) == prepared  # the old shards are found again


def test_words_are_filled_in_and_texts_continued(old, pnn_command):
    def rows(*command):
        code, out, err = pnn_command(*command, "--json")
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    for row, wanted in zip(rows("fill", "pnn", "--file", _texts(old)), _lines(old / "fill.jsonl"), strict=True):
        for one, other in zip(row["predictions"][0], wanted["predictions"][0], strict=True):
            assert one["token"] == other["token"]
            assert one["probability"] == pytest.approx(other["probability"], rel=1e-4)
    (wanted,) = _lines(old / "generate.jsonl")
    (row,) = rows("generate", "ddl", wanted["prompt"], "--temperature", "0", "--max-new-tokens", "8")
    assert row["continuation"].split() == wanted["continuation"].split()


def _texts(old: Path) -> Path:
    (old / "texts.txt").write_text("".join(row["text"] + "\n" for row in _lines(old / "fill.jsonl")))
    return old / "texts.txt"


def _lines(path: Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_models_give_the_logits_that_they_gave(old):
    models = {
        "exported": transformers.AutoModelForMaskedLM.from_pretrained("exported"),
        "pruned": pnn.plasticity.load("pruned"),
        "classifier": transformers.AutoModelForSequenceClassification.from_pretrained("classifier/checkpoints/best"),
    }
    assert len(pnn.plasticity.heads(models["pruned"])) == 2
    wanted = read_json(old / "logits.json")
    for name, model in models.items():
        with torch.no_grad():
            found = model.eval()(torch.arange(5, 15)[None]).logits.flatten()[:40]
        assert found.tolist() == pytest.approx(wanted[name], abs=1e-5), name


def test_exported_code_runs_without_the_package(old):
    code = (
        "import sys; sys.modules['pnn'] = None\n"
        "import json, torch, transformers\n"
        "model = transformers.AutoModelForMaskedLM.from_pretrained('exported', trust_remote_code=True).eval()\n"
        "print(json.dumps(model(torch.arange(5, 15)[None]).logits.flatten()[:40].tolist()))"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(old / "modules"), "HF_HOME": str(old / "hf")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == pytest.approx(read_json(old / "logits.json")["exported"], abs=1e-5)


def test_a_fine_tuned_model_is_exported(old, pnn_command):
    code, _, err = pnn_command("export", "classifier", "--output", "again")
    assert code == 0, err
    assert "matthews" in (old / "again" / "README.md").read_text()


@pytest.mark.parametrize("path", [*sorted(ROOT.glob("results/**/*.yaml")), *shipped_configs().values()], ids=str)
def test_every_committed_config_is_read(path, tmp_path):
    config = load_config(str(path))
    assert model_config(config.model).hidden_size > 0
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(str(tmp_path / "again.yaml")) == config
