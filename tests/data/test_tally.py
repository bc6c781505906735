"""How much of a text the filter and max_length take away is counted exactly, kept, and told with what to change."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from pnn.config import DataConfig
from pnn.data.shards import TokenSet, left_out, prepare
from pnn.data.tally import Tally

FIXTURE = Path(__file__).parents[1] / "fixtures" / "shards"
WORDS = [f"word{i}" for i in range(30)]


def quiet(items, label):
    return items


@pytest.fixture
def text(tmp_path):
    """Lines of many lengths; some are short enough for the filter, some are blank."""
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, count)) for count in rng.integers(1, 60, 300)]
    (tmp_path / "text.txt").write_text("\n\n".join(lines))
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    return lines


def prepared(tmp_path, **changes):
    data = {"train": str(tmp_path / "text.txt"), "tokenizer": str(tmp_path / "vocab.txt"), "validation_sequences": 10}
    return prepare(DataConfig(**data | {"prepared": str(tmp_path / "prepared")} | changes), quiet).train


@pytest.mark.parametrize("max_length", [3, 12, 31, 64])
@pytest.mark.parametrize("kind", ["paper", "none"])
def test_the_count_is_that_of_the_text(tmp_path, text, monkeypatch, max_length, kind):
    monkeypatch.setattr("pnn.data.shards.LINES_PER_CHUNK", 70)
    tally = prepared(tmp_path, max_length=max_length, filter=kind).tally
    lengths = [len(line.split()) for line in text]
    passed = [n for n in lengths if n >= 5] if kind == "paper" else lengths
    room = max_length - 2
    assert tally == Tally(
        lines=300,
        lines_filtered=300 - len(passed),
        lines_cut=sum(n > room for n in passed),
        tokens=sum(passed),
        tokens_cut=sum(max(0, n - room) for n in passed),
    )


def test_rows_leave_out_what_fills_no_last_one(tmp_path, text):
    tokens = prepared(tmp_path, layout="rows", max_length=32, filter="none")
    total = sum(len(line.split()) + 1 for line in text)  # an end of text after each
    assert tokens.tally == Tally(lines=300, tokens=total, tokens_cut=total % 32)
    assert left_out(tokens) == [f"{tmp_path / 'text.txt'}: the last {total % 32} tokens fill no row of 32"]


def test_the_manifest_keeps_the_count_and_earlier_ones_are_read(tmp_path, text):
    tokens = prepared(tmp_path, max_length=12)
    assert json.loads((tokens.folder / "manifest.json").read_text())["text"] == asdict(tokens.tally)
    for folder in FIXTURE.iterdir():
        assert TokenSet(folder).tally is None
        assert left_out(TokenSet(folder)) == []


def test_what_is_said(tmp_path, text):
    name, passed = f"{tmp_path / 'text.txt'}: ", [n for n in (len(line.split()) for line in text) if n >= 5]
    assert left_out(prepared(tmp_path, max_length=64, filter="none")) == []
    assert left_out(prepared(tmp_path, max_length=64)) == [f"{name}the filter took away {300 - len(passed)} of 300 lines"]
    few, most = prepared(tmp_path, max_length=40), prepared(tmp_path, max_length=12)
    share = sum(max(0, n - 38) for n in passed) / sum(passed)
    longer = sum(n > 38 for n in passed)
    assert left_out(few) == [
        f"{name}the filter took away {300 - len(passed)} of 300 lines; data.max_length=40 cut off {100 * share:.0f} % of the "
        f"text ({longer} of {len(passed)} lines are longer)"
    ]
    sentence, advice = left_out(most)
    assert "max_length=12 cut off" in sentence
    assert "most lines are longer than data.max_length=12" in advice
    assert "--set data.max_length=64 keeps more" in advice  # of 32 tokens on average, and two special ones


@pytest.mark.parametrize(("mean", "max_length", "enough"), [(125, 64, 128), (130, 64, 256), (20, 32, 64), (128, 100, 256)])
def test_the_length_that_is_advised_holds_a_mean_line(mean, max_length, enough):
    tally = Tally(lines=10, lines_cut=6, tokens=10 * mean, tokens_cut=1)
    assert f"--set data.max_length={enough} " in tally.advice(max_length)
    assert Tally(lines=10, lines_cut=5, tokens=10 * mean).advice(max_length) is None


def test_training_data_info_and_the_report_say_it(pnn_command, undrawn, tiny_config, tmp_path, text):
    data = {"train": str(tmp_path / "text.txt"), "tokenizer": str(tmp_path / "vocab.txt"), "max_length": 12}
    config = tiny_config(data=data | {"prepared": str(tmp_path / "prepared")})
    said = "lines; data.max_length=12 cut off"
    code, _, err = pnn_command("train", config, "--output", tmp_path / "run", "--max-steps", 2)
    assert code == 0, err
    assert said in err
    assert "--set data.max_length=" in err
    code, out, _ = pnn_command("data", "prepare", config)
    assert out.count(said) == 1  # the tail is of the same text
    folder = out.splitlines()[0].rpartition(" ")[2]
    assert said in pnn_command("data", "info", folder)[1]
    assert pnn_command("report", tmp_path / "run")[0] == 0
    assert (tmp_path / "run" / "report.html").read_text().count(said) == 1
    code, out, _ = pnn_command("data", "info", next(FIXTURE.iterdir()))
    assert "not known" in out


def test_text_that_is_kept_whole_takes_no_line(pnn_command, tiny_config, tmp_path):
    code, _, err = pnn_command("train", tiny_config(), "--output", tmp_path / "run", "--max-steps", 2)
    assert code == 0
    assert "cut off" not in err
