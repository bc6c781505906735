"""The embedded language, and its known best prediction against an enumeration of every paragraph that fits."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from pnn.data import synthetic
from pnn.data.synthetic import (
    FREE,
    KINDS,
    RULES,
    SENTENCES,
    SPECIAL_WORDS,
    best_prediction_probability,
    language,
    paragraphs,
)

EASY, HARD = "synthetic", "synthetic_hard"
both = pytest.mark.parametrize("corpus", RULES)


def ids_of(words, corpus=EASY):
    return np.array([language(corpus).ids[word] for word in words])


# An oracle that shares nothing with the code but the tables: no dynamic programme, no arrays, exact fractions


@cache
def free_choices(corpus, slot, number):
    words = RULES[corpus].free[slot]
    total = sum(Fraction(1, rank) for rank in range(1, len(words) + 1))
    return {word.split("/")[number if "/" in word else 0]: Fraction(1, rank) / total for rank, word in enumerate(words, 1)}


@cache
def outlines(corpus):
    """Every number, sequence of sentence shapes and length: (probability, number, slots)."""
    rules = RULES[corpus]
    found = []
    for number in (0, 1):
        for sentences in rules.sentences:
            for opening in rules.openings:
                for bodies in itertools.product(rules.bodies, repeat=sentences - 1):
                    ways = 2 * len(rules.sentences) * len(rules.openings) * len(rules.bodies) ** (sentences - 1)
                    found.append((Fraction(1, ways), number, " ".join((opening, *bodies)).split()))
    return found


@cache
def worlds(corpus):
    """Every way that the facts can be: {name of a fact: its word}."""
    things = [
        [dict(zip(names.split("/"), value.split("/"), strict=True)) for value in values]
        for names, values in RULES[corpus].facts.items()
    ]
    return [{name: word for thing in chosen for name, word in thing.items()} for chosen in itertools.product(*things)]


def choices(corpus, slot, number, world):
    """The words that can stand in a slot, with their probabilities."""
    if slot in world:
        return {world[slot]: Fraction(1)}
    if slot in RULES[corpus].agreement:
        return {RULES[corpus].agreement[slot][number]: Fraction(1)}
    if slot in RULES[corpus].free:
        return free_choices(corpus, slot, number)
    return {slot: Fraction(1)}


def posterior(words, corpus=EASY):
    """For a paragraph with None at masked places: at each of them, the probability of every word given the others."""
    predictions = [{} for _ in words]
    total = Fraction(0)
    names = worlds(corpus)[0]
    fitting = [world for world in worlds(corpus) if all(_fits(corpus, word, world) for word in words)]
    for chance, number, slots in outlines(corpus):
        if len(slots) != len(words):
            continue
        visible = [(slot, word) for slot, word in zip(slots, words, strict=True) if word is not None]
        if any(s not in names and w not in choices(corpus, s, number, {}) for s, w in visible):
            continue
        for world in fitting:
            weight = chance / len(worlds(corpus))
            for slot, word in visible:
                weight *= choices(corpus, slot, number, world).get(word, 0)
                if weight == 0:
                    break
            if weight == 0:
                continue
            total += weight
            for place, (slot, word) in enumerate(zip(slots, words, strict=True)):
                if word is None:
                    for guess, probability in choices(corpus, slot, number, world).items():
                        predictions[place][guess] = predictions[place].get(guess, 0) + weight * probability
    if total == 0:
        raise ValueError("no such paragraph")
    return [{word: p / total for word, p in prediction.items()} for prediction in predictions]


@cache
def fact_words(corpus):
    return {word for world in worlds(corpus) for word in world.values()}


def _fits(corpus, word, world):
    """Whether a visible word can stand in a paragraph of this world: spares the sum worlds of weight nought."""
    return word not in fact_words(corpus) or word in world.values()


@both
def test_the_oracle_gives_probabilities(corpus):
    assert sum(chance for chance, _, _ in outlines(corpus)) == 1
    words = next(paragraphs(1, 5, corpus)).split()
    for prediction in posterior([None if i % 2 else w for i, w in enumerate(words)], corpus)[1::2]:
        assert sum(prediction.values()) == 1


@pytest.mark.parametrize(
    ("corpus", "share", "cases"),
    [(EASY, 0.15, 30), (EASY, 0.5, 20), (EASY, 0.85, 6), (EASY, 1.0, 3), (HARD, 0.15, 20), (HARD, 0.4, 8), (HARD, 0.6, 3)],
)
def test_the_best_prediction_equals_an_enumeration_of_all_paragraphs(corpus, share, cases):
    rng = np.random.default_rng(int(share * 100))
    for text in paragraphs(cases, 11, corpus):
        words = text.split()
        masked = rng.random(len(words)) < share
        computed = best_prediction_probability(ids_of(words, corpus), masked, corpus)
        expected = posterior([None if hidden else word for word, hidden in zip(words, masked, strict=True)], corpus)
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


def best(text, *masked, corpus=EASY):
    words = text.split()
    hidden = np.isin(np.arange(len(words)), masked)
    return best_prediction_probability(ids_of(words, corpus), hidden, corpus)


def test_a_masked_fact_with_another_visible_mention_is_certain():
    assert best(PARAGRAPH, 3)[3] == pytest.approx(1)  # avon, said again in the last sentence
    assert best(PARAGRAPH, 5)[5] == pytest.approx(1)
    assert best(PARAGRAPH, 5, 11)[[5, 11]] == pytest.approx([1 / 8, 1 / 8])  # both mentions of the colour hidden


HARD_PARAGRAPH = (
    "in goring , amber suits the fox . this fox swam the boyne in may . it does sell old salt all spring . "
    "near goring it sings slowly ."
)


def test_a_town_follows_from_its_river_and_its_trade_together():
    said = {word: place for place, word in enumerate(HARD_PARAGRAPH.split())}  # the last place of each word
    towns = (HARD_PARAGRAPH.split().index("goring"), said["goring"])
    both_seen = best(HARD_PARAGRAPH, *towns, corpus=HARD)
    assert both_seen[[*towns]] == pytest.approx([1, 1])  # the only town on the boyne that lives by salt
    river_alone = best(HARD_PARAGRAPH, *towns, said["salt"], corpus=HARD)
    assert river_alone[[*towns, said["salt"]]] == pytest.approx([1 / 4] * 3)
    neither = best(HARD_PARAGRAPH, *towns, said["salt"], said["boyne"], corpus=HARD)
    assert neither[[*towns, said["salt"], said["boyne"]]] == pytest.approx([1 / 16, 1 / 16, 1 / 4, 1 / 4])
    assert best(HARD_PARAGRAPH, said["spring"], corpus=HARD)[said["spring"]] == pytest.approx(1)  # may lies in it
    assert best(HARD_PARAGRAPH, said["may"], corpus=HARD)[said["may"]] == pytest.approx(1 / 3)


def test_a_town_beside_another_river_raises():
    with pytest.raises(ValueError, match="not a paragraph"):
        best(HARD_PARAGRAPH.replace("boyne", "cam"), 1, corpus=HARD)


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
    fitting = [(chance, number, slots) for chance, number, slots in outlines(EASY) if len(slots) == len(words)]
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


def test_the_quickstarts_corpus_is_what_it_was():
    text = "\n".join(paragraphs(2000, seed=0))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "765e47ce3d45fbae"
    assert synthetic.fingerprint() == "c6b1d4d5f5d2"  # committed runs and token shards name it


def test_a_paragraph_depends_on_seed_and_index_alone():
    ten = list(paragraphs(10, seed=4))
    assert list(paragraphs(10, seed=4)) == ten
    assert list(paragraphs(6, seed=4)) == ten[:6]
    assert len(set(ten)) == 10
    assert not set(ten) & set(paragraphs(10, seed=5))


@both
def test_every_word_has_one_kind_told_by_its_spelling(corpus):
    lang, rules = language(corpus), RULES[corpus]
    literals = {word for shape in rules.openings + rules.bodies for word in shape.split() if not word.isupper()}
    expected = {
        "grammar": literals,
        "agreement": {word for pair in rules.agreement.values() for word in pair},
        "fact": fact_words(corpus),
        "free": {form for words in rules.free.values() for word in words for form in word.split("/")},
    }
    assert sum(map(len, expected.values())) == len(set.union(*expected.values())) == len(lang.words) - len(SPECIAL_WORDS)
    for word, index in lang.ids.items():
        kinds = [k for k, kind in enumerate(KINDS) if word in expected[kind]]
        assert kinds == ([] if word in SPECIAL_WORDS else [lang.kind_of_word[index]])
        assert lang.words[index] == word
    assert lang.words[:5] == list(SPECIAL_WORDS)
    assert (lang.kind_of_word[:5] == -1).all()


@both
def test_generated_paragraphs_are_paragraphs_of_the_language(corpus):
    lengths = {len(slots) for _, _, slots in outlines(corpus)}
    for text in paragraphs(100, 6, corpus):
        words = text.split()
        assert len(words) in lengths
        assert len(words) <= synthetic.longest_paragraph(corpus)
        assert words.count(".") in RULES[corpus].sentences
        assert any(all(_fits(corpus, word, world) for word in words) for world in worlds(corpus))  # a fact has one value
        assert posterior([*words[:-1], None], corpus)[-1] == {".": 1}


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
    for word, probability in free_choices(EASY, "ADJ", 0).items():
        p = float(probability)
        assert abs(adjectives.count(word) / len(adjectives) - p) < 4 * np.sqrt(p * (1 - p) / len(adjectives))


def test_the_fingerprint_follows_the_language(monkeypatch):
    before = [synthetic.fingerprint(corpus) for corpus in RULES]
    assert len(set(before)) == len(before)
    monkeypatch.setitem(RULES, EASY, dataclasses.replace(RULES[EASY], bodies=RULES[EASY].bodies[:-1]))
    assert synthetic.fingerprint() not in before
