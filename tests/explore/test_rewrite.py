"""The tab *Rewrite*, without a browser: a continuation and what was written at each of its tokens."""

import pytest
import torch

from pnn.errors import UserError
from pnn.explore import rewrite
from pnn.explore.subjects import open_subjects

TEXT = "the fox of avon"


@pytest.fixture(scope="module")
def subject(tiny_decoder):
    (subject,), _ = open_subjects([str(tiny_decoder)])
    return subject


def test_it_goes_on_as_the_seed_says(subject):
    one, same, other = (rewrite.continued(subject, TEXT, 1.0, seed, 8) for seed in (1, 1, 2))
    assert one == same
    assert one.tokens[: one.prompt] == TEXT.split()
    assert one.text == TEXT
    assert one.tokens != other.tokens
    likeliest = rewrite.continued(subject, TEXT, 0, 5, 3)
    assert likeliest == rewrite.continued(subject, TEXT, 0, 6, 3)
    assert max(likeliest.chances[1:]) <= 1


def test_what_is_told_of_a_token_follows_the_rule(subject):
    """At ‖k‖ = 1 the read-out goes β of the way to its target, in every sublayer, at every token."""
    found = rewrite.continued(subject, TEXT, 0, 0, 2)
    assert found.sublayers == ["attention 0", "mlp 0", "attention 1", "mlp 1"]
    assert len(found.writes) == 4
    for write in (write for column in found.writes for write in column):
        expected = [b + write.beta * (v - b) for b, v in zip(write.before, write.target, strict=True)]
        assert write.after == pytest.approx(expected, abs=1e-3)


def test_chances_are_the_models(subject):
    found = rewrite.continued(subject, TEXT, 0, 0, 1)
    ids = torch.tensor([subject.loaded.tokenizer.convert_tokens_to_ids(TEXT.split())])
    with torch.no_grad():
        logits = subject.loaded.model(ids).logits[0, -1]
    assert found.chances[-1] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)


def test_the_grid_has_a_row_for_each_token(subject):
    found = rewrite.continued(subject, TEXT, 0, 0, 4)
    shown = rewrite.grid(found)
    assert shown.count('<tr class="masked">') == len(found.tokens) - 4
    assert shown.count("the target was") == 4 * len(found.tokens)


@pytest.mark.parametrize("text", ["", "fox " * 64, "fox " * 3000])
def test_a_text_that_cannot_be_continued_is_told(subject, text):
    with pytest.raises(UserError, match=r"nothing to continue|too long"):
        rewrite.continued(subject, text, 1.0, 0, 4)
