"""models/: the folder that models/build.py makes of a run, what works on it, and what is committed."""

import json
import runpy
import shutil
import sys
from importlib import util
from pathlib import Path

import pytest

from pnn.errors import UserError
from pnn.finetuning.run import Subject
from pnn.runs import find_checkpoint, verify_model

ROOT = Path(__file__).parents[1]
BOX = ROOT / "models" / "pnn-base"


def script(path: str):
    spec = util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(trained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(environment | {"git": {"commit": "c" * 40}}))
    return run


@pytest.fixture
def box(run, tmp_path, monkeypatch):
    """Weights in bf16, in several files."""
    monkeypatch.setattr("pnn.export.run.FILE_SIZE", "10KB")
    script("models/build.py").build(str(run), tmp_path / "box", results=tmp_path / "none")
    return tmp_path / "box"


def test_the_card_has_every_number_from_a_file(run, tmp_path):
    build = script("models/build.py")
    results = tmp_path / "results"
    results.mkdir()
    metrics = {
        "points_ahead_of_bert12": {"mean": 1.234, "low": -0.5, "high": 3.0},
        "points_ahead_of_bert4": {"mean": 0.21, "low": 0.1, "high": 0.3},
        "box_wikitext_valid": 0.51234,
        "box_rounded": {"value": 0.511, "interval": [0.5, 0.52], "mask_draws": 1},
    }
    (results / "result.json").write_text(json.dumps({"question": "Is it so?", "answer": "It is.", "metrics": metrics}))
    (results / "prompts_answers.json").write_text(json.dumps({"right": {"pnn": 14, "bert": 13}, "prompts": [{}] * 20}))
    (tmp_path / "downstream").mkdir()
    scores = {"stsb": {"pnn_rewrite": {"score": 0.8391}}, "sst2": {"bert4": {"score": 0.9}}}
    (tmp_path / "downstream" / "result.json").write_text(json.dumps({"metrics": scores}))
    build.build(str(run), tmp_path / "pnn-base", results=results)
    text = (tmp_path / "pnn-base" / "README.md").read_text()
    evaluation = json.loads((run / "evaluation.json").read_text())
    for known in (
        "\n# pnn-base\n",
        'from_pretrained("models/pnn-base", trust_remote_code=True)',
        f"| validation | {100 * evaluation['accuracy']:.1f} % |",
        "Measured before the weights were rounded to bf16.",
        "WikiText-103 valid, four draws of masks: 51.2 %",
        "in bf16, one draw of masks: 51.1 % (50.0–52.0)",
        "BERT with 12 layers: +1.23 points (−0.50 to +3.00)",
        "20 prompts that were written before the training: 14 by pnn, 13 by bert",
        "mean over seeds: stsb 83.9.",
        "commit `cccccccccccc`",
        "CC BY-SA 3.0",
        "Apache-2.0",
        "published under `mit`",
    ):
        assert known in text, known
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [f"## {t}" for t in ["Use", "Intended use", "Model", "Data", "Training", "Results", "Limits", "Licence"]]
    assert "FOLDER" not in text
    for licence in ("LICENSE", "LICENSE-vocabulary"):
        assert (tmp_path / "pnn-base" / licence).stat().st_size > 1000


def test_the_card_tells_of_the_boxs_own_form(tmp_path):
    """Which is not the one that stands first once there is a second."""
    compared = script("models/build.py").compared
    gap = {"mean": 9.0, "low": 8.0, "high": 10.0, "verdict": "won"}
    own = {"a": {"bert12": gap | {"mean": 1.0, "verdict": "too few seeds"}, "bert4": gap | {"mean": 2.0}}}
    metrics = {"points_ahead_of_bert12": gap, "points_ahead_of_bert4": gap}
    for more, said, unsaid in (({}, "+9.00", "+2.00"), ({"first_form": own}, "+2.00", "+9.00")):
        (tmp_path / "result.json").write_text(json.dumps({"metrics": metrics | more}))
        told = compared(tmp_path)
        assert said in told
        assert unsaid not in told
    assert "12 layers" not in told


def test_a_folder_is_replaced_only_if_asked_and_only_by_a_whole_one(run, box):
    build = script("models/build.py")
    (box / "mine.txt").write_text("kept")
    with pytest.raises(UserError, match="exists already: --overwrite replaces it"):
        build.build(str(run), box)
    (run / "evaluation.json").rename(run / "elsewhere.json")
    with pytest.raises(UserError, match="not a run that was measured"):
        build.build(str(run), box, overwrite=True)
    assert (box / "mine.txt").exists()
    (run / "elsewhere.json").rename(run / "evaluation.json")
    build.build(str(run), box, overwrite=True)
    assert not (box / "mine.txt").exists()
    assert {path.name for path in box.parent.iterdir()} == {"run", "box"}  # nothing is left beside
    (run / "environment.json").write_text("{}")
    with pytest.raises(UserError, match="names no commit"):
        build.build(str(run), box, overwrite=True)


