"""The benchmark of int8 counts what `pnn evaluate` counts."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from pnn.bench.latency import onnx_session
from pnn.data.shards import TokenSet
from pnn.evaluation.masked import evaluate_masked
from pnn.export.onnx import write_onnx
from pnn.models.loading import load_run

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (pip install -e '.[dev]')")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_int8_is_measured(trained_run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    int8 = importlib.import_module("int8")
    model = load_run(str(trained_run), device="cpu").model
    folder = json.loads((trained_run / "tokens.json").read_text())["train"]["folder"]
    tokens, sequences = TokenSet(Path(folder)), np.arange(0, 40, 2)
    write_onnx(tmp_path / "fp32.onnx", model, None)
    counted = int8.right_by_sequence(onnx_session(tmp_path / "fp32.onnx"), tokens, sequences, draws=2)
    exact = evaluate_masked(model, tokens, sequences, mask_draws=2)["by_sequence"]
    assert sum(exact["correct"]) > 0
    assert counted.tolist() == exact["correct"]

    text = tmp_path / "text.txt"
    text.write_text("the fox of avon wore amber hats . it has old amber boots .\n" * 8)
    arguments = [str(tmp_path / "out.json"), str(trained_run), str(text), "--draws", "2", "--sequences", "4", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["int8.py", *arguments])
    monkeypatch.chdir(tmp_path)
    int8.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["sequences"] == 4
    low, high = found["points_lost"]["interval"]
    lost = 100 * (found["accuracy"]["fp32"] - found["accuracy"]["int8"])
    assert found["points_lost"]["value"] == pytest.approx(lost)
    assert low <= lost <= high
    assert found["ratios"]["int8_vs_fp32"] > 0
