"""The embedded language, and its known best prediction against an enumeration of every paragraph that fits."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from pnn.data import synthetic
from pnn.data.synthetic import (
    AGREEMENT,
    BODIES,
    FACTS,
    FREE,
    KINDS,
    OPENINGS,
    SENTENCES,
    SPECIAL_WORDS,
    best_prediction_probability,
    language,
    paragraphs,
)


def ids_of(words):
    return np.array([language().ids[word] for word in words])


# An oracle that shares nothing with the code but the tables: no dynamic programme, no arrays, exact fractions


@cache
def free_choices(slot, number):
    total = sum(Fraction(1, rank) for rank in range(1, len(FREE[slot]) + 1))
    return {word.split("/")[number if "/" in word else 0]: Fraction(1, rank) / total for rank, word in enumerate(FREE[slot], 1)}


@cache
def outlines():
    """Every number, sequence of sentence shapes and length: (probability, number, slots)."""
    found = []
    for number in (0, 1):
        for sentences in SENTENCES:
            for opening in OPENINGS:
                for bodies in itertools.product(BODIES, repeat=sentences - 1):
                    chance = Fraction(1, 2 * len(SENTENCES) * len(OPENINGS) * len(BODIES) ** (sentences - 1))
                    found.append((chance, number, " ".join((opening, *bodies)).split()))
    return found


def choices(slot, number, facts):
    """The words that can stand in a slot, with their probabilities."""
    if slot in facts:
        return {facts[slot]: Fraction(1)}
    if slot in AGREEMENT:
        return {AGREEMENT[slot][number]: Fraction(1)}
    if slot in FREE:
        return free_choices(slot, number)
    return {slot: Fraction(1)}


def posterior(words):
    """For a paragraph with None at masked places: at each of them, the probability of every word given the others."""
    predictions = [{} for _ in words]
    total = Fraction(0)
    for chance, number, slots in outlines():
        if len(slots) != len(words):
            continue
        if any(w is not None and s not in FACTS and w not in choices(s, number, {}) for s, w in zip(slots, words, strict=True)):
            continue
        for values in itertools.product(*FACTS.values()):
            facts = dict(zip(FACTS, values, strict=True))
            weight = chance / (len(FACTS["PLACE"]) * len(FACTS["COLOUR"]))
            for slot, word in zip(slots, words, strict=True):
                if word is not None:
                    weight *= choices(slot, number, facts).get(word, 0)
                if weight == 0:
                    break
            if weight == 0:
                continue
            total += weight
            for place, (slot, word) in enumerate(zip(slots, words, strict=True)):
                if word is None:
                    for guess, probability in choices(slot, number, facts).items():
                        predictions[place][guess] = predictions[place].get(guess, 0) + weight * probability
    if total == 0:
        raise ValueError("no such paragraph")
    return [{word: p / total for word, p in prediction.items()} for prediction in predictions]


def test_the_oracle_gives_probabilities():
    assert sum(chance for chance, _, _ in outlines()) == 1
    words = next(paragraphs(1, seed=5)).split()
    for prediction in posterior([None if i % 2 else w for i, w in enumerate(words)])[1::2]:
        assert sum(prediction.values()) == 1


@pytest.mark.parametrize(("share", "cases"), [(0.15, 30), (0.5, 20), (0.85, 6), (1.0, 3)])
def test_the_best_prediction_equals_an_enumeration_of_all_paragraphs(share, cases):
    rng = np.random.default_rng(int(share * 100))
    for text in paragraphs(cases, seed=11):
        words = text.split()
        masked = rng.random(len(words)) < share
        computed = best_prediction_probability(ids_of(words), masked)
        expected = posterior([None if hidden else word for word, hidden in zip(words, masked, strict=True)])
        for value, prediction, hidden in zip(computed, expected, masked, strict=True):
            assert abs(value - (float(max(prediction.values())) if hidden else 0.0)) < 1e-9


def test_the_best_guesser_is_right_as_often_as_computed():
    rng = np.random.default_rng(3)
    hits, expected = [], []
    for text in paragraphs(300, seed=12):
        words = text.split()
        masked = rng.random(len(words)) < 0.2
        computed = best_prediction_probability(ids_of(words), masked)
        guesses = posterior([None if hidden else word for word, hidden in zip(words, masked, strict=True)])
        hits.append(sum(max(guesses[i], key=guesses[i].get) == words[i] for i in np.flatnonzero(masked)))
        expected.append(computed.sum())
    difference = np.array(hits) - np.array(expected)
    assert abs(difference.sum()) < 4 * difference.std() * np.sqrt(len(difference))
    assert abs(difference.sum()) < 0.05 * sum(expected)
    assert sum(expected) > 1000


PARAGRAPH = "the fox of avon wore amber hats . it has old amber boots . near avon it sings slowly ."


def best(text, *masked):
    words = text.split()
    hidden = np.isin(np.arange(len(words)), masked)
    return best_prediction_probability(ids_of(words), hidden)


def test_a_masked_fact_with_another_visible_mention_is_certain():
    assert best(PARAGRAPH, 3)[3] == pytest.approx(1)  # avon, said again in the last sentence
    assert best(PARAGRAPH, 5)[5] == pytest.approx(1)
    assert best(PARAGRAPH, 5, 11)[[5, 11]] == pytest.approx([1 / 8, 1 / 8])  # both mentions of the colour hidden


def test_other_words_have_the_probabilities_of_their_kind():
    assert best(PARAGRAPH, 2)[2] == pytest.approx(1)  # grammar: "of"
    assert best(PARAGRAPH, 9)[9] == pytest.approx(1)  # agreement: "has", from "fox", "it", "sings"
    harmonic = sum(1 / n for n in range(1, 7))
    assert best(PARAGRAPH, 10)[10] == pytest.approx(1 / harmonic)  # free: "old" is the likeliest of six
    assert best(PARAGRAPH, 1)[1] == pytest.approx(1 / harmonic)


def test_hiding_every_sign_of_number_halves_the_certainty():
    value = best(PARAGRAPH, 1, 8, 9, 15, 16, 17)
    # fox, it, has, it, sings are all that tells singular from plural
    assert value[8] == pytest.approx(0.5)
    assert value[9] == pytest.approx(0.5)


def test_a_fully_masked_paragraph_gives_the_prior_of_its_length():
    words = PARAGRAPH.split()
    value = best(PARAGRAPH, *range(len(words)))
    fitting = [(chance, number, slots) for chance, number, slots in outlines() if len(slots) == len(words)]
    total = sum(chance for chance, _, _ in fitting)
    opens_with_the = sum(chance for chance, _, slots in fitting if slots[0] == "the")
    assert value[0] == pytest.approx(float(max(opens_with_the, total - opens_with_the) / total))
    assert value[-1] == pytest.approx(1)  # a paragraph ends in a full stop


def test_nothing_masked_gives_zeros():
    assert np.count_nonzero(best(PARAGRAPH)) == 0


@pytest.mark.parametrize(
    "text",
    [
        "the fox of avon wore amber hats .",  # one sentence is too short
        PARAGRAPH + " it has old amber boots . it has old amber boots .",  # five sentences
        PARAGRAPH.removesuffix(" ."),  # cut off
        PARAGRAPH.replace("it has", "it have"),  # no agreement
        "it has old amber boots . the fox of avon wore amber hats . near avon it sings slowly .",  # no opening first
        PARAGRAPH.replace("of", "old"),
    ],
)
def test_what_is_not_a_paragraph_raises(text):
    with pytest.raises(ValueError, match="not a paragraph"):
        best(text, 1)


def test_contradicting_facts_raise():
    with pytest.raises(ValueError, match="not a paragraph"):
        best(PARAGRAPH.replace("amber boots", "black boots"), 1)


# The corpus itself ----------------------------------------------------------------------------------------------------


def test_a_paragraph_depends_on_seed_and_index_alone():
    ten = list(paragraphs(10, seed=4))
    assert list(paragraphs(10, seed=4)) == ten
    assert list(paragraphs(6, seed=4)) == ten[:6]
    assert len(set(ten)) == 10
    assert not set(ten) & set(paragraphs(10, seed=5))


def test_every_word_has_one_kind_told_by_its_spelling():
    lang = language()
    literals = {word for shape in OPENINGS + BODIES for word in shape.split() if not word.isupper()}
    expected = {
        "grammar": literals,
        "agreement": {word for pair in AGREEMENT.values() for word in pair},
        "fact": {word for words in FACTS.values() for word in words},
        "free": {form for words in FREE.values() for word in words for form in word.split("/")},
    }
    assert sum(map(len, expected.values())) == len(set.union(*expected.values())) == len(lang.words) - len(SPECIAL_WORDS)
    for word, index in lang.ids.items():
        kinds = [k for k, kind in enumerate(KINDS) if word in expected[kind]]
        assert kinds == ([] if word in SPECIAL_WORDS else [lang.kind_of_word[index]])
        assert lang.words[index] == word
    assert lang.words[:5] == list(SPECIAL_WORDS)
    assert (lang.kind_of_word[:5] == -1).all()


def test_generated_paragraphs_are_paragraphs_of_the_language():
    lengths = {len(slots) for _, _, slots in outlines()}
    for text in paragraphs(200, seed=6):
        words = text.split()
        assert len(words) in lengths
        assert words.count(".") in SENTENCES
        for values in FACTS.values():
            assert len(set(words) & set(values)) == 1  # a fact has one value throughout
        assert posterior([*words[:-1], None])[-1] == {".": 1}


def test_words_are_drawn_with_the_stated_shares():
    count = 3000
    firsts, sentences, adjectives = [], [], []
    for text in paragraphs(count, seed=7):
        words = text.split()
        firsts.append(words[0] == "the")
        sentences.append(words.count(".") == SENTENCES[0])
        adjectives += [word for word in words if word in FREE["ADJ"]]
    for share in (np.mean(firsts), np.mean(sentences)):
        assert abs(share - 0.5) < 4 * np.sqrt(0.25 / count)
    for word, probability in free_choices("ADJ", 0).items():
        p = float(probability)
        assert abs(adjectives.count(word) / len(adjectives) - p) < 4 * np.sqrt(p * (1 - p) / len(adjectives))


def test_the_fingerprint_follows_the_language(monkeypatch):
    before = synthetic.fingerprint()
    assert synthetic.fingerprint() == before
    monkeypatch.setattr(synthetic, "BODIES", BODIES[:-1])
    assert synthetic.fingerprint() != before
