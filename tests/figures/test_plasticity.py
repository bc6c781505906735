"""Figures of a cycle, from the records of real ones: tiny, and of no use but for drawing."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from matplotlib.figure import Figure
from transformers import GPT2Config, GPT2LMHeadModel

from pnn.figures.plasticity import CYCLE_FIGURES, circle, heads, perplexity
from pnn.plasticity import CycleSettings, Text, cycle
from pnn.runs import read_metrics

CYCLES = {
    "one round": {},
    "two rounds, beyond": {"rounds": 2, "beyond": 1, "grow": 0.3},
    "five rounds": {"rounds": 5},
    "nothing grows": {"grow": 0.0},
    "nothing is learnt": {"learn_steps": 0},
    "wide": {"heads": 16, "layers": 2},
    "deep": {"heads": 2, "layers": 14},
}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    @cache
    def run(name: str) -> list[dict]:
        changes = dict(CYCLES[name])
        heads_, layers = changes.pop("heads", 4), changes.pop("layers", 3)
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=20, n_embd=32, n_head=heads_, n_layer=layers, n_positions=8)
        ids = torch.randint(0, 20, (20, 8))
        folder = tmp_path_factory.mktemp("cycle") / "run"
        settings = CycleSettings(**{"learn_steps": 4, "evaluate_every": 2, "score_rows": 4, "batch_rows": 2, **changes})
        cycle(GPT2LMHeadModel(config), Text(ids[:16], ids[16:]), folder, settings, name="a model with quite a long name")
        return read_metrics(folder / "metrics.jsonl")

    return run


@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.parametrize("figure", CYCLE_FIGURES)
def test_any_cycle_can_be_drawn(figure, name, records, drawn):
    assert drawn(CYCLE_FIGURES[figure](records(name)))


@pytest.mark.parametrize("name", ["one round", "five rounds"])
def test_no_text_of_the_circle_runs_into_another_or_out_of_it(name, records, drawn):
    figure = circle(records(name))
    drawn(figure)
    (axes,) = figure.axes
    boxes = [(text.get_text(), text.get_window_extent()) for text in axes.texts]
    for index, (one, box) in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, one
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, one
        for other, their in boxes[index + 1 :]:
            assert not box.overlaps(their), (one, other)


def test_the_circle_says_what_happened(records, drawn):
    texts = drawn(circle(records("one round")))
    assert {"Prune", "Measure", "Grow", "Learn", "−3 heads", "+1 head", "12 → 10 heads"} <= set(texts)
    assert "nothing" in drawn(circle(records("nothing grows")))


def test_a_square_for_every_head(records):
    figure: Figure = heads(records("two rounds, beyond"))
    rows = records("two rounds, beyond")
    assert len(figure.axes) == 6
    for axes in figure.axes:
        assert len(axes.patches) == 3 * 5  # layers × (original heads and one beyond)
    grown = [row for row in rows if row["phase"] == "growth"]
    assert [axes.get_title(loc="left") for axes in figure.axes[2::3]] == [f"Grown, {row['heads']} heads" for row in grown]


def test_bars_and_curve_are_the_records(records):
    rows = records("one round")
    bars, curve = perplexity(rows).axes
    phases = ("initial", "measurement", "growth", "final")
    values = [next(row for row in rows if row["phase"] == phase)["perplexity"] for phase in phases]
    assert [patch.get_height() for patch in bars.patches] == values
    learnt = [row["perplexity"] for row in rows if row["phase"] == "evaluation"]
    assert list(curve.lines[0].get_ydata()) == [values[2], *learnt]
    assert list(curve.lines[0].get_xdata()) == [0, 2, 4]
