from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from pnn.figures.studies import figure_of
from pnn.figures.studies.convergence import convergence
from pnn.figures.studies.gates import gates
from pnn.figures.studies.optimisation import optimisation
from pnn.numbers import estimate
from pnn.studies.registry import analysis_names, experiment_names

EVERY_MODEL = [
    *(("convergence", model) for model in ("one step", "three steps", "twelve steps", "no gates", "bert")),
    *(("gates", model) for model in ("one step", "three steps", "twelve steps", "norm on delta")),
    *(("optimisation", model) for model in ("one step", "three steps", "twelve steps", "no gates")),
    *(("more_steps", model) for model in ("one step", "three steps")),
]


def panel(figure: Figure, title: str):
    (found,) = [axes for axes in figure.axes if title in axes.get_title(loc="left")]
    return found


def heights(axes) -> list[float]:
    return [bar.get_height() for bar in axes.patches]


def test_every_analysis_and_experiment_has_a_figure() -> None:
    for name in (*analysis_names(), *experiment_names()):
        assert callable(figure_of(name)), name


@pytest.mark.parametrize(("name", "model"), EVERY_MODEL)
def test_any_model_can_be_drawn(analysed, drawn, name: str, model: str) -> None:
    result = analysed(name, model)
    texts = drawn(figure_of(name)(result))
    for found in result["findings"].values():
        assert any(f"{found['verdict'].capitalize()}: " in text for text in texts)
    assert any("layer" in text for text in texts) == (model == "bert")


@pytest.mark.parametrize("said", ["supported", "not supported", "undecided"])
def test_the_verdict_is_read_and_not_judged_again(analysed, drawn, said: str) -> None:
    result = analysed("optimisation", "three steps")
    result["findings"] = {"one": {**result["findings"]["updates_point_downhill"], "verdict": said}}
    (line,) = [text for text in drawn(optimisation(result)) if "points down the gradient" in text.replace("\n", " ")]
    assert line.startswith(said.capitalize() + ":")
    assert estimate(result["findings"]["one"]["effect"]) in line.replace("\n", " ").replace("     ", " ")


def test_convergence_shows_the_counts_by_class_and_step(analysed) -> None:
    result = analysed("convergence", "three steps")
    counts = [result["classes"][name]["convergence_counts"] for name in ("easy", "medium", "hard")]
    assert heights(panel(convergence(result), "the paper's measure")) == [*chain(*counts)]
    stable = panel(convergence(result), "How stable").lines
    for line, name in zip(stable, ("easy", "medium", "hard"), strict=False):
        assert list(line.get_ydata()) == pytest.approx(
            [np.nan if v is None else v for v in result["classes"][name]["stable_by_step"]], nan_ok=True
        )


def test_convergence_shows_controls_beside_every_mean(analysed) -> None:
    """Two measures of three classes, each trained, untrained and with shuffled labels; a class without members has no mark."""
    result = analysed("convergence", "three steps")
    sources = [result, *result["controls"].values()]
    wanted = [s["classes"][c][m]["value"] for s in sources for c in s["classes"] for m in ("convergence_step", "settled_step")]
    lines = [line for line in panel(convergence(result), "Mean step").lines if line.get_marker() in ("o", "D", "x", "+")]
    marks = [y for line in lines for y in line.get_ydata()]
    assert sorted(y for y in marks if np.isfinite(y)) == pytest.approx(sorted(v for v in wanted if v is not None))


def test_convergence_shows_when_predictions_settle_and_are_right(analysed) -> None:
    result = analysed("convergence", "three steps")
    axes = panel(convergence(result), "when first right")
    wanted = np.array([*result["settled_counts"], *result["first_correct_counts"]]) / result["targets"]
    assert heights(axes) == pytest.approx(list(wanted))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2", "3", "never"]


def test_kinds_of_words_only_where_they_are_known(analysed) -> None:
    result = analysed("convergence", "three steps")
    known = convergence(result)
    assert panel(known, "by kind of word").get_xticklabels()[2].get_text().startswith("fact\n")
    del result["true_difficulty"]
    assert len(convergence(result).axes) == len(known.axes) - 2 == 6


