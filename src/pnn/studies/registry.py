"""Every analysis and experiment, found by the name of its file.

    analyses/<name>.py    `pnn analyze <name>`; its result is analysis/<name>.json
    evidence/<name>.py    `pnn evidence --experiment <name>`; its result is a part of experimental_results.json

Such a file has `ABOUT`, what it asks and of which models, and `run`, which takes a subject (`analysis.subject`) and gives the
result. Its figure is the function <name> in figures/studies/<name>.py. Commands, report and figures need no word more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, Literal, cast

from pnn.errors import UserError, did_you_mean
from pnn.results import Finding

Need = Callable[[Any], str | None]  # of a model: why nothing can be asked of it, or None
ANALYSES, EVIDENCE = "pnn.studies.analyses", "pnn.studies.evidence"


@dataclass(frozen=True, kw_only=True)
class Analysis:
    question: str  # the heading in a report
    picture: str  # how to read the figure
    hypotheses: Mapping[str, str]  # by the name of the finding that has its verdict
    kind: Literal["masked", "causal"] = "masked"  # of the model
    needs: tuple[Need, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Experiment(Analysis):
    """One of the published suite. Its only hypothesis has its own name."""

    number: int  # in the suite
    key: str  # in experimental_results.json
    figure: str  # its file, without .png
    published_answer: tuple[str, ...] = ()  # where the published script decides: the path to its answer in `published`


def analysis_names() -> list[str]:
    return _names(ANALYSES)


def experiment_names() -> list[str]:
    return _names(EVIDENCE)


def analyses() -> dict[str, Analysis]:
    return {name: module(name).ABOUT for name in analysis_names()}


def experiments() -> dict[str, Experiment]:
    """In the order of the suite."""
    found: dict[str, Experiment] = {name: module(name).ABOUT for name in experiment_names()}
    return dict(sorted(found.items(), key=lambda item: item[1].number))


def analysis(name: str) -> Analysis:
    if name not in analysis_names():
        raise UserError(f"analyze {name}: no such analysis{did_you_mean(name, analysis_names())}")
    about: Analysis = module(name).ABOUT
    return about


def chosen_experiments(names: list[str] | None) -> list[str]:
    """Experiments by name; None or "all" for every one."""
    for name in names or []:
        if name not in experiment_names() and name != "all":
            raise UserError(f"--experiment {name}: no such experiment{did_you_mean(name, experiment_names())}")
    return list(experiments()) if not names or "all" in names else list(dict.fromkeys(names))


def why_not(name: str, model: Any) -> str | None:
    """What keeps this analysis or experiment from being done on this model."""
    return next((reason for need in module(name).ABOUT.needs if (reason := need(model))), None)


def findings(name: str, about: Analysis, result: Mapping[str, Any]) -> dict[str, Finding]:
    """The findings of a result, by name. What could not be done has every hypothesis, and why."""
    if "not_done" in result:
        return {one: {"hypothesis": said, "not_done": result["not_done"]} for one, said in about.hypotheses.items()}
    return {name: cast(Finding, result)} if isinstance(about, Experiment) else result["findings"]


def _names(package: str) -> list[str]:
    return sorted(found.name for found in iter_modules(import_module(package).__path__))


def module(name: str) -> ModuleType:
    return import_module(f"{ANALYSES if name in analysis_names() else EVIDENCE}.{name}")
