"""The embedded corpus, explained to somebody who meets it for the first time, with a paragraph whose words show their kind."""

from __future__ import annotations

from pnn.data import synthetic
from pnn.report.markup import Html, join, tag

SAMPLE_SEED = 7

EXPLAINED = {
    "grammar": "fixed words of a sentence shape: they follow from the words around them",
    "agreement": "singular or plural, in step with a noun or verb that may stand far away",
    "fact": "said in one sentence, used again in another: to be found elsewhere in the paragraph",
    "free": "drawn at random: nobody can do better than guess the likeliest",
}


def corpus_note() -> Html:
    facts = " and ".join(f"a {name.lower()}" for name in synthetic.FACTS)
    intro = (
        f"The embedded corpus is a small language made by code. A paragraph opens with a sentence that states {facts} and "
        "goes on with sentences that use them. Because the rules are known, so is the best possible guess for every masked "
        "word: its chance of being right, averaged over the masked words, is the best possible accuracy. "
        "A paragraph, its words by kind:"
    )
    return join([tag("p", intro), sample_paragraph(), _legend()])


def sample_paragraph() -> Html:
    language = synthetic.language()
    (paragraph,) = synthetic.paragraphs(1, seed=SAMPLE_SEED)
    kinds = [synthetic.KINDS[language.kind_of_word[language.ids[word]]] for word in paragraph.split()]
    words = [tag("span", word, class_=f"kind {kind}") for word, kind in zip(paragraph.split(), kinds, strict=True)]
    return tag("p", join(words, " "), class_="sample")


def _legend() -> Html:
    entries = [
        join([tag("dt", tag("span", kind, class_=f"kind {kind}")), tag("dd", EXPLAINED[kind])]) for kind in synthetic.KINDS
    ]
    return tag("dl", *entries, class_="legend")
