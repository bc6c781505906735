"""The embedded corpus, explained to somebody who meets it for the first time, with a paragraph whose words show their kind."""

from __future__ import annotations

from pnn.data import synthetic
from pnn.report.markup import Html, join, tag
from pnn.report.verdict import text_name

SAMPLE_SEED = 7

EXPLAINED = {
    "grammar": "fixed words of a sentence shape: they follow from the words around them",
    "agreement": "singular or plural, in step with a noun or verb that may stand far away",
    "fact": "said in one sentence, used again in another: to be found elsewhere in the paragraph",
    "free": "drawn at random: nobody can do better than guess the likeliest",
}


def corpus_note(corpus: str) -> Html:
    intro = (
        f"{text_name(corpus).capitalize()} is a small language made by code. The sentences of a paragraph speak of "
        f"{_things(corpus)}: what one of them says holds in all. Because the rules are known, so is the best possible guess "
        "for every masked word: its chance of being right, averaged over the masked words, is the best possible accuracy. "
        "A paragraph, its words by kind:"
    )
    return join([tag("p", intro), sample_paragraph(corpus), _legend()])


def _things(corpus: str) -> str:
    """ "a place with its river and trade, a month with its season and a colour"."""
    things = []
    for thing in synthetic.RULES[corpus].facts:
        name, *others = thing.lower().split("/")
        things.append(f"a {name} with its {' and '.join(others)}" if others else f"a {name}")
    return f"{', '.join(things[:-1])} and {things[-1]}"


def sample_paragraph(corpus: str = "synthetic") -> Html:
    language = synthetic.language(corpus)
    (paragraph,) = synthetic.paragraphs(1, SAMPLE_SEED, corpus)
    kinds = [synthetic.KINDS[language.kind_of_word[language.ids[word]]] for word in paragraph.split()]
    words = [tag("span", word, class_=f"kind {kind}") for word, kind in zip(paragraph.split(), kinds, strict=True)]
    return tag("p", join(words, " "), class_="sample")


def _legend() -> Html:
    entries = [
        join([tag("dt", tag("span", kind, class_=f"kind {kind}")), tag("dd", EXPLAINED[kind])]) for kind in synthetic.KINDS
    ]
    return tag("dl", *entries, class_="legend")
