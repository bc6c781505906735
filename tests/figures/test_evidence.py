from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from pnn.figures.findings import reason
from pnn.figures.studies import figure_of
from pnn.studies.registry import experiment_names

MODELS = ("one step", "twelve steps", "no gates", "norm on delta")
NOT_DONE = {"one step": {"meg", "modeling", "dimensionwise"}, "no gates": {"gate_specificity", "gate_entropy"}}
REASONS = {
    "supported": ("lies above",),
    "not supported": ("lies below", "not larger"),
    "undecided": ("includes", "cannot be told", "could not be measured"),
}


def panel(figure: Figure, title: str):
    (found,) = [axes for axes in figure.axes if title in axes.get_title(loc="left")]
    return found


def strip(figure: Figure):
    (axes,) = figure.subfigs[1].axes
    return axes


def marks(axes, marker: str = "o") -> list[float]:
    """Heights of all marks, from left to right as drawn."""
    return [float(y) for line in axes.lines if line.get_marker() == marker for y in line.get_ydata() if np.isfinite(y)]


def finding(effect, beyond=None, margin=0.1):
    found = {"margin": margin, "effect": {"value": 0.5, "interval": list(effect)}}
    return found | ({} if beyond is None else {"effect_beyond_control": {"value": 0.5, "interval": list(beyond)}})


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", experiment_names())
def test_any_model_can_be_drawn(experiment, drawn, name: str, model: str) -> None:
    found = experiment(name, model)
    assert ("not_done" in found) == (name in NOT_DONE.get(model, ()))
    if "not_done" not in found:
        texts = [text.replace("\n", " ") for text in drawn(figure_of(name)(found))]
        assert f"Is it so that {found['hypothesis']}?" in texts
        assert f"{found['verdict'].capitalize()}: {reason(found)}." in texts


@pytest.mark.parametrize("name", experiment_names())
def test_effect_control_and_verdict_are_those_of_the_result(experiment, name: str) -> None:
    found = experiment(name, "three steps")
    found["effect"] = {"value": 0.3, "interval": [0.2, 0.4]}
    found["margin"] = 0.05
    found["verdict"] = "undecided"
    beside = found.get("control", found.get("untrained"))
    if beside is not None:
        beside |= {"value": -0.1, "interval": [-0.2, -0.05]}
    figure = figure_of(name)(found)
    axes = strip(figure)
    dots = [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert dots == ([0.3, -0.1] if beside is not None else [0.3])
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [0.05]
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert any(text.startswith("Undecided: ") for text in texts)
    assert "0.30 (0.20 to 0.40)" in texts


def test_a_comparison_that_is_no_control_is_called_one(experiment) -> None:
    found = experiment("dimensionwise", "three steps")
    axes = strip(figure_of("dimensionwise")(found))
    assert "control" not in found
    assert [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()][1:] == [
        "for comparison: the same model untrained"
    ]
    dots = [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [found["effect"]["value"], found["untrained"]["value"]]


def test_what_cannot_be_measured_is_said(experiment, drawn) -> None:
    """Of an untrained model no target is easy: half of the test has no members."""
    found = experiment("difficulty", "three steps")
    found["published"].pop("easy", None)
    found["published_increase"].pop("easy", None)
    nothing = {"value": None, "interval": [None, None]}
    found["path"]["easy"] = found["untrained_path"]["easy"] = nothing
    found["effect"] = found["effect_beyond_control"] = nothing
    found["control"] |= nothing
    texts = drawn(figure_of("difficulty")(found))
    assert texts.count("not measurable") == 2
    assert any("could not be measured" in text for text in texts)
    assert "easy (0)" in texts


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (finding((0.2, 0.8)), "lies above the margin of 0.1"),
        (finding((0.2, 0.8), (0.1, 0.3)), "above the margin of 0.1 and above its control"),
        (finding((0.2, 0.8), margin=0.0), "lies above zero"),
        (finding((0.01, 0.1)), "lies below the margin"),
        (finding((0.2, 0.8), (-0.3, 0.0)), "not larger than the control's"),
        (finding((0.05, 0.8)), "includes the margin"),
        (finding((0.2, 0.8), (-0.1, 0.3)), "cannot be told from the control's"),
        (finding((None, None)), "no interval"),
        ({"margin": 0.1, "effect": {"value": None, "interval": [None, None]}}, "could not be measured"),
    ],
)
def test_the_reason_follows_the_intervals(found, said: str) -> None:
    assert said in reason(found)


@pytest.mark.parametrize("model", ["three steps", "twelve steps", "no gates", "norm on delta"])
def test_the_reason_agrees_with_the_verdict(experiment, model: str) -> None:
    """They are computed apart: the reason for a verdict must be one for this verdict."""
    for name in experiment_names():
        found = experiment(name, model)
        if "not_done" not in found:
            assert any(words in reason(found) for words in REASONS[found["verdict"]]), name