def test_gates_show_all_dimensions_or_the_first_hundred(analysed) -> None:
    result = analysed("gates", "three steps")
    (picture,) = panel(gates(result), "Mean gate of all 16").images
    assert picture.get_array().tolist() == result["dimension_means"]
    result["dimension_means"] = np.tile(result["dimension_means"], 8).tolist()
    (picture,) = panel(gates(result), "the first 100 of 128").images
    assert picture.get_array().shape == (3, 100)


def test_gates_histograms_are_shares_of_each_kind_of_token(analysed) -> None:
    result = analysed("gates", "three steps")
    figure = gates(result)
    pooled = panel(figure, "pooled")
    outlines = [patch.get_data().values for patch in pooled.patches if isinstance(patch, StepPatch)][1:]  # the first is filled
    assert [shares.sum() for shares in outlines] == pytest.approx([1, 1, 1])
    for kind in ("ordinary", "masked", "special"):
        axes = panel(figure, f"{kind}: {result['tokens_by_kind'][kind]}")
        shares = [patch.get_data().values for patch in axes.patches if isinstance(patch, StepPatch)][1:]
        number = result["tokens_by_kind"][kind]
        assert np.array(shares) * number == pytest.approx(np.array(result["token_mean_histogram"][kind]))


def test_gates_show_the_untrained_model_beside_the_trained(analysed) -> None:
    result = analysed("gates", "three steps")
    for title, measure in (("above 0.5", "open_by_step"), ("Spread within", "spread_within_token_by_step")):
        lines = [line for line in panel(gates(result), title).lines if len(line.get_xdata()) == 3 and line.get_marker() == "o"]
        drawn = [list(line.get_ydata()) for line in lines]
        assert drawn == [[one["value"] for one in result[name]] for name in (measure, f"untrained_{measure}")]


def test_gates_of_an_older_analysis_have_no_spread_of_the_untrained_model(analysed) -> None:
    result = analysed("gates", "three steps")
    del result["untrained_spread_within_token_by_step"]
    lines = [line for line in panel(gates(result), "Spread within").lines if len(line.get_xdata()) == 3]
    assert [line.get_marker() for line in lines if line.get_marker() == "o"] == ["o"]


@pytest.mark.parametrize("model", ["one step", "three steps"])
def test_optimisation_marks_off_the_steps_that_were_not_trained(analysed, model: str) -> None:
    result = analysed("optimisation", model)
    trained, last = result["num_steps"], result["steps_run"]
    assert last == 2 * trained
    loss = panel(optimisation(result), "Loss")
    marked = [line for line in loss.lines if line.get_marker() == "o"]
    full, hollow = marked
    assert list(full.get_xdata()) == list(range(trained + 1))
    assert list(hollow.get_xdata()) == list(range(trained + 1, last + 1))
    assert hollow.get_markerfacecolor() == "white" != full.get_markerfacecolor()
    (ground,) = loss.patches
    assert ground.get_x() == trained + 0.5
    cosine = panel(optimisation(result), "downhill")
    drawn = [list(line.get_ydata()) for line in cosine.lines if len(line.get_ydata()) == last and line.get_marker() != "o"]
    assert [one["value"] for one in result["alignment_by_step"]] in drawn
    assert [one["value"] for one in result["shuffled_alignment_by_step"]] in drawn


def test_estimates_have_the_digits_that_their_interval_calls_for() -> None:
    assert estimate({"value": 1.0567, "interval": [1.0351, 1.0808]}) == "1.057 (1.035 to 1.081)"
    assert estimate({"value": 0.00402, "interval": [0.00351, 0.00449]}) == "0.0040 (0.0035 to 0.0045)"
    assert estimate({"value": -3.83, "interval": [-4.5, -3.1]}) == "−3.83 (−4.50 to −3.10)"
    assert estimate({"value": 0.0, "interval": [0.0, 0.0]}) == "0.000 (0.000 to 0.000)"
    assert estimate({"value": None, "interval": [None, None]}) == "not measurable"
    assert estimate({"value": 0.5, "interval": [None, None]}) == "0.500 (no interval)"
