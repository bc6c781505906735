"""The figure of the audit, from results of tiny models that need no training."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import rewriting
from matplotlib.figure import Figure

from pnn.analysis.subject import Decoder
from pnn.figures.studies.rewrites import rewrites
from pnn.studies.run import perform

MODELS = {
    "two layers": {},
    "one layer": {"num_hidden_layers": 1, "value_channels": 1},
    "fourteen layers": {"num_hidden_layers": 14},
    "only writes": {"residual": "write_only"},
}


@cache
def _analysed(model: str) -> str:
    return json.dumps(perform("rewrites", Decoder(rewriting.tiny(**MODELS[model]), rewriting.text(6), rewriting.tokenizer())))


def analysed(model: str) -> dict:
    """A copy, to be changed as one likes."""
    return json.loads(_analysed(model))


def panel(figure: Figure, title: str):
    (found,) = [axes for axes in figure.axes if title in axes.get_title(loc="left")]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_any_model_can_be_drawn(drawn, model: str) -> None:
    result = analysed(model)
    texts = drawn(rewrites(result))
    for found in result["findings"].values():
        assert any(f"{found.get('verdict', 'not done').capitalize()}: {found['hypothesis'][:20]}" in text for text in texts)
    assert ("no erasure" in texts) == result["erases"]
    assert ("|1 − β| of it" in texts) == result["erases"]


def test_gates_are_shown_as_shares_of_tokens() -> None:
    result = analysed("two layers")
    figure = rewrites(result)
    for part, name in (("attention", "attention"), ("mlp", "MLP")):
        axes = panel(figure, f"Gates of {name}")
        (picture,) = axes.images
        of_part = [one["beta"] for one in result["sublayers"] if one["part"] == part]
        np.testing.assert_allclose(picture.get_array().T * result["tokens"], [beta["histogram"] for beta in of_part])
        assert list(axes.lines[0].get_ydata()) == [beta["mean"]["value"] for beta in of_part]
    bars = panel(figure, "How often").patches
    shares = [one["regimes"][name] for name in result["sublayers"][0]["regimes"] for one in result["sublayers"]]
    assert [bar.get_height() for bar in bars] == pytest.approx(shares)


def test_interventions_and_errors_are_those_of_the_result() -> None:
    result = analysed("two layers")
    figure = rewrites(result)
    rises = [one["rise"]["value"] for one in result["interventions"]["shut_by_layer"]]
    assert [bar.get_height() for bar in panel(figure, "one layer held shut").patches] == rises
    other = panel(figure, "Other interventions")
    rows = dict(zip((label.get_text() for label in other.get_yticklabels()), other.patches, strict=True))
    assert rows["no erasure"].get_width() == result["interventions"]["no_erasure"]["rise"]["value"]
    assert rows["MLP shut"].get_width() == result["interventions"]["shut_by_part"]["mlp"]["rise"]["value"]
    drawn = [list(line.get_ydata()) for line in panel(figure, "Distance of the read-out").lines]
    for when in ("before", "after"):
        assert [one["error"][when]["value"] for one in result["sublayers"] if one["part"] == "mlp"] in drawn


def test_a_direction_is_not_compared_with_itself() -> None:
    result = analysed("two layers")
    figure = rewrites(result)
    same = panel(figure, "the same token").images[0].get_array()
    assert np.ma.getmaskarray(np.ma.masked_invalid(same)).tolist() == np.eye(4, dtype=bool).tolist()
    other = panel(figure, "two tokens").images[0].get_array()
    np.testing.assert_array_equal(other, result["directions"]["other_tokens"])


def test_a_kind_without_tokens_is_left_out(drawn) -> None:
    result = analysed("two layers")
    result["tokens_by_kind"]["number"] = 0
    result["interventions"]["shut_by_kind"]["number"] = None
    texts = drawn(rewrites(result))
    assert "number" not in texts
    assert not any(text.startswith("shut at number") for text in texts)
