"""The bound for halting, on models of which it is known who needs how many steps."""

import math

import numpy as np
import pytest
import torch
from planted import MASK, Lines
from rich.console import Console
from small_models import SMALL
from torch import nn

import pnn
from pnn import progress
from pnn.analysis.subject import Subject
from pnn.analysis.trace import Text
from pnn.data.masking import SpecialTokens
from pnn.errors import UserError
from pnn.figures.studies import figure_of
from pnn.studies.run import check, perform

COUNT, IS_SOURCE, IS_MASK, ANSWER = range(4)
FIRST_WORD = 5


class Counting(nn.Module):
    """A token counts its steps. A masked one is right as soon as all sources of its row have counted two."""

    def forward(self, h, layout, at=None):
        waiting = ((h[..., IS_SOURCE] > 0) & (h[..., COUNT] < 1.5)).any(1, keepdim=True)
        h = h.clone()
        h[..., ANSWER] = torch.where(~waiting & (h[..., IS_MASK] > 0), 1.0, h[..., ANSWER])
        h[..., COUNT] += 1
        return h


class Embedded(nn.Module):
    def __init__(self, sources):
        super().__init__()
        self.token = nn.Embedding(60, 4)
        with torch.no_grad():
            self.token.weight.zero_()
            self.token.weight[sources, IS_SOURCE] = 1
            self.token.weight[MASK, IS_MASK] = 1

    def forward(self, tokens, places):
        return tokens


class Head(nn.Module):
    """Says a word that is never masked until the answer is there; then what half of the targets are."""

    def forward(self, h):
        logits = torch.zeros(*h.shape[:-1], 60)
        logits[..., 0] = 0.5
        logits[..., FIRST_WORD : FIRST_WORD + 10] = h[..., ANSWER, None]
        return logits


def subject(sources, schedule=None, count=30):
    sizes = SMALL | {"max_position_embeddings": 32}
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**sizes, num_steps=4, schedule=schedule)).eval()
    for number in range(len(model.encoder.refiners)):
        model.encoder.refiners[number] = Counting()
    model.encoder.embeddings, model.head = Embedded(sources), Head()
    text = Text(Lines(count), np.arange(count), SpecialTokens(MASK, 40, (0, 1, 2, 3, 4)), 0.2, 0, 200)
    return Subject(model, text, text.tokens.tokenizer())


@pytest.fixture(scope="module")
def one_source():
    return perform("halting", subject([24]))  # stands in every line; where it is masked itself nobody waits


def verdicts(result):
    return {name: found["verdict"] for name, found in result["findings"].items()}


def test_a_bound_that_pays_and_one_that_does_not(one_source):
    assert verdicts(one_source)["bound_beats_the_dial"] == "supported"
    everyone = perform("halting", subject(list(range(60))))  # each token has to count two
    assert verdicts(everyone)["bound_beats_the_dial"] == verdicts(everyone)["two_dials_beat_one"] == "not supported"
    assert everyone["oracles"]["bound"]["flops_share"]["value"] == pytest.approx(everyone["dial"][2]["flops_share"]["value"])


def test_who_halts_when(one_source):
    kinds = one_source["by_kind"]
    assert kinds["masked"]["halted_after"][3] > 0.5 * kinds["masked"]["tokens"]
    assert kinds["special"]["halted_after"][1] == kinds["special"]["tokens"]
    assert one_source["by_outcome"]["wrong"]["tokens"] + one_source["by_outcome"]["right"]["tokens"] == one_source["targets"]
    words = {label: row["tokens"] for label, row in one_source["by_kind_of_word"].items()}
    assert set(words) == {"word start", "punctuation"}  # what the tokenizer says of these ids
    assert sum(words.values()) == kinds["ordinary"]["tokens"]
    low, high = one_source["by_loss"].values()  # of words that the head knows, and of others: two losses, no more
    assert low["tokens"] + high["tokens"] == one_source["targets"]
    assert verdicts(one_source)["who_halts_matters"] == "supported"  # at random the source often halts too soon


def test_the_bound_loses_nothing_and_all_steps_are_the_measure(one_source):
    assert [row["steps"] for row in one_source["dial"]] == [1, 2, 3, 4]
    whole, bound = one_source["dial"][-1], one_source["oracles"]["bound"]
    assert whole["flops_share"]["value"] == whole["ideal_speedup"]["value"] == 1
    assert bound["points_lost"] == {"value": 0.0, "interval": [0.0, 0.0]}
    assert bound["accuracy"] == whole["accuracy"]
    assert bound["ideal_speedup"]["value"] == pytest.approx(1 / bound["flops_share"]["value"])
    shares = [one_source["oracles"][name]["flops_share"]["value"] for name in ("from_the_start", "bound")]
    assert shares[0] < shares[1] < 1
    assert math.isclose(one_source["random"]["flops_share"]["value"], shares[1], rel_tol=0.1)  # the same budget


def test_with_several_refiners_only_the_bound_is_told():
    result = perform("halting", subject([24], schedule=[0, 1, 0, 1]))
    assert result["halts_after"] == [2]
    assert set(result["findings"]) <= {"bound_beats_the_dial", "two_dials_beat_one"}
    assert "random" not in result
    assert figure_of("halting")(result).axes


def test_it_shows_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(progress, "console", Console(stderr=True, width=200))
    result = perform("halting", subject([24], count=6))
    lines = capsys.readouterr().err.splitlines()
    # one decision for each token wherever it may halt: after steps 1, 2 and 3, or from the start
    for name, places in {"bound": 3, "from_the_start": 4, "right_answers": 3}.items():
        assert sum(f"{name} " in line and f"/{places * result['tokens']}" in line for line in lines) > 3
    assert lines[-1] == "3 done"


def test_its_figure_names_every_condition(one_source):
    figure = figure_of("halting")(one_source)
    assert len(figure.legends[0].get_texts()) == 6
    assert [text.get_text() for text in figure.axes[0].texts][:4] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, num_steps=1)), "has 1 step"),
        (lambda: pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig(**SMALL, num_hidden_layers=2)), "layers, not refinement"),
    ],
)
def test_what_cannot_halt_says_so(model, why):
    with pytest.raises(UserError, match=why):
        check("halting", model())
