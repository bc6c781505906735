"""What the analyses of a run found: first all verdicts in one table, then each question with its picture and its answer.

Every answer is put together from the result's own words and numbers. Only the headings and how to read a picture are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from matplotlib.figure import Figure

from pnn.analysis.evidence import EXPERIMENTS
from pnn.figures.analyses import ANALYSIS_FIGURES
from pnn.figures.evidence import EVIDENCE_FIGURES
from pnn.figures.findings import compared, reason, verdict_line
from pnn.figures.numbers import INTERVAL, count, estimate
from pnn.figures.results import Json
from pnn.report.loading import Run
from pnn.report.markup import Html, cell, join, section, table, tag
from pnn.report.verdict import text_name

Draw = Callable[[Figure, str, str], Html]  # a figure, its file's name, and what it shows in words

# Each question and how to read its picture
QUESTIONS = {
    "convergence": (
        "When do predictions settle?",
        "The first two rows are the paper's panels: its convergence step asks whether two predictions in a row agree, not "
        "whether they are right or final. The rows below show from when on a prediction is final and when it is right for the "
        "first time. Grey marks are controls.",
    ),
    "gates": (
        "What do the gates do?",
        "The paper's four panels pool all tokens. The panels by kind of token show which humps and shifts belong to masked "
        "or special tokens alone; the grey line is the same model untrained.",
    ),
    "optimisation": (
        "Is refinement learned optimisation?",
        "If so, the loss falls at every step, goes on falling on the grey ground, where the model takes more steps than it was "
        "trained for, and updates have a positive cosine with the downhill direction, above that for shuffled labels.",
    ),
    "rewrites": (
        "Does the state get rewritten, and does it have to be?",
        "From top to bottom: where the gates β of every sublayer are, and for which tokens; how far the read-out is from its "
        "target before and after a rewrite; what it costs to hold gates shut, to write without erasing, or to fix β; and "
        "whether sublayers write along the same directions, at one token and, as a control, at two.",
    ),
    "meg": (
        "Does refinement settle?",
        "Activity inside a step, one panel a quantity. A refinement that settles has an update that falls from every step to "
        "the next.",
    ),
    "optogenetics": (
        "Does each part have a role?",
        "Above, a part's output is scaled down as published; below, it is replaced by its mean over all tokens, which takes "
        "away what it says about a token and leaves its usual size. The further accuracy falls, the more the part does.",
    ),
    "modeling": (
        "Is a middle step more selective?",
        "On the left the published measure, which grows because states add up. On the right the share of dimensions that take "
        "part in an update: a selective step is a valley.",
    ),
    "dimensionwise": (
        "Do dimensions have roles?",
        "Full bars count only changes beyond two standard errors, pale ones any change, as published. Roles that mean "
        "something are not nearly all the same, and come out the same on two halves of the text.",
    ),
    "difficulty": (
        "Are hard tokens moved further?",
        "If so, the points on the right rise from easy to hard, more than the hollow ones: the same tokens in the untrained "
        "model.",
    ),
    "layer_importance": (
        "Which part matters most?",
        "Full bars are the accuracy lost when a part is replaced by its mean, pale ones when its output is scaled by 0.25, as "
        "published.",
    ),
    "gate_specificity": (
        "Does it matter which dimensions a gate opens?",
        "Every row is an intervention on all gates. If only the amount mattered, shuffling a gate's values among its "
        "dimensions (orange) would cost no more than scaling it in place to the same effect on size (grey).",
    ),
    "layerwise_activity": (
        "Does activity accumulate?",
        "Adding almost anything makes a state larger: the grey line adds updates of the same sizes with random signs.",
    ),
    "cross_token": (
        "Does a hard neighbour hold a token back?",
        "On the left the published comparison, which a difficult passage explains as well. On the right one masked token is "
        "shown to the model: if neighbours interfere, showing the nearest one helps more than showing the furthest.",
    ),
    "gate_entropy": (
        "Are gates more decided at easy tokens?",
        "Low entropy is a decided gate, the dashed line one that is half open everywhere. If so, easy lies below hard.",
    ),
}

# Where the published script decides, it compares two means: path to its answer
PUBLISHED_ANSWERS = {
    "modeling": ("brain_hypothesis_test", "supports_selectivity_hypothesis"),
    "layerwise_activity": ("accumulation_pattern", "supports_accumulation_hypothesis"),
    "cross_token": ("interference_effect", "hard_tokens_interfere"),
    "gate_entropy": ("confidence_hypothesis", "easy_lower_entropy"),
}


def analysis_section(run: Run, draw: Draw) -> Html | None:
    """All that was analysed of this run; None if nothing was."""
    parts = [_part(name, result, draw) for name, result in _results(run) if "not_done" not in result]
    if not parts:
        return None
    return section(f"What happens inside {run.name}?", tag("p", _intro(run)), verdicts_table(run), *parts)


def _results(run: Run) -> Iterator[tuple[str, Json]]:
    """What is there, in the order of QUESTIONS."""
    for name in QUESTIONS:
        found = run.analyses.get(name) if name in ANALYSIS_FIGURES else run.evidence.get(EXPERIMENTS[name].key)
        if found is not None:
            yield name, found


def _findings(name: str, result: Json) -> list[Json]:
    return list(result["findings"].values()) if name in ANALYSIS_FIGURES else [result]


def _intro(run: Run) -> str:
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
        "above a margin, and above the effect of a control where there is one; not supported, that one of the two lies below."
    )


def verdicts_table(run: Run) -> Html:
    """A row a hypothesis, those that could not be tested too."""
    rows: list[list[object]] = []
    for name, result in _results(run):
        if "not_done" in result:
            rows.append([name, f"not done: {result['not_done']}", "", "", ""])
            continue
        for found in _findings(name, result):
            if "not_done" in found:
                rows.append([name, f"{found['hypothesis']}: not done, {found['not_done']}", "", "", ""])
                continue
            control = join(_stacked(v, what if role == "control" else f"{role}: {what}") for role, what, v in compared(found))
            verdict = cell(tag("span", found["verdict"], class_=f"verdict {_class(found)}"))
            rows.append([name, found["hypothesis"], _stacked(found["effect"]), control, verdict])
    heads = ["experiment", "hypothesis", "effect", "control", "verdict"]
    return tag("div", table(heads, rows, f"Small figures are the {INTERVAL}"), class_="verdicts")


def _stacked(found: Json, what: str = "") -> Html:
    """The value; under it its interval, and what it is of."""
    value, _, interval = estimate(found).partition(" (")
    return join([value, *(tag("small", line) for line in (interval.rstrip(")"), what) if line)])


def _class(found: Json) -> str:
    return str(found["verdict"]).replace(" ", "-")


def _part(name: str, result: Json, draw: Draw) -> Html:
    question, reading = QUESTIONS[name]
    answers = [_answer(found) + _published_answer(name, result) for found in _findings(name, result)]
    if name in ANALYSIS_FIGURES:
        picture = draw(ANALYSIS_FIGURES[name](result), name, f"{question} {' '.join(answers)}")
    else:
        picture = draw(EVIDENCE_FIGURES[name](result), EXPERIMENTS[name].figure, f"{question} {' '.join(answers)}")
    said = [tag("p", tag("b", verdict, ":"), rest, class_="answer") for verdict, _, rest in (a.partition(":") for a in answers)]
    return join([tag("h3", question), tag("p", reading), picture, *said])


def _answer(found: Json) -> str:
    """The verdict, what it is about, and the numbers that it follows from."""
    if "not_done" in found:
        return verdict_line(found)
    words = f"{found['verdict'].capitalize()}: {found['hypothesis']}. "
    words += f"Measured: {found['measure']}; effect {estimate(found['effect'])}"
    words += "".join(f", {role} ({what}) {estimate(value)}" for role, what, value in compared(found))
    because = reason(found)
    return f"{words}. {because[0].upper()}{because[1:]}."


def _published_answer(name: str, result: Json) -> str:
    if name not in PUBLISHED_ANSWERS:
        return ""
    answer: Any = result["published"]
    for key in PUBLISHED_ANSWERS[name]:
        answer = answer[key]
    if answer is None:
        return ""
    return f" The published rule, which compares bare means, says {'yes' if answer else 'no'}."
