"""Which tokens stop when, on eight tokens of which everything is known."""

import pytest
import torch

from pnn.analysis.halting_groups import FREQUENCIES, LOSSES, Groups, Tokens, WordKinds
from pnn.analysis.totals import Totals

FREQUENCY = torch.tensor([99, 0, 1, 2, 3, 4, 50, 60])  # of each id
WORDS = torch.tensor([0, 2, 3, 4, 5, 6, 7, 6, 7, 0])
TARGETS = torch.tensor([5, 6, 7, 8])
LOSS = torch.tensor([0.1, 3.0, 0.2, 2.0])
STEPS = torch.tensor([1, 4, 3, 2, 1, 1, 4, 2, 3, 0])


def tokens(padded=False):
    """Special, four ordinary ones from rare to frequent, four masked ones; as rows, with a padded token at the end."""
    targets = torch.zeros(10, dtype=torch.bool).index_fill_(0, TARGETS, True)
    keep, sequence = torch.arange(10) < 9, torch.arange(10) // 5
    parts, end = (WORDS, keep, targets, sequence), None if padded else 9
    shaped = [x.view(2, 5) if padded else x[:end] for x in parts]
    return Tokens(*shaped, correct=torch.tensor([True, False, True, False]), loss=LOSS)


def told(some, steps, word_kinds=None):
    groups, totals = Groups.of([some], (0,), FREQUENCY, word_kinds), Totals(2)
    groups.add(totals, some, {"me": steps, "nobody": torch.zeros_like(steps)}, most=4)
    return groups.told(totals, "me")


def means(rows):
    return {label: row["steps"]["value"] for label, row in rows.items()}


@pytest.mark.parametrize("padded", [False, True])
def test_every_token_is_in_its_group(padded):
    found = told(tokens(padded), STEPS.view(2, 5) if padded else STEPS[:9])
    assert means(found["by_kind"]) == {"masked": 2.5, "special": 1.0, "ordinary": 2.5}
    assert means(found["by_frequency"]) == dict(zip(FREQUENCIES, (4.0, 3.0, 2.0, 1.0), strict=True))
    assert means(found["by_outcome"]) == {"right": 1.5, "wrong": 3.5}
    assert means(found["by_loss"]) == dict(zip(LOSSES, (1.0, 2.0, 3.0, 4.0), strict=True))
    assert found["by_kind"]["masked"]["halted_after"] == [0, 1, 1, 1, 1]
    assert found["by_kind"]["special"]["tokens"] == 1
    assert "by_kind_of_word" not in found


def test_equal_tokens_share_a_quarter_and_empty_ones_are_left_out():
    some = tokens()
    equal = Tokens(some.words, some.keep, some.targets, some.sequence, some.correct, torch.ones(4))
    (row,) = told(equal, STEPS[:9])["by_loss"].values()
    assert row["tokens"] == 4


def test_words_are_of_the_kind_that_a_tokenizer_says():
    kinds = WordKinds(("even", "odd"), lambda words: words % 2)
    found = told(tokens(), STEPS[:9], kinds)["by_kind_of_word"]
    assert means(found) == {"even": 3.0, "odd": 2.0}  # of ordinary tokens alone: ids 2 and 4, 3 and 5
