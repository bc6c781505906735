"""`pnn fill` as people type it: texts, a file or a pipe; JSON lines or a table; one sentence for what cannot be filled."""

import io
import json
import os
import pty
import shutil
import subprocess
import sys

import pytest

import pnn
from pnn.data.tokenizers import of_synthetic_language
from pnn.models.loading import load_model

TEXT = "the fox of avon wore amber hats . it has old [MASK] boots ."
TWO = "the [MASK] of avon wore [MASK] hats ."


@pytest.fixture
def stdin(monkeypatch):
    def give(content: bytes, terminal: bool = False) -> None:
        stream = io.TextIOWrapper(io.BytesIO(content))
        stream.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stdin", stream)

    return give


def filled(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_texts_a_file_and_a_pipe_give_the_same(pnn_command, trained_run, tmp_path, stdin):
    code, out, err = pnn_command("fill", trained_run, TEXT, TWO, "--top", 3, "--by-step", "--json")
    assert code == 0, err
    results = filled(out)
    assert [set(result) for result in results] == [{"text", "predictions", "by_step"}] * 2
    assert [result["text"] for result in results] == [TEXT, TWO]
    assert [len(result["predictions"]) for result in results] == [1, 2]
    for result in results:
        for best, rewritten in zip(result["predictions"], result["by_step"], strict=True):
            assert [set(p) for p in best] == [{"token", "probability"}] * 3
            assert len(rewritten) == 5  # steps 0 … 4
            assert rewritten[-1] == best[0]
    lines = f"\ufeff{TEXT}\r\n{TWO}".encode()
    (tmp_path / "texts.txt").write_bytes(lines)  # a byte order mark, Windows' line ends, no line end at the end
    options = ("--top", 3, "--by-step", "--json")
    assert filled(pnn_command("fill", trained_run, "--file", tmp_path / "texts.txt", *options)[1]) == results
    stdin(lines)
    assert filled(pnn_command("fill", trained_run, *options)[1]) == results


def test_more_steps_than_trained_and_a_bare_checkpoint(pnn_command, trained_run):
    checkpoint = (trained_run / "checkpoints" / "best").resolve()
    code, out, err = pnn_command("fill", checkpoint, TEXT, "--num-steps", 9, "--by-step")
    assert code == 0, err
    assert "note: --num-steps 9, but the model was trained with 4 steps" in err
    assert "note: --num-steps 0 reads the embeddings alone" in pnn_command("fill", checkpoint, TEXT, "--num-steps", 0)[2]
    assert "note:" not in pnn_command("fill", checkpoint, TEXT, "--num-steps", 3)[2]
    (result,) = filled(out)  # JSON lines, as this is no terminal
    assert len(result["by_step"][0]) == 10
    assert len(result["predictions"][0]) == 5


@pytest.mark.slow
def test_from_a_pipe_to_a_terminal_in_a_process_of_its_own(pnn_command, trained_run, tmp_path):
    """Of a reorganised model, which that process has to know without what tests have imported."""
    best, smaller = trained_run / "checkpoints" / "best", tmp_path / "smaller"
    pnn.plasticity.save(pnn.plasticity.prune(load_model(best), [(0, 1)]), smaller)
    for file in best.glob("tokenizer*"):
        shutil.copy(file, smaller)
    results = filled(pnn_command("fill", smaller, TEXT, TWO)[1])
    command = [sys.executable, "-m", "pnn", "fill", str(smaller), "--by-step"]
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "COLUMNS": "100"}
    shown = subprocess.run(command, input=f"{TEXT}\n{TWO}\n".encode(), stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    assert shown.returncode == 0, shown.stderr
    table = os.read(ours, 100_000).decode()
    os.close(ours)
    assert TEXT in table
    assert TWO in table
    for words in ("mask 1", "mask 2", "step 0", "step 4", "best 5", results[1]["predictions"][1][0]["token"]):
        assert words in table


def fails(pnn_command, *arguments) -> str:
    code, out, err = pnn_command("fill", *arguments)
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("pnn: ")]
    return line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is missing: the input is empty"),
        (b"a [MASK]\n\nthe [MASK]\n", "line 2 is empty"),
        (b"a [MASK]\nthe fox\n", "line 2 has no [MASK]"),
        (b"a [MASK]\n" + b"fox " * 70 + b"[MASK]\n", "line 2 has 73 tokens, but the model takes 64"),
        (b"a [MASK]\nthe \xff [MASK]\n", "line 2 is not valid UTF-8"),
    ],
)
def test_a_line_that_cannot_be_filled_is_named(pnn_command, trained_run, tmp_path, stdin, content, says):
    (tmp_path / "texts.txt").write_bytes(content)
    line = fails(pnn_command, trained_run, "--file", tmp_path / "texts.txt")
    assert f"{tmp_path / 'texts.txt'}: line" in line
    assert says in line
    stdin(content)
    line = fails(pnn_command, trained_run)
    assert "standard input: line" in line
    assert says in line


def test_arguments_that_make_no_sense(pnn_command, trained_run, tmp_path, stdin):
    assert "no file" in fails(pnn_command, trained_run, "--file", tmp_path / "nowhere.txt")
    assert "directory" in fails(pnn_command, trained_run, "--file", tmp_path)
    assert "not both" in fails(pnn_command, trained_run, TEXT, "--file", tmp_path / "texts.txt")
    assert "text 2 has no [MASK]" in fails(pnn_command, trained_run, TEXT, "the fox")
    assert "--num-steps -1" in fails(pnn_command, trained_run, TEXT, "--num-steps", -1)
    assert "--top 0" in fails(pnn_command, trained_run, TEXT, "--top", 0)
    assert "nothing" in fails(pnn_command, tmp_path / "nothing", TEXT)
    stdin(b"", terminal=True)
    assert "nothing to fill" in fails(pnn_command, trained_run)


def test_more_steps_than_a_bert_has_layers(pnn_command, tmp_path):
    config = pnn.BertBaselineConfig(
        vocab_size=80, hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=2
    )
    pnn.BertBaselineForMaskedLM(config).save_pretrained(tmp_path / "bert")
    of_synthetic_language(64).save_pretrained(tmp_path / "bert")
    assert "--num-steps 3: this model takes 0 to 2" in fails(pnn_command, tmp_path / "bert", TEXT, "--num-steps", 3)
    code, out, err = pnn_command("fill", tmp_path / "bert", TEXT, "--num-steps", 1, "--by-step")
    assert code == 0, err
    assert len(filled(out)[0]["by_step"][0]) == 2


def test_a_damaged_checkpoint_and_a_tokenizer_without_a_mask(pnn_command, trained_run, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree((trained_run / "checkpoints" / "best").resolve(), damaged)
    weights = bytearray((damaged / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (damaged / "model.safetensors").write_bytes(weights)
    assert "does not match its checksum" in fails(pnn_command, damaged, TEXT)
    (damaged / "checksums.json").unlink()
    settings = json.loads((damaged / "tokenizer_config.json").read_text())
    del settings["mask_token"]
    (damaged / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "no mask or pad token" in fails(pnn_command, damaged, TEXT)
