"""The page about decoders, from real tiny runs."""

from __future__ import annotations

import json
import shutil

import pytest

from pnn.config import RunConfig, from_dict, validate
from pnn.errors import UserError
from pnn.figures.decoders import Curve, matched_curves
from pnn.report.page import write_report
from pnn.results import Measured
from pnn.training.run import train_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory, prepared_folder):
    folder = tmp_path_factory.mktemp("decoders")
    for name, residual in (("rewrites", "delta"), ("adds", "additive")):
        config = {
            "name": name,
            "model": {"type": "ddl", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "residual": residual},
            "data": {
                "train": "synthetic",
                "synthetic_paragraphs": 300,
                "validation_sequences": 10,
                "max_length": 32,
                "filter": "none",
                "prepared": str(prepared_folder),
            },
            "training": {"max_steps": 6, "batch_size": 4, "effective_batch_size": 4, "evaluate_every": 3, "log_every": 1}
            | {"tensorboard": False, "warmup_steps": 1},
            "evaluation": {"sets": {"again": {"source": "synthetic"}}},
        }
        train_run(validate(from_dict(RunConfig, config)), folder / name, quiet=True)
    return folder


def test_two_decoders_on_one_page(runs, tmp_path):
    page = write_report([runs / "rewrites", runs / "adds"], tmp_path / "page.html").read_text()
    for text in ("perplexity by token", "How did training go?", "And on other text?", "delta residual, 4 channels", "overlap"):
        assert text in page
    assert "masked" not in page
    losses = [json.loads((runs / name / "evaluation.json").read_text())["loss"] for name in ("rewrites", "adds")]
    assert all(f"{loss:.4f}" in page for loss in losses)
    best = "rewrites" if losses[0] < losses[1] else "adds"
    assert f"<b>{best}</b> is {abs(losses[0] - losses[1]):.4f} nats below" in page


def test_tasks_have_their_table(runs, tmp_path):
    run = tmp_path / "with_tasks"
    shutil.copytree(runs / "rewrites", run, symlinks=True)
    held = json.loads((run / "evaluation.json").read_text())
    row = {"accuracy": 0.25, "standard_error": 0.1, "metric": "acc", "documents": 4, "shots": 0, "by_metric": {}}
    shots = {"0": {"shots": 0, "protocol": "by hand", "limit": 4, "tasks": {"piqa": row}, "average": row}}
    measured = {key: held[key] for key in Measured.__annotations__}
    (run / "evaluation.json").write_text(json.dumps(held | {"tasks": {**measured, "shots": shots}}))
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "piqa, 0-shot" in page
    assert "25.0" in page


def test_masked_models_and_decoders_share_no_page(runs, trained_run, tmp_path):
    with pytest.raises(UserError, match="masked models or about decoders"):
        write_report([runs / "rewrites", trained_run], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_curves_scale_with_work_and_time():
    curves = {
        "fast": [Curve([1e6, 2e6, 3e6], [4.0, 3.5, 3.2], 1e9, 1e-6), Curve([1e6, 2e6, 3e6], [4.1, 3.6, 3.3], 1e9, 1e-6)],
        "slow": [Curve([1e6, 2e6, 3e6], [3.9, 3.4, 3.1], 2e9, 3e-6)],
    }
    figure = matched_curves(curves, start=0.0)
    tokens, work, time = figure.axes
    last = [[line.get_xdata()[-1] for line in axes.lines] for axes in (tokens, work, time)]
    assert last[0] == pytest.approx([3, 3, 3, 3, 3])  # million tokens: two seeds and their mean, one seed and its mean
    assert last[1] == pytest.approx([3, 3, 3, 6, 6])  # PFLOP
    assert last[2][:5] == pytest.approx([3, 3, 3, 9, 9])  # seconds
