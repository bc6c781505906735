"""A run is measured on the tokens that it was trained and validated on, whatever has become of its text since."""

import json
import shutil
from pathlib import Path

import pytest

from pnn.runs import read_json

LINES = [f"the {one} fox sat on the {two} mat and slept" for one in ("old", "red", "sly", "fat") for two in ("wet", "dry")]


@pytest.fixture
def run(pnn_command, tiny_config, tmp_path) -> Path:
    """Trained on a text file of its own, with shards of its own."""
    (tmp_path / "text.txt").write_text("\n".join(LINES * 30))
    data = {"train": str(tmp_path / "text.txt"), "vocab_size": 60, "prepared": str(tmp_path / "prepared")}
    config = tiny_config(data=data, training={"max_steps": 4})
    code, _, err = pnn_command("train", config, "--output", tmp_path / "run")
    assert code == 0, err
    return tmp_path / "run"


def other_text(run: Path) -> None:
    (run.parent / "text.txt").write_text("\n".join(["an owl saw two grey geese over the pond"] * 240))


def no_text(run: Path) -> None:
    (run.parent / "text.txt").unlink()


def evaluated(pnn_command, run) -> tuple[dict, str]:
    code, out, err = pnn_command("evaluate", run, "--json")
    assert code == 0, err
    return json.loads(out), err


@pytest.mark.parametrize("change", [other_text, no_text])
def test_what_measures_a_run_reads_its_tokens(pnn_command, undrawn, run, tmp_path, change):
    before = read_json(run / "evaluation.json")
    assert pnn_command("train", run / "config.yaml", "--seed", 1, "--output", tmp_path / "another")[0] == 0
    change(run)
    result, err = evaluated(pnn_command, run)
    assert result == before
    assert "gone" not in err
    for command in (
        ("analyze", "convergence", run),
        ("evidence", run, "--experiment", "meg"),
        ("compare", run, tmp_path / "another"),
    ):
        code, _, err = pnn_command(*command)
        assert code == 0, err
    found = json.loads((run / "analysis" / "convergence.json").read_text())
    assert found["sequences"] == before["sequences"]
    assert pnn_command("report", run)[0] == 0


def test_shards_that_are_gone_are_made_again_from_the_same_text_only(pnn_command, run):
    before = read_json(run / "evaluation.json")
    shutil.rmtree(run.parent / "prepared")
    result, err = evaluated(pnn_command, run)
    assert result == before
    assert err.count("its token shards are gone") == 1
    assert "gone" not in evaluated(pnn_command, run)[1]  # they are there again
    shutil.rmtree(run.parent / "prepared")
    other_text(run)
    code, _, err = pnn_command("evaluate", run)
    assert code == 2
    assert "text.txt has changed since the run's tokens were made from it" in err
    no_text(run)
    code, _, err = pnn_command("evaluate", run)
    assert code == 2
    assert "its token shards are gone" in err
    assert "no corpus file matches" in err


def test_shards_are_found_where_the_config_says_after_a_move(pnn_command, run, tmp_path):
    before = read_json(run / "evaluation.json")
    no_text(run)
    (tmp_path / "prepared").rename(tmp_path / "moved")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(tmp_path / "prepared"), str(tmp_path / "moved")))
    result, err = evaluated(pnn_command, run)
    assert result == before
    assert "gone" not in err


def test_a_run_that_is_refused_keeps_its_record(pnn_command, run):
    before = (run / "tokens.json").read_text()
    other_text(run)
    code, _, err = pnn_command("train", run / "config.yaml", "--output", run, "--resume")
    assert code == 2
    assert "text or tokenizer is no longer" in err
    assert (run / "tokens.json").read_text() == before


def test_runs_of_earlier_versions_read_their_text(pnn_command, run):
    before = read_json(run / "evaluation.json")
    (run / "tokens.json").unlink()
    assert evaluated(pnn_command, run)[0] == before
    no_text(run)
    assert pnn_command("evaluate", run)[0] == 2


def test_a_model_with_a_shorter_input_is_compared_on_the_same_text_only(pnn_command, run, tmp_path):
    other = tmp_path / "other"
    code, _, err = pnn_command("train", run / "config.yaml", "--set", "data.max_length=12", "--output", other)
    assert code == 0, err
    code, out, err = pnn_command("compare", run, other, "--json")
    assert (code, json.loads(out)["max_length"]) == (0, 12), err
    other_text(run)
    code, _, err = pnn_command("compare", run, other)
    assert code == 2
    assert "has changed since the run's tokens were made from it" in err


def test_models_of_different_tokenizers_are_not_compared(pnn_command, run, tmp_path):
    other = tmp_path / "other"
    code, _, err = pnn_command("train", run / "config.yaml", "--set", "data.vocab_size=50", "--output", other)
    assert code == 0, err
    code, out, err = pnn_command("compare", run, other)
    assert (code, out) == (2, "")
    assert "have different tokenizers, so their accuracies per token do not compare" in err


@pytest.mark.parametrize("kind", ["ddl", "pnn"])
def test_a_decoders_tokenizer_serves_another_run(pnn_command, tiny_config, tmp_path, kind):
    decoder = {"type": "ddl", "num_hidden_layers": 1}
    config = tiny_config("decoder", model=decoder, training={"max_steps": 2})
    assert pnn_command("train", config, "--output", tmp_path / "decoder")[0] == 0
    tokenizer = {"tokenizer": str(tmp_path / "decoder" / "checkpoints" / "best")}
    config = tiny_config("other", model=decoder if kind == "ddl" else {}, data=tokenizer, training={"max_steps": 2})
    code, _, err = pnn_command("train", config, "--output", tmp_path / "other")
    assert code == 0, err
    assert evaluated(pnn_command, tmp_path / "other")[0] == read_json(tmp_path / "other" / "evaluation.json")
    if kind == "ddl":  # both split text alike
        for pair in (("decoder", "other"), ("other", "decoder")):
            code, _, err = pnn_command("compare", *(tmp_path / name for name in pair))
            assert code == 0, err


def test_an_encoders_lines_are_not_those_that_its_tokenizer_made_before_it_was_opened(pnn_command, tiny_config, tmp_path):
    config = tiny_config("decoder", model={"type": "ddl", "num_hidden_layers": 1}, training={"max_steps": 2})
    assert pnn_command("train", config, "--output", tmp_path / "decoder")[0] == 0
    tokenizer = {"tokenizer": str(tmp_path / "decoder" / "checkpoints" / "best")}
    for name, data in (("closed", {}), ("open", tokenizer)):
        config = tiny_config(name, data=data, training={"max_steps": 2})
        assert pnn_command("train", config, "--output", tmp_path / name)[0] == 0
    code, out, err = pnn_command("compare", tmp_path / "closed", tmp_path / "open")
    assert (code, out) == (2, "")
    assert "have different tokenizers" in err
