"""Analyses and experiments are found by their files, and say what commands and reports need of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pnn.errors import UserError
from pnn.studies import registry
from pnn.studies.registry import analyses, analysis, chosen_experiments, experiments, findings

SUITE = [  # as published
    "meg",
    "optogenetics",
    "modeling",
    "dimensionwise",
    "difficulty",
    "layer_importance",
    "gate_specificity",
    "layerwise_activity",
    "cross_token",
    "gate_entropy",
]


def test_what_is_there() -> None:
    assert {"convergence", "gates", "optimisation", "rewrites"} <= set(analyses())
    assert list(experiments()) == SUITE
    assert [about.number for about in experiments().values()] == list(range(1, 11))
    assert not set(analyses()) & set(experiments())  # figures go by name


@pytest.mark.parametrize("name", [*analyses(), *SUITE])
def test_each_says_what_a_report_needs(name: str) -> None:
    about = (analyses() | experiments())[name]
    assert about.question.endswith("?")
    assert about.picture.endswith(".")
    assert about.hypotheses
    if name in SUITE:
        assert list(about.hypotheses) == [name]


def test_easy_and_hard_are_said_where_they_mean_something() -> None:
    """In the paper's analysis something else than in the suite."""
    assert "easy tokens are those that step 0 gets right" in analysis("convergence").picture
    for about in experiments().values():
        if "easy" in f"{about.question} {about.hypotheses}" or "hard" in f"{about.question} {about.hypotheses}":
            assert "Easy is a token here if the model gives its right answer more than 70 %" in about.picture


def test_what_is_not_there() -> None:
    with pytest.raises(UserError, match="analyze gate: no such analysis"):
        analysis("gate")
    with pytest.raises(UserError, match="no such experiment"):
        chosen_experiments(["convergence"])
    assert chosen_experiments(None) == chosen_experiments(["meg", "all"]) == SUITE
    assert chosen_experiments(["meg", "difficulty", "meg"]) == ["meg", "difficulty"]


def test_what_could_not_be_done_keeps_its_hypotheses() -> None:
    about = analysis("optimisation")
    found = findings("optimisation", about, {"not_done": "there is no path"})
    assert {name: one["hypothesis"] for name, one in found.items()} == about.hypotheses
    assert {one["not_done"] for one in found.values()} == {"there is no path"}


def test_names_are_told_without_torch() -> None:
    """`pnn analyze --help` lists them."""
    code = """
import sys, types
package = types.ModuleType("pnn"); package.__path__ = [sys.argv[1]]; sys.modules["pnn"] = package
from pnn.studies.registry import analysis_names, experiment_names
assert "gates" in analysis_names() and len(experiment_names()) == 10
sys.exit("imported torch" if "torch" in sys.modules else 0)
"""
    subprocess.run([sys.executable, "-c", code, str(Path(registry.__file__).parents[1])], check=True)
