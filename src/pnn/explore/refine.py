"""The tab *Refine*: a text whose words can be masked by a click, and how one or two models rewrite their predictions of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pnn.errors import UserError
from pnn.evaluation.refining import refining
from pnn.explore.subjects import Subject, computing
from pnn.models.registry import kind_of
from pnn.report.markup import Html, tag
from pnn.report.refining import grid

MASK = "[MASK]"
PIECE = re.compile(r"\[MASK\]|[\w'’]+|[^\w\s]|\s+")  # together they are the text
# the first that a model's tokenizer knows all of
EXAMPLES = (
    "Mozart was an Austrian [MASK] who wrote his first [MASK] at the age of five.",
    "the fox of avon wore amber hats . it has old [MASK] boots . this fox is shy in [MASK] .",
)


def example(subject: Subject) -> str:
    return next(filter(subject.knows, EXAMPLES), EXAMPLES[0])


def pieces(text: str) -> list[str]:
    """Words, punctuation marks and the spaces between them."""
    return PIECE.findall(text)


def originals(text: str, before: Sequence[str]) -> list[str]:
    """The pieces of a text; what a click has masked stays known so long as the text keeps its number of pieces."""
    now = pieces(text)
    if len(now) != len(before):
        return now
    return [old if new == MASK else new for new, old in zip(now, before, strict=True)]


def toggled(text: str, known: Sequence[str], index: int) -> str:
    """The text with this piece masked, or shown again. A mask that was typed has no word behind it and stays."""
    now = pieces(text)
    if 0 <= index < min(len(now), len(known)) and not now[index].isspace():
        now[index] = known[index] if now[index] == MASK else MASK
    return "".join(now)


def words(text: str, known: Sequence[str]) -> Html:
    """The text as buttons."""
    parts = []
    for index, (now, word) in enumerate(zip(pieces(text), known, strict=True)):
        if now.isspace():
            parts.append(Html(" "))
        else:
            hidden = now == MASK and word != MASK
            says = {"title": f"was: {word}"} if hidden else {}
            pressed = str(now == MASK).lower()
            parts.append(tag("button", now, type="button", class_="word", data_index=index, aria_pressed=pressed, **says))
    return tag("div", *parts, class_="words", role="group", aria_label="Click a word to mask it")


def grids(subjects: Sequence[Subject], text: str) -> Html:
    """One grid for each model, or why there is none."""
    return tag("div", *(_grid(subject, text) for subject in subjects), class_="side-by-side")


def _grid(subject: Subject, text: str) -> Html:
    model = subject.loaded.model
    # where a part of the schedule repeats, more steps do not go on from the last state
    further = kind_of(model).has_steps and model.config.repeat is None
    steps = 2 * model.config.num_steps if further else None
    try:
        with computing:
            found = refining(subject.loaded, text.replace(MASK, subject.loaded.tokenizer.mask_token), steps)
    except UserError as error:
        return tag("div", tag("p", subject.name, class_="name"), tag("p", str(error), class_="problem"))
    return grid(found, subject.name)
