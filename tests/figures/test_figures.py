from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from pnn.errors import UserError
from pnn.figures import style
from pnn.figures.accuracy import accuracy_by_kind, accuracy_by_step
from pnn.figures.anatomy import anatomy
from pnn.figures.architecture import architecture
from pnn.figures.training import speed, training_curves
from pnn.numbers import per_cent, per_cent_interval, points, short_count
from pnn.results import median_speed, same_targets

SIZE = {"vocab_size": 30522, "hidden_size": 768, "max_position_embeddings": 128}
PNN = {"model_type": "pnn", **SIZE, "intermediate_size": 2048, "num_steps": 4, "schedule": [0, 0, 0, 0]}
BERT = {"model_type": "pnn_bert_baseline", **SIZE, "intermediate_size": 3072, "num_hidden_layers": 12}
KINDS = ("grammar", "agreement", "fact", "free")


def evaluation(accuracies: list[float], model_type: str = "pnn", ceiling: float | None = 0.86) -> dict[str, Any]:
    def measured(shift: float) -> dict[str, Any]:
        values = [a + shift for a in accuracies]
        intervals = [[v - 0.01, v + 0.01] for v in values]
        return {
            "accuracy": values[-1],
            "accuracy_interval": intervals[-1],
            "accuracy_by_step": values,
            "accuracy_by_step_interval": intervals,
        }

    result = {"model_type": model_type, "parameters": 1000, "num_steps": len(accuracies) - 1, **measured(0)}
    if ceiling is not None:
        kinds = {kind: {"share": 0.25, "ceiling": 0.9, **measured(-0.02 * i)} for i, kind in enumerate(KINDS)}
        result |= {"ceiling": ceiling, "by_kind": kinds}
    return result


REFINER = evaluation([0.15, 0.6, 0.7, 0.75, 0.8])
BASELINE = evaluation([0.05, 0.2, 0.83], "pnn_bert_baseline")
METRICS = [{"step": s, "last_step_loss": 5 / s, "tokens_per_second": 100.0 * s} for s in range(1, 6)]
METRICS += [{"step": 5, "validation_accuracy": 0.7}]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts if text.get_text()]


def boxes(figure: Figure) -> list[FancyBboxPatch]:
    return [patch for axes in figure.axes for patch in axes.patches if isinstance(patch, FancyBboxPatch)]


def dashed_arrows(figure: Figure) -> int:
    arrows = [p for axes in figure.axes for p in axes.patches if isinstance(p, FancyArrowPatch)]
    return sum(arrow.get_linestyle() not in ("-", "solid") for arrow in arrows)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(UserError, match="mamba"):
        anatomy(BERT | {"model_type": "mamba"})


def test_architecture_draws_every_step_and_every_reuse() -> None:
    figure = architecture({"pnn": PNN, "bert": BERT})
    assert len(boxes(figure)) == (4 + 2) + (12 + 2)
    assert dashed_arrows(figure) == 3
    assert texts(figure).count("reused") == 3
    assert "one refiner applied 4 times" in texts(figure)
    assert "12 distinct layers" in texts(figure)


def test_architecture_draws_decoders_with_what_is_read_after_their_steps() -> None:
    looped = {"model_type": "ddl", "num_hidden_layers": 3, "num_rounds": 2}
    causal = {"model_type": "pnn_causal", "num_steps": 4, "schedule": [0, 1, 0, 1], "update": "rewrite"}
    losses = [8.2, 1.5, 1.25, 1.0, 0.9]
    measured = {"parameters": 1000, "anatomy": {"embeddings": 100, "block": 200, "head": 0}}
    figure = architecture(
        {"looped": looped, "causal": causal},
        {
            "looped": measured | {"model_type": "ddl", "loss": 1.0},
            "causal": measured | {"model_type": "pnn_causal", "loss": 0.9, "loss_by_step": losses},
        },
    )
    assert len(boxes(figure)) == (6 + 2) + (4 + 2)
    assert dashed_arrows(figure) == 3 + 2
    assert texts(figure).count("Layer 3") == 2
    assert [f"{loss:.3f}" for loss in losses] == [text for text in texts(figure) if re.fullmatch(r"\d\.\d{3}", text)]
    assert any("2 rewrite refiners in 4 steps" in text for text in texts(figure))


