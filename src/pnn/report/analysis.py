"""What the analyses of a run found: all verdicts in one table, each told once, then each question with its picture.

The table is put together from the results' own words and numbers. The headings and how to read a picture are the analysis's
own (`studies.registry`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.figure import Figure

from pnn.figures.findings import compared, reason
from pnn.figures.studies import figure_of
from pnn.numbers import INTERVAL, count, estimate
from pnn.report.loading import Run
from pnn.report.markup import Html, anchor, cell, heading, join, section, table, tag
from pnn.report.verdict import text_name
from pnn.results import EstimateJson, Finding, Json
from pnn.studies.registry import Analysis, Experiment, analyses, experiments, findings

Draw = Callable[[Figure, str, str], Html]  # a figure, its file's name, and what it shows in words


def analysis_section(run: Run[Any], draw: Draw) -> Html | None:
    """All that was analysed of this run; None if nothing was."""
    parts = [_part(run, name, about, result, draw) for name, about, result in _results(run) if "not_done" not in result]
    if not parts:
        return None
    return section(f"What happens inside {run.name}?", tag("p", _intro(run)), verdicts_table(run), *parts)


def _results(run: Run[Any]) -> Iterator[tuple[str, Analysis, Json]]:
    """What is there: the analyses, then the experiments."""
    for name, about in (analyses() | experiments()).items():
        found = run.evidence.get(about.key) if isinstance(about, Experiment) else run.analyses.get(name)
        if found is not None:
            yield name, about, found


def _intro(run: Run[Any]) -> str:
    heads = [*run.analyses.values(), *([run.evidence["about"]] if run.evidence else [])]
    texts = dict.fromkeys(
        f"checkpoint {head['checkpoint']}, {count(head['sequences'])} sequences of {text_name(head['source'])}"
        for head in heads
    )
    measured = f"Measured on {'; '.join(texts)}. "
    evaluated = run.evaluation.get("checkpoint")
    if evaluated is not None and any(head["checkpoint"] != evaluated for head in heads):
        measured += f"The accuracies above are of another checkpoint, {evaluated}. "
    return measured + (
        "An effect is signed so that a positive one speaks for the hypothesis. Supported means that its 95 % interval lies "
        "above a margin, and above the effect of a control where there is one; not supported, that one of the two lies below. "
        "Each verdict stands alone: of forty effects that lie at their margins, chance supports one."
    )


def verdicts_table(run: Run[Any]) -> Html:
    """A row a hypothesis, those that could not be tested too."""
    rows: list[list[object]] = []
    for name, about, result in _results(run):
        link = name if "not_done" in result else tag("a", name, href=f"#{_address(run, name)}")
        for found in findings(name, about, result).values():
            if "not_done" in found:
                rows.append([link, f"{found['hypothesis']}: not done, {found['not_done']}", "", "", ""])
                continue
            asked = join([found["hypothesis"], tag("small", f"measured: {found['measure']}")])
            control = join(_stacked(v, what if role == "control" else f"{role}: {what}") for role, what, v in compared(found))
            said = join([tag("span", found["verdict"], class_=f"verdict {_class(found)}"), tag("small", reason(found))])
            rows.append([link, asked, _stacked(found["effect"]), control, cell(said)])
    heads = ["experiment", "hypothesis", "effect", "control", "verdict"]
    return tag(
        "div",
        table(heads, rows, f"Under an effect and a control stands the {INTERVAL}, under a verdict why"),
        class_="verdicts",
    )


def _address(run: Run[Any], name: str) -> str:
    return anchor(f"{run.name}-{name}")


def _stacked(found: EstimateJson, what: str = "") -> Html:
    """The value; under it its interval, and what it is of."""
    value, _, interval = estimate(found).partition(" (")
    return join([value, *(tag("small", line) for line in (interval.rstrip(")"), what) if line)])


def _class(found: Finding) -> str:
    return str(found["verdict"]).replace(" ", "-")


def _part(run: Run[Any], name: str, about: Analysis, result: Json, draw: Draw) -> Html:
    published = _published_answer(about, result) if isinstance(about, Experiment) else ""
    picture = draw(figure_of(name)(result), about.figure if isinstance(about, Experiment) else name, about.question)
    return join([heading(3, about.question, _address(run, name)), tag("p", about.picture + published), picture])


def _published_answer(about: Experiment, result: Json) -> str:
    """Where the published script decides, it compares two means."""
    answer: Any = result["published"] if about.published_answer else None
    for key in about.published_answer:
        answer = answer[key]
    if answer is None:
        return ""
    return f" The published rule, which compares bare means, says {'yes' if answer else 'no'}."
