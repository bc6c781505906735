"""The embedded corpora: small languages, made by code, in which the best possible prediction of every word is known.

A paragraph speaks of one thing or of many, opens with a sentence that states two facts (a place, a colour) and goes on with
sentences of a few shapes that use them. Every word belongs to one kind, by its spelling alone:

* grammar    fixed words of a sentence shape: they follow from the words around them;
* agreement  is/are, has/have, it/they …: they follow from any word that shows the number, which may stand far away;
* fact       the place, the colour: they follow from another mention in the paragraph;
* free       nouns, verbs, adjectives, adverbs: drawn at random, a guess is right as often as the likeliest word is drawn.

`synthetic` is the quickstart's language. `synthetic_hard` has longer paragraphs, more words, and facts that hang together: a
town stands on a river and lives by a trade, a month lies in a season. A masked town may have to be inferred from its river and
its trade, each shared by four of the sixteen towns. No sentence connects the three, so their table has to be learnt by heart.

`best_prediction_probability` computes, for masked words, the probability that the best possible guesser is right, exactly:
a sum over all ways to cut the paragraph into sentences, all sentence shapes and numbers (a forward–backward pass over
sentence borders). Its mean over masked words is the ceiling that a model is judged against. A visible fact word fits the slots
of its own name only, so what the visible words say of a thing is the same however the paragraph is cut.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

KINDS = ("grammar", "agreement", "fact", "free")
SPECIAL_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SENTENCES = (3, 4)  # sentences of a paragraph, each number equally likely

# The quickstart's language. Sentence shapes first: small letters are grammar, capitals name a slot.
OPENINGS = (
    "the NOUN of PLACE wore COLOUR hats .",
    "in PLACE , COLOUR suits the NOUN .",
)
BODIES = (
    "PRON HAVE ADJ COLOUR boots .",
    "DET NOUN BE ADJ in PLACE .",
    "near PLACE PRON VERB ADV .",
    "all say COLOUR DO look ADJ .",
)
FACTS = {
    "PLACE": ["avon", "brill", "corfe", "delph", "eyam", "fowey", "goring", "hythe"],
    "COLOUR": ["amber", "black", "cream", "dun", "ecru", "fawn", "green", "hazel"],
}
# Words that agree in number: (singular, plural). One pair per slot, so the slot's word follows from the number.
AGREEMENT = {
    "BE": ("is", "are"),
    "HAVE": ("has", "have"),
    "DO": ("does", "do"),
    "PRON": ("it", "they"),
    "DET": ("this", "these"),
}
# Words drawn freely, the first likeliest (weights 1, 1/2, 1/3 …); a pair is singular/plural.
FREE = {
    "NOUN": ["fox/foxes", "goose/geese", "child/children", "baker/bakers", "monk/monks", "otter/otters"],
    "VERB": ["sings/sing", "rests/rest", "waits/wait", "hums/hum", "digs/dig", "swims/swim"],
    "ADJ": ["old", "tall", "kind", "shy", "bold", "calm"],
    "ADV": ["slowly", "often", "early", "gladly", "alone", "twice"],
}

# What the harder language adds. A thing that has several names is written NAME/NAME, a value of it word/word.
RIVERS = ["alde", "boyne", "cam", "dart"]
TRADES = ["tin", "wool", "salt", "lace"]
TOWNS = [*FACTS["PLACE"], "ilam", "jarrow", "keld", "looe", "malton", "nairn", "oban", "poole"]
SEASONS = {
    "winter": ["december", "january", "february"],
    "spring": ["march", "april", "may"],
    "summer": ["june", "july", "august"],
    "autumn": ["september", "october", "november"],
}


@dataclass(frozen=True)
class Rules:
    """What a language is made of."""

    openings: tuple[str, ...]
    bodies: tuple[str, ...]
    facts: dict[str, list[str]]
    agreement: dict[str, tuple[str, str]]
    free: dict[str, list[str]]
    sentences: tuple[int, ...]


RULES = {
    "synthetic": Rules(OPENINGS, BODIES, FACTS, AGREEMENT, FREE, SENTENCES),
    "synthetic_hard": Rules(
        openings=(*OPENINGS, "by the RIVER , TRADE feeds the NOUN ."),
        bodies=(
            *BODIES,
            "DET NOUN swam the RIVER in MONTH .",
            "PRON DO sell ADJ TRADE all SEASON .",
            "COLOUR ribbons pay for TRADE till MONTH .",
            "each SEASON PRON HAVE the RIVER .",
        ),
        facts={
            "PLACE/RIVER/TRADE": [f"{town}/{RIVERS[i // 4]}/{TRADES[i % 4]}" for i, town in enumerate(TOWNS)],
            "MONTH/SEASON": [f"{month}/{season}" for season, months in SEASONS.items() for month in months],
            "COLOUR": FACTS["COLOUR"],
        },
        agreement=AGREEMENT,
        free=FREE,
        sentences=(4, 5),
    ),
}
NOT_A_PARAGRAPH = "this is not a paragraph of the embedded language"


@dataclass(frozen=True)
class Shape:
    """One sentence shape in one number: for each slot, the probability of each word, and its fact (or −1)."""

    number: int  # 0 singular, 1 plural
    probability: float  # of the shape, given the number
    emission: NDArray[np.float64]  # (slots, vocabulary); any word of its category counts 1 in a fact slot
    fact: NDArray[np.int64]  # (slots,) index into the language's names of facts, −1 elsewhere
    is_opening: bool

    def __len__(self) -> int:
        return len(self.fact)

    @cached_property
    def choices(self) -> list[tuple[list[int], list[float]]]:
        """For each slot its words and the borders between their shares of (0, 1), to draw one from a uniform number."""
        words = [np.flatnonzero(row) for row in self.emission]
        return [(w.tolist(), row[w].cumsum()[:-1].tolist()) for w, row in zip(words, self.emission, strict=True)]


class Language:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        literals = {w for shape in rules.openings + rules.bodies for w in shape.split() if not w.isupper()}
        names = [name for thing in rules.facts for name in thing.split("/")]
        values = [words for thing in rules.facts.values() for words in zip(*(v.split("/") for v in thing), strict=True)]
        by_kind = {
            "grammar": sorted(literals),
            "agreement": [w for pair in rules.agreement.values() for w in pair],
            "fact": [w for words in values for w in dict.fromkeys(words)],
            "free": [form for words in rules.free.values() for w in words for form in w.split("/")],
        }
        self.words: list[str] = [*SPECIAL_WORDS, *(w for kind in KINDS for w in by_kind[kind])]
        self.ids = {word: index for index, word in enumerate(self.words)}
        if len(self.ids) != len(self.words):
            raise AssertionError("a word of the embedded language belongs to two kinds")
        kinds = [-1] * len(SPECIAL_WORDS) + [k for k, kind in enumerate(KINDS) for _ in by_kind[kind]]
        self.kind_of_word = np.array(kinds)  # index into KINDS, −1 for special words
        self.fact_names = names
        self.fact_words = [np.array([self.ids[w] for w in words]) for words in values]  # the word of each value, by name
        self.thing = [k for k, thing in enumerate(rules.facts) for _ in thing.split("/")]  # that each name belongs to
        self.shapes = [
            Shape(number, 1 / len(group), *self._slots(text, number), is_opening=group is rules.openings)
            for number in (0, 1)
            for group in (rules.openings, rules.bodies)
            for text in group
        ]

    def _slots(self, text: str, number: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        slots = text.split()
        emission = np.zeros((len(slots), len(self.words)))
        fact = np.full(len(slots), -1)
        for row, slot in enumerate(slots):
            if slot in self.fact_names:
                fact[row] = self.fact_names.index(slot)
                emission[row, self.fact_words[fact[row]]] = 1.0
            elif slot in self.rules.agreement:
                emission[row, self.ids[self.rules.agreement[slot][number]]] = 1.0
            elif slot in self.rules.free:
                free = self.rules.free[slot]
                weights = 1 / np.arange(1, len(free) + 1)
                for word, weight in zip(free, weights / weights.sum(), strict=True):
                    emission[row, self.ids[word.split("/")[number if "/" in word else 0]]] = weight
            else:
                emission[row, self.ids[slot]] = 1.0
        return emission, fact

    def paragraph(self, rng: np.random.Generator) -> list[int]:
        """One paragraph, as word ids without special words."""
        values = [rng.integers(len(values)) for values in self.rules.facts.values()]
        facts = [int(words[values[thing]]) for words, thing in zip(self.fact_words, self.thing, strict=True)]
        number = rng.integers(2)
        ids: list[int] = []
        for sentence in range(self.rules.sentences[rng.integers(len(self.rules.sentences))]):
            group = [s for s in self.shapes if s.number == number and s.is_opening == (sentence == 0)]
            shape = group[rng.integers(len(group))]
            draws = rng.random(len(shape))
            for draw, fact, (words, cumulative) in zip(draws, shape.fact, shape.choices, strict=True):
                ids.append(facts[fact] if fact >= 0 else words[bisect.bisect(cumulative, draw)])
        return ids


@cache
def language(corpus: str = "synthetic") -> Language:
    return Language(RULES[corpus])


def paragraphs(count: int, seed: int, corpus: str = "synthetic") -> Iterator[str]:
    """`count` paragraphs as text. Paragraph i depends on (seed, i) alone."""
    lang = language(corpus)
    for index in range(count):
        yield " ".join(lang.words[i] for i in lang.paragraph(np.random.default_rng([seed, index])))


def longest_paragraph(corpus: str = "synthetic") -> int:
    """In words."""
    lang = language(corpus)
    longest = {opening: max(len(s) for s in lang.shapes if s.is_opening == opening) for opening in (True, False)}
    return longest[True] + (max(lang.rules.sentences) - 1) * longest[False]


def best_prediction_probability(
    ids: NDArray[np.int64], masked: NDArray[np.bool_], corpus: str = "synthetic"
) -> NDArray[np.float64]:
    """For one paragraph (no special words), the probability of the likeliest word at each masked position, given all
    words that are not masked. Zero elsewhere."""
    lang = language(corpus)
    expected = _expected_facts(lang, ids[~masked])
    prediction = np.zeros((len(ids), len(lang.words)))
    total = 0.0
    for number in (0, 1):
        shapes = [shape for shape in lang.shapes if shape.number == number]
        total += _add_predictions(prediction, shapes, lang.rules.sentences, ids, masked, expected)
    if total == 0:
        raise ValueError(NOT_A_PARAGRAPH)
    return np.where(masked, prediction.max(1), 0.0) / total


def _expected_facts(lang: Language, visible: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """For each name of a fact, the probability of every word where it is masked: the values of the thing that fit all visible
    words are equally likely."""
    fits = [np.ones(len(values), dtype=bool) for values in lang.rules.facts.values()]
    for thing, words in zip(lang.thing, lang.fact_words, strict=True):
        for word in np.intersect1d(visible, words):
            fits[thing] &= words == word
    if not all(fit.any() for fit in fits):
        raise ValueError(NOT_A_PARAGRAPH)
    pairs = zip(lang.thing, lang.fact_words, strict=True)
    return [np.bincount(words[fits[thing]], minlength=len(lang.words)) / fits[thing].sum() for thing, words in pairs]


def _add_predictions(
    prediction: NDArray[np.float64],
    shapes: list[Shape],
    sentences: tuple[int, ...],
    ids: NDArray[np.int64],
    masked: NDArray[np.bool_],
    expected_facts: list[NDArray[np.float64]],
) -> float:
    """Add, for one number, the weighted predictions of all ways to cut the paragraph into sentences of `shapes`;
    returns the sum of the weights: the probability of the visible words."""
    length, most = len(ids), max(sentences)
    # weight[k][i]: probability of the visible words from i on, if a sentence of shape k starts at i
    weight = [np.zeros(length + 1) for _ in shapes]
    for w, shape in zip(weight, shapes, strict=True):
        starts = np.arange(length - len(shape) + 1)
        w[starts] = shape.probability
        for slot in range(len(shape)):
            at = starts + slot
            w[starts] *= np.where(masked[at], 1.0, shape.emission[slot, ids[at]])
    forward = np.zeros((most + 1, length + 1))  # forward[s, i]: s sentences end at i
    backward = np.zeros((most + 1, length + 1))  # backward[s, i]: with s sentences done at i, the rest reaches the end
    forward[0, 0] = 1.0
    backward[list(sentences), length] = 1 / len(sentences)
    for s in range(most):
        for w, shape in zip(weight, shapes, strict=True):
            if shape.is_opening == (s == 0):
                forward[s + 1, len(shape) :] += (forward[s] * w)[: length + 1 - len(shape)]
    for s in reversed(range(most)):
        for w, shape in zip(weight, shapes, strict=True):
            if shape.is_opening == (s == 0):
                n = max(0, length + 1 - len(shape))
                backward[s, :n] += w[:n] * backward[s + 1, len(shape) :]
    for w, shape in zip(weight, shapes, strict=True):
        n = max(0, length + 1 - len(shape))
        before = slice(0, 1) if shape.is_opening else slice(1, most)
        after = slice(before.start + 1, before.stop + 1)
        posterior = (forward[before, :n] * w[:n] * backward[after, len(shape) :]).sum(0)
        for start in np.flatnonzero(posterior):
            for slot in np.flatnonzero(masked[start : start + len(shape)]).tolist():
                fact = shape.fact[slot]
                expected = expected_facts[fact] if fact >= 0 else shape.emission[slot]
                prediction[start + slot] += posterior[start] * expected
    return float(backward[0, 0])


def fingerprint(corpus: str = "synthetic") -> str:
    """Changes with the language, so that token shards made from an older one are not taken for it."""
    return hashlib.sha256(repr(astuple(RULES[corpus])).encode()).hexdigest()[:12]