def test_architecture_same_colour_means_same_weights() -> None:
    figure = architecture({"pnn": PNN | {"schedule": [0, 1, 2, 3, 0, 1, 2, 3], "num_steps": 8}})
    shades = [box.get_facecolor() for box in boxes(figure)][1:-1]  # without embeddings and head
    assert shades[:4] == shades[4:]
    assert len(set(shades)) == 4
    assert dashed_arrows(figure) == 4
    assert "Step 5 · refiner A" in texts(figure)
    distinct = [box.get_facecolor() for box in boxes(architecture({"bert": BERT}))][1:-1]
    assert len(set(distinct)) == 12


def test_architecture_shows_accuracies_and_sizes_that_were_measured() -> None:
    sizes = {"embeddings": 23_500_000, "block": 6_692_097, "head": 23_470_000}
    figure = architecture({"pnn": PNN}, {"pnn": REFINER | {"parameters": 53_704_251, "anatomy": sizes}})
    assert [t for t in texts(figure) if t.endswith("%")] == [per_cent(a) for a in REFINER["accuracy_by_step"]]
    assert "6.7M" in texts(figure)
    assert "53.7M parameters, one refiner applied 4 times" in texts(figure)


def test_architecture_shows_no_sizes_that_were_not_counted() -> None:
    figure = architecture({"pnn": PNN}, {"pnn": REFINER | {"parameters": 999}})
    assert not [t for t in texts(figure) if t.endswith("M")]
    assert "999 parameters, one refiner applied 4 times" in texts(figure)


def test_steps_of_a_baseline_are_a_line_at_its_end() -> None:
    figure = accuracy_by_step({"pnn": REFINER, "bert": BASELINE})
    whole, enlarged = figure.axes
    heights = [line.get_ydata() for line in whole.lines]
    assert any(np.array_equal(h, REFINER["accuracy_by_step"]) for h in heights)
    assert any(np.array_equal(h, [0.83, 0.83]) for h in heights)
    assert not any(0.2 in np.asarray(h) for h in heights)  # the baseline's inner layers
    labels = [text.get_text() for text in enlarged.texts]
    assert sorted(labels) == [f"bert {per_cent(0.83)}", f"best possible {per_cent(0.86)}", f"pnn {per_cent(0.8)}"]


def test_marks_at_the_ends_are_whole() -> None:
    whole, _ = accuracy_by_step({"pnn": evaluation([0.0, 0.6, 1.0])}).axes
    low, high = whole.get_ylim()
    height = whole.get_position().height * whole.get_figure().get_figheight() * 72 / (high - low)  # points
    mark = max(line.get_markersize() for line in whole.lines)
    assert min(-low, high - 1) * height > mark / 2


def test_steps_without_a_ceiling() -> None:
    figure = accuracy_by_step({"pnn": evaluation([0.1, 0.3, 0.4], ceiling=None)})
    assert texts(figure) == [f"pnn {per_cent(0.4)}"]


def test_kinds_have_two_bars_for_a_pnn_and_one_for_a_baseline() -> None:
    (axes,) = accuracy_by_kind({"pnn": REFINER, "bert": BASELINE, "text": evaluation([0.1, 0.3], ceiling=None)}).axes
    assert len(axes.patches) == len(KINDS) * 3
    assert [bar.get_height() for bar in axes.patches[:3]] == [0.6, 0.8, 0.83]
    assert [label.get_text().split("\n")[0] for label in axes.get_xticklabels()] == list(KINDS)


def test_curves_have_every_run_and_a_log_axis_only_where_the_loss_falls_far() -> None:
    figure = training_curves({"a": METRICS, "b": METRICS}, ceiling=0.86)
    loss, accuracy = figure.axes
    assert loss.get_yscale() == "linear"
    assert len(accuracy.lines) == 3
    far = [{"step": s, "last_step_loss": 100 / s} for s in range(1, 200)]
    assert training_curves({"a": far}).axes[0].get_yscale() == "log"