def test_parts_of_the_model_are_those_that_it_has(experiment, drawn) -> None:
    texts = {model: drawn(figure_of("optogenetics")(experiment("optogenetics", model))) for model in MODELS[2:]}
    assert {"attention", "gate", "FFN", "δ behind its norm"} <= set(texts["norm on delta"])
    assert not {"gate", "δ behind its norm"} & set(texts["no gates"])
    for model, written in texts.items():
        assert any("by ½ changes nothing" in text for text in written) == (model == "norm on delta")


def test_suppression_starts_from_the_baseline(experiment) -> None:
    found = experiment("optogenetics", "three steps")
    accuracy = panel(figure_of("optogenetics")(found), "scaled down")
    (attention,) = [list(line.get_ydata()) for line in accuracy.lines if line.get_marker() == "o"]
    published = found["published"]
    wanted = [published[key]["accuracy"] for key in ("baseline", *(f"attention_suppressed_{r}" for r in (25, 50, 75, 100)))]
    assert attention == pytest.approx(wanted)


def test_activity_inside_a_step_has_a_panel_a_series(experiment) -> None:
    gated, plain = (figure_of("meg")(experiment("meg", model)) for model in ("three steps", "no gates"))
    assert len(gated.subfigs[0].axes) == 4
    assert len(plain.subfigs[0].axes) == 3
    found = experiment("meg", "three steps")
    assert marks(panel(gated, "Update")) == [one["value"] for one in found["by_step"]["hidden_update"]]
    batches = [line for line in panel(gated, "Update").lines if line.get_marker() == "None" and len(line.get_ydata()) == 3]
    assert len(batches) == len(found["published"]["hidden_update"]["values"]) // 3 > 1


def test_both_rules_count_dimensions(experiment) -> None:
    found = experiment("dimensionwise", "three steps")
    bars = [bar.get_width() for bar in panel(figure_of("dimensionwise")(found), "Dimensions of each class").patches]
    assert bars == [*found["published"]["pattern_counts"].values(), *found["pattern_counts"].values()]


def test_the_ranking_shows_both_measures(experiment) -> None:
    found = experiment("layer_importance", "three steps")
    bars = [bar.get_width() for bar in panel(figure_of("layer_importance")(found), "Importance").patches]
    ours = [entry["accuracy_drop"]["value"] for entry in found["importance_ranking"]]
    published = {entry["component"]: entry["importance_score"] for entry in found["published"]["importance_ranking"]}
    assert bars[::2] == ours
    assert bars[1::2] == [published[entry["component"]] for entry in found["importance_ranking"]]


def test_every_gate_intervention_has_a_row(experiment) -> None:
    found = experiment("gate_specificity", "three steps")
    accuracy = panel(figure_of("gate_specificity")(found), "Accuracy lost")
    labels = [label.get_text() for label in accuracy.get_yticklabels()]
    assert labels[:5] == ["dropout 25 %", "dropout 50 %", "dropout 75 %", "1 − g", "noise, deviation 0.1"]
    assert labels[-1] == "× 2"
    assert len(labels) == len(found["interventions"]) + 1
    drops = sorted(float(line.get_xdata()[0]) for line in accuracy.lines if line.get_marker() == "o")
    conditions = [*found["interventions"].values(), *found["magnitude_matched"].values()]
    assert drops == pytest.approx(sorted(one["accuracy_drop"]["value"] for one in conditions))


def test_groups_of_tokens_show_what_was_measured(experiment) -> None:
    found = experiment("cross_token", "three steps")
    ours = panel(figure_of("cross_token")(found), "is shown")
    shown = [one["value"] for where in ("near", "far") for one in found["gain_when_shown"][where].values()]
    assert marks(ours) == pytest.approx([value for value in shown if value is not None])
    found = experiment("layerwise_activity", "twelve steps")
    stages = panel(figure_of("layerwise_activity")(found), "Size of states")
    assert marks(stages) == [one["value"] for key in ("by_stage", "randomly_signed_by_stage") for one in found[key]]
    found = experiment("gate_entropy", "three steps")
    last = panel(figure_of("gate_entropy")(found), "At the last")
    assert marks(last) == [one["value"] for one in found["entropy"].values() if one["value"] is not None]


def test_modeling_marks_the_published_choice(experiment) -> None:
    found = experiment("modeling", "three steps")
    tested = found["published"]["brain_hypothesis_test"]
    published = panel(figure_of("modeling")(found), "Published")
    (circle,) = [line for line in published.lines if line.get_markerfacecolor() == "none"]
    chosen = tested["most_selective_step"]
    assert (circle.get_xdata()[0], circle.get_ydata()[0]) == (chosen + 1, tested[f"step_{chosen}_breadth"])
