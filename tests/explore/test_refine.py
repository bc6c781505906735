"""The tab *Refine*, without a browser: words that are masked by a click, and what models make of the text."""

import pytest

from pnn.errors import UserError
from pnn.explore import refine
from pnn.explore.subjects import default_models, open_subjects


def test_a_click_masks_a_word_and_another_shows_it_again():
    text = "Old boots, and [MASK]."
    known = refine.pieces(text)
    assert "".join(known) == text
    masked = refine.toggled(text, known, known.index("boots"))
    assert masked == "Old [MASK], and [MASK]."
    assert refine.toggled(masked, refine.originals(masked, known), known.index("boots")) == text
    assert refine.toggled(text, known, known.index("[MASK]")) == text  # nothing was behind it
    assert refine.toggled(text, known, 99) == text
    assert "title=&quot;" not in (row := refine.words(masked, known))
    assert 'title="was: boots"' in row


def test_typing_elsewhere_keeps_what_was_masked():
    known = refine.pieces("red [MASK] boots")
    assert refine.originals("blue [MASK] boots", ["red", " ", "old", " ", "boots"])[2] == "old"
    assert refine.originals("very blue [MASK] boots", known) == refine.pieces("very blue [MASK] boots")


def test_each_model_answers_or_says_why_not(trained_run, tiny_bert):
    (pnn, bert), problems = open_subjects([str(trained_run), str(tiny_bert)])
    assert not problems
    shown = refine.grids([pnn, bert], "the fox <b> is [MASK] .")
    assert shown.count('class="refining pointable"') == 2
    assert "<b>" not in shown  # what is typed is text, never markup
    too_long = refine.grids([pnn, bert], "fox " * 100)
    assert "takes 64: shorten it" in too_long
    assert too_long.count('class="refining pointable"') == 1  # the other takes 128


def test_a_model_that_cannot_be_opened_leaves_the_others(trained_run, tmp_path):
    subjects, problems = open_subjects([str(trained_run), str(tmp_path / "none")])
    assert [subject.name for subject in subjects] == ["tiny"]
    assert "no run or checkpoint" in problems[0]


def test_without_names_it_takes_what_is_there(tmp_path):
    with pytest.raises(UserError, match="pnn quickstart"):
        default_models(tmp_path)
    box = tmp_path / "models" / "pnn-base"
    for folder in (box, *(tmp_path / "runs" / "quickstart" / name / "checkpoints" / "best" for name in ("pnn", "bert"))):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    assert default_models(tmp_path) == ["models/pnn-base"]
    (box / "config.json").unlink()  # a folder without a model
    assert default_models(tmp_path) == ["runs/quickstart/pnn", "runs/quickstart/bert"]