@pytest.mark.parametrize("path", ["models/build.py", "results/better_than_bert/prompts.py"])
def test_mistakes_are_one_sentence(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path, str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / path), run_name="__main__")
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_damage_is_told_by_every_command(box, tmp_path, pnn_command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shard = sorted(box.glob("*.safetensors"))[1]
    assert len(list(box.glob("*.safetensors"))) > 2
    good = shard.read_bytes()

    def says(text):
        for command in (
            ("fill", box, "a [MASK]"),
            ("evaluate", box, "--data", "synthetic"),
            ("analyze", "convergence", box, "--data", "synthetic"),
            ("finetune", box, "--task", "cola", "--data", "glue"),
            ("export", box, "--output", "out", "--onnx"),
        ):
            code, _, err = pnn_command(*command)
            assert code == 2, err
            assert [line for line in err.splitlines() if line.startswith("pnn: ")] == [f"pnn: {text}"], command

    shard.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    says(f"{shard} does not match its checksum: the checkpoint is damaged")
    shard.unlink()
    says(f"{shard} is missing: the checkpoint is not whole")
    shard.write_bytes(good)
    assert pnn_command("fill", box, "the [MASK] .")[0] == 0


def test_a_misspelt_folder_is_not_looked_for_on_the_hub(tmp_path, pnn_command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "pnn-base").mkdir(parents=True)
    code, _, err = pnn_command("fill", "models/pnn-bse", "a [MASK]")
    assert (code, err.strip()) == (2, "pnn: no run or checkpoint at models/pnn-bse; did you mean models/pnn-base?")
    assert find_checkpoint("models/another") == "models/another"


def test_fine_tuning_knows_models_in_several_files_apart(box, tmp_path):
    def weights(folder):
        return Subject("", folder, None, None, 0).weights

    other = shutil.copytree(box, tmp_path / "other")
    assert weights(box) == weights(other) is not None
    shard = sorted(other.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    assert weights(box) != weights(other)


def test_prompts_count_first_guesses_that_are_right(run, box, tmp_path, monkeypatch, capsys):
    prompts = script("results/better_than_bert/prompts.py")
    monkeypatch.setattr(prompts, "HERE", tmp_path)
    asked = [{"text": "the fox has [MASK] boots .", "right": []}, {"text": "the [MASK] .", "right": ["no such word"]}]
    (tmp_path / "prompts.json").write_text(json.dumps(asked))
    first = prompts.answer({"box": str(box), "run": str(run)})
    assert first["right"] == {"box": 0, "run": 0}
    asked[0]["right"] = ["xyz", first["prompts"][0]["answers"]["box"]["token"]]
    (tmp_path / "prompts.json").write_text(json.dumps(asked))
    prompts.main([f"box={box}"])
    written = json.loads((tmp_path / "prompts_answers.json").read_text())
    assert written["right"] == {"box": 1}
    token = asked[0]["right"][1]
    table = capsys.readouterr().out
    assert f"| the fox has [MASK] boots . | **{token}** |" in table
    assert "| right of 2 | 1 |" in table


in_the_box = pytest.mark.skipif(not BOX.exists(), reason="models/pnn-base is not in this checkout")


@in_the_box
def test_the_committed_model_answers_as_the_readme_says(pnn_command):
    code, out, err = pnn_command("fill", BOX, "Paris is the [MASK] of France.", "The river flows into the Atlantic [MASK].")
    assert code == 0, err
    capital, ocean = (json.loads(line)["predictions"][0] for line in out.splitlines())
    said = ", ".join(f"{one['token']} {100 * one['probability']:.1f}" for one in capital[:3]).replace(",", " %,", 1)
    assert f"# {said}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert ocean[0]["token"] == "ocean"


@in_the_box
def test_the_readme_says_of_it_what_was_measured():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    metrics = json.loads((ROOT / "results" / "better_than_bert" / "result.json").read_text())["metrics"]
    answers = json.loads((ROOT / "results" / "better_than_bert" / "prompts_answers.json").read_text())
    half, whole = (row for row in metrics["steps"] if row["model"] == "pnn_rewrite")
    budget = metrics["models"]["pnn_rewrite"]["budgets"]["b"]
    assert f"It predicts {100 * metrics['box_wikitext_valid']:.1f} % of WikiText-103's masked tokens" in text
    assert f"{100 * half['accuracy']['value']:.1f} after one round, in half the time" in text
    assert 0.5 < whole["inference_tokens_per_second"] / half["inference_tokens_per_second"] < 0.55
    assert f"{answers['right']['pnn_base']} of {len(answers['prompts'])} prompts" in text
    assert f"It trained for {budget['training_minutes']:.0f} minutes on one H200" in text
    assert f"of {metrics['models']['pnn_rewrite']['parameters'] / 1e6:.1f}M parameters" in text


@in_the_box
def test_what_is_committed():
    for path in (ROOT / "models").rglob("*"):
        assert path.is_dir() or path.stat().st_size < 50_000_000, f"{path} is too large for git hosts"
    verify_model(BOX)
    listed = json.loads((BOX / "checksums.json").read_text())
    assert {path.name for path in BOX.iterdir()} - set(listed) <= {
        "README.md", "LICENSE", "LICENSE-vocabulary", "checksums.json", "1_Pooling"
    }  # fmt: skip


def test_an_export_of_it_keeps_its_card_and_licences(box, tmp_path, pnn_command):
    code, *_ = pnn_command("export", box, "--output", tmp_path / "again")
    assert code == 0
    text, before = ((folder / "README.md").read_text() for folder in (tmp_path / "again", box))
    for title in ("Data", "Training", "Limits"):
        parts = [one.partition(f"## {title}\n\n")[2].partition("\n\n## ")[0] for one in (text, before)]
        assert parts[0].split()[:6] == parts[1].split()[:6]
    assert "license: mit" in text
    for licence in ("LICENSE", "LICENSE-vocabulary"):
        assert (tmp_path / "again" / licence).read_bytes() == (box / licence).read_bytes()
