"""Text that a model's vocabulary cannot express: every command that measures on it says so, and what is kept does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from pnn.data import synthetic
from pnn.numbers import unknown_tokens
from pnn.report.page import write_report

FIXTURES = Path(__file__).parents[1] / "fixtures"
NOTE = r"note: {} % of the tokens of {} are \[UNK\] to this model: its numbers say {}"
LITTLE = "little about this text"


@pytest.fixture
def write(tmp_path):
    """A text of the embedded language's words of which every so many is none."""

    def text(name: str, every: int | None) -> Path:
        words = [line.split() for line in synthetic.paragraphs(40, seed=5)]
        strange = iter(range(10**6))
        lines = [" ".join("Zebra" if every and next(strange) % every == 0 else word for word in line) for line in words]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    return text


@pytest.fixture
def run(tmp_path):
    def copied(name: str) -> Path:
        folder = shutil.copytree(FIXTURES / name, tmp_path / name)
        config = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(re.sub(r"prepared: .*", f"prepared: {tmp_path / 'prepared'}", config))
        return folder

    return copied


@pytest.mark.parametrize("kind", ["pnn", "ddl"])
def test_evaluation_says_and_keeps_it(pnn_command, run, write, kind):
    strange, known = write("strange.txt", 2), write("known.txt", None)
    folder = run(kind)
    code, out, err = pnn_command("evaluate", folder, "--data", strange, "--data", known)
    assert code == 0, err
    assert re.search(NOTE.format(50, re.escape(str(strange)), LITTLE), err), err
    assert err.count("[UNK]") == 1
    kept = json.loads((folder / "evaluation.json").read_text())
    assert "unknown_tokens" not in kept  # its own text
    assert "unknown_tokens" not in kept["sets"][str(known)]
    assert kept["sets"][str(strange)]["unknown_tokens"] == pytest.approx(0.5, abs=0.01)
    if kind == "ddl":
        assert {"bits_per_byte", "word_perplexity"} <= kept["sets"][str(known)].keys()
        assert not {"bits_per_byte", "word_perplexity"} & kept["sets"][str(strange)].keys()
    code, out, err = pnn_command("evaluate", folder, "--data", strange, "--json")
    assert code == 0, err
    assert "[UNK] to this model" in err
    assert json.loads(out)["sets"][str(strange)]["unknown_tokens"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("kind", ["pnn", "ddl"])
def test_a_report_says_it(pnn_command, undrawn, run, write, kind):
    folder, strange = run(kind), write("strange.txt", 2)
    assert pnn_command("evaluate", folder, "--data", strange)[0] == 0
    page = write_report([folder], folder / "report.html").read_text().replace("\u00a0", " ")
    assert "50 % of the tokens [UNK]" in page
    assert "are [UNK] to this model" not in page  # of its own text it knows every word
    held = folder / "evaluation.json"
    result = json.loads(held.read_text())
    result = {key: value for key, value in result.items() if key not in ("by_kind", "ceiling")}
    held.write_text(json.dumps({**result, **result["sets"][str(strange)]}))
    page = write_report([folder], folder / "report.html").read_text().replace("\u00a0", " ")
    assert f"But 50 % of the tokens of {strange} are [UNK] to this model: its numbers say {LITTLE}." in page


def test_a_comparison_says_it(pnn_command, run, write, tmp_path):
    strange = write("strange.txt", 2)
    code, out, err = pnn_command("compare", run("pnn"), run("bert"), "--data", strange)
    assert code == 0, err
    assert f"50 % of the tokens of {strange} are [UNK] to these models: their numbers say {LITTLE}." in out
    code, out, _ = pnn_command("compare", tmp_path / "pnn", tmp_path / "bert", "--data", write("known.txt", None))
    assert (code, "[UNK]" in out) == (0, False)


def test_decoders_are_compared_without_bits_of_bytes_that_are_not_there(pnn_command, run, write, tmp_path):
    shutil.copytree(run("ddl"), tmp_path / "same")
    two = ("compare", tmp_path / "ddl", tmp_path / "same", "--data", write("strange.txt", 2))
    code, out, err = pnn_command(*two, "--json")
    assert code == 0, err
    assert json.loads(out)["unknown_tokens"] == pytest.approx(0.5, abs=0.01)
    assert not any("bits_per_byte" in one for one in json.loads(out)["runs"])
    code, out, err = pnn_command(*two)
    assert (code, "[UNK] to these models" in out) == (0, True), err


def test_what_reorganises_a_model_says_it(pnn_command, run, write, tmp_path):
    strange, folder = write("strange.txt", 2), run("ddl")
    small = ("--parameters", "-5%", "--kinds", "neurons", "--learn-steps", 1, "--output", tmp_path / "small")
    for command in (("shrink", folder, *small), ("plasticity", "score", folder)):
        code, _, err = pnn_command(*command, "--data", strange)
        assert code == 0, err
        assert len(re.findall(NOTE.format(50, re.escape(str(strange)), LITTLE), err)) == 1, err
    code, _, err = pnn_command("plasticity", "score", folder, "--data", write("known.txt", None))
    assert (code, "[UNK]" in err) == (0, False)


def test_few_unknown_words_are_told_for_what_they_are(pnn_command, run, write):
    folder, some, hardly = run("ddl"), write("some.txt", 50), write("hardly.txt", 150)
    code, out, err = pnn_command("evaluate", folder, "--data", some, "--data", hardly, "--json")
    assert code == 0, err
    sets = json.loads(out)["sets"]
    assert re.search(NOTE.format(r"\d\.\d", re.escape(str(some)), "nothing about what these stand for"), err), err
    assert str(hardly) not in err
    for one in sets.values():
        assert 0 < one["unknown_tokens"] < 0.03
        assert "bits_per_byte" in one


def test_a_share_in_words() -> None:
    assert unknown_tokens(0.01, "a.txt") is None
    assert unknown_tokens(0.794, "a.txt") == "79 % of the tokens of a.txt are [UNK] to this model: its numbers say " + LITTLE
    few = unknown_tokens(0.023, "a.txt", "their")
    assert few == "2.3 % of the tokens of a.txt are [UNK] to these models: their numbers say nothing about what these stand for"