def test_speed_is_the_median() -> None:
    assert median_speed(METRICS) == 300.0
    assert median_speed([{"step": 1}]) is None
    figure = speed({"pnn": REFINER, "bert": BASELINE | {"parameters": 2_500_000}}, {"pnn": METRICS, "bert": METRICS})
    assert texts(figure) == ["1.0K", "2.5M", "300", "300"]


def test_every_figure_is_saved_and_leaves_no_style_behind(tmp_path: Path) -> None:
    before = dict(rcParams)
    figure = accuracy_by_step({"a$b$": REFINER})  # dollar signs are not mathematics
    path = style.save(style.png(figure), tmp_path / "figures" / "steps.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(path.parent.iterdir()) == [path]
    assert dict(rcParams) == before


@pytest.mark.parametrize(("text", "says"), [("一", "missing from font"), ("wide " * 60, "leaves the figure")])
def test_drawing_notices_what_cannot_be_read(drawn, text: str, says: str) -> None:
    figure = Figure()
    figure.subplots().set_title(text, loc="left")
    with pytest.raises((UserWarning, AssertionError), match=says):
        drawn(figure)


def test_drawing_notices_panels_that_are_squeezed_to_nothing(drawn) -> None:
    figure = Figure(figsize=(1, 1), layout="constrained")
    for axes in figure.subplots(4, 4).flat:
        axes.set_ylabel("quite a long name")
    with pytest.raises(UserWarning, match="collapsed to zero"):
        drawn(figure)


def test_svg_is_the_same_every_time_and_needs_no_font() -> None:
    """And what was rounded and shortened is still the picture: every letter points to a shape that is there."""
    first, second = (style.svg(accuracy_by_step({"pnn": REFINER})) for _ in range(2))
    assert first == second
    text = first.decode()
    ElementTree.fromstring(text)
    shapes = set(re.findall(r'<path id="(\w+)"', text))
    letters = re.findall(r'<use xlink:href="#(d[0-9a-f]+)"', text)
    assert letters
    assert set(letters) <= shapes
    assert "font" not in text
    assert "scale(0.015625)" in text  # small numbers are factors and stay exact


def test_labels_are_moved_apart_and_stay_in_order() -> None:
    places = style.spread([0.5, 0.51, 0.52, 0.9], 0.05)
    assert all(b - a >= 0.05 - 1e-12 for a, b in pairwise(places))
    assert places[1] == pytest.approx(0.51)
    assert places[3] == 0.9


def test_numbers() -> None:
    assert per_cent(0.4744) == "47.4 %"
    assert points(-0.031) == "−3.1 points"
    assert points(-0.0001) == "0.0 points"
    assert per_cent_interval((0.998, 1.0002)) == "99.8–100.0 %"
    assert [short_count(n) for n in (999, 60_177, 53_704_251)] == ["999", "60.2K", "53.7M"]


def test_only_results_on_the_same_masks_compare() -> None:
    one = {"source": "synthetic", "mask_seed": 0, "targets": 10}
    assert same_targets([one, dict(one)])
    assert not same_targets([one, one | {"mask_seed": 1}])


def test_figures_do_not_import_models_themselves() -> None:
    """`import pnn` brings the models; the figures' own files must not ask for them."""
    code = """
import sys, types, pathlib
package = types.ModuleType("pnn"); package.__path__ = [sys.argv[1]]; sys.modules["pnn"] = package
import pnn.figures.architecture, pnn.figures.accuracy, pnn.figures.training
from pnn.figures.studies import figure_of
figure_of("convergence"), figure_of("meg")
bad = {"torch", "transformers", "pnn.models", "matplotlib.pyplot"} & set(sys.modules)
sys.exit(f"imported {bad}" if bad else 0)
"""
    source = Path(style.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, str(source)], check=True)
