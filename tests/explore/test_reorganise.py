"""The tab *Reorganise*, without a browser: what a model is worth without some heads, and the model to take along."""

import zipfile

import pytest
import torch

from pnn import plasticity
from pnn.errors import UserError
from pnn.explore import reorganise
from pnn.explore.subjects import open_subjects
from pnn.export.run import export_run
from pnn.models.loading import longest_input
from pnn.models.pnn import PNNConfig, PNNForMaskedLM

TEXT = "the fox of avon wore amber hats .\nit has old amber boots .\nthis fox is shy in avon ."


@pytest.fixture(scope="module")
def subject(trained_run):
    (subject,), _ = open_subjects([str(trained_run)])
    return subject


@pytest.fixture(scope="module")
def decoder(tiny_decoder):
    (subject,), _ = open_subjects([str(tiny_decoder)])
    return subject


def test_numbers_are_those_of_the_smaller_model(subject):
    before, after = (reorganise.worth(subject, heads, TEXT) for heads in (frozenset(), frozenset({(0, 1)})))
    smaller = plasticity.prune(subject.loaded.model, [(0, 1)])
    assert (before.heads, after.heads) == (2, 1)
    assert after.parameters == sum(p.numel() for p in smaller.parameters()) < before.parameters
    assert after.flops < before.flops
    assert after.perplexity != before.perplexity
    assert before.sample is None  # a masked model does not go on
    assert len(plasticity.heads(subject.loaded.model)) == 2  # and the opened model is as it was


def test_perplexity_is_that_of_the_models_own_loss(decoder):
    rows = reorganise.as_rows(decoder.loaded, TEXT).held_out
    with torch.no_grad():
        loss = decoder.loaded.model(input_ids=rows, labels=rows).loss
    found = reorganise.worth(decoder, frozenset(), TEXT)
    assert found.perplexity == pytest.approx(float(loss.exp()), rel=1e-4)
    assert found.targets == rows.shape[0] * (rows.shape[1] - 1)
    assert found.sample.startswith("the fox of avon wore amber")


def test_a_click_removes_and_another_brings_back(subject):
    removed = reorganise.toggled(subject, [], "0.1")
    assert removed == [(0, 1)]
    assert reorganise.toggled(subject, removed, "0.1") == []
    with pytest.raises(UserError, match="leave none"):
        reorganise.toggled(subject, removed, "0.0")
    with pytest.raises(UserError, match="no head 7"):
        reorganise.toggled(subject, [], "0.7")
    with pytest.raises(UserError, match=r"layer\.index"):
        reorganise.toggled(subject, [], "../etc")
    shown = reorganise.head_buttons(subject, removed)
    assert shown.count("<button") == 2
    assert "head 1 of refiner 0, removed" in shown
    assert 'href="reorganised.zip?model=tiny&amp;without=0.1"' in reorganise.comparison(subject, removed, TEXT)


@pytest.mark.parametrize("text", ["", "one", "fox " * 10_000])
def test_a_text_that_cannot_be_measured_on_is_told(subject, decoder, text):
    for one in (subject, decoder):
        with pytest.raises(UserError, match=r"measure on|use at most"):
            reorganise.worth(one, frozenset(), text)


def test_the_download_is_the_smaller_model(subject, tmp_path):
    reorganise.write_zip(subject, [(0, 1)], tmp_path / "model.zip")
    with zipfile.ZipFile(tmp_path / "model.zip") as archive:
        archive.extractall(tmp_path / "model")
    (opened,), _ = open_subjects([str(tmp_path / "model")])
    assert plasticity.heads(opened.loaded.model) == [(0, 0)]
    assert reorganise.worth(opened, frozenset(), TEXT) == reorganise.worth(subject, frozenset({(0, 1)}), TEXT)
    export_run(str(tmp_path / "model"), tmp_path / "exported")
    assert "1 of 2 attention heads pruned, chosen by hand" in (tmp_path / "exported" / "README.md").read_text()


def test_a_decoder_with_a_short_context_continues_as_far_as_it_can(decoder, monkeypatch):
    longest = longest_input(decoder.loaded.model)
    monkeypatch.setattr(reorganise, "CONTINUED", longest + 1)
    words = TEXT.split()[: reorganise.PROMPT]
    sample = reorganise.worth(decoder, frozenset(), TEXT + " .").sample
    assert sample.startswith(" ".join(words))
    monkeypatch.setattr(reorganise, "PROMPT", 10_000)
    monkeypatch.setattr(reorganise, "LONGEST_PROMPT", 10_000)
    assert reorganise.worth(decoder, frozenset(), "fox " * longest + "\nfox fox .").sample is None


def test_what_plasticity_refuses_has_no_buttons(subject, trained_run, tmp_path):
    """The other tabs still show it."""
    tokenizer = subject.loaded.tokenizer
    shared = {"schedule": [0, 1], "shared_attention": True, "vocab_size": len(tokenizer)}
    PNNForMaskedLM(PNNConfig(hidden_size=16, num_attention_heads=2, intermediate_size=16, **shared)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (refused, taken), _ = open_subjects([str(tmp_path), str(trained_run)])
    assert (refused.reorganises, taken.reorganises) == (False, True)


def test_the_page_opens_on_a_pnn(trained_run, tiny_bert):
    """In a folder of runs the baseline's name comes first."""
    page = pytest.importorskip("pnn.explore.page", reason="the page needs the extra app", exc_type=ImportError)
    subjects, _ = open_subjects([str(tiny_bert), str(trained_run)])
    assert page._shown_first(subjects).name == "tiny"
    assert page._shown_first(subjects[:1]).name == "bert"
