"""The plain loop of tokens that halt, and the oracle: on a model whose answer is known, and on real refiners."""

import numpy as np
import pytest
import torch
from planted import Lines
from small_models import SMALL, build, shake
from torch import nn

import pnn
from pnn.analysis.halting_bound import Rows, at_random, dial, halts_after, oracle
from pnn.analysis.trace import Text
from pnn.data.masking import SpecialTokens
from pnn.nn.packing import Layout

SOURCE, MASK, OTHER = 7, 4, 9
COUNT, IS_SOURCE, IS_MASK, ANSWER = range(4)


class Counting(nn.Module):
    """A token counts its steps. A masked one turns its answer as soon as a source of its row has counted two."""

    def forward(self, h, layout, at=None):
        told = ((h[..., IS_SOURCE] > 0) & (h[..., COUNT] > 1.5)).any(1, keepdim=True)
        h = h.clone()
        h[..., ANSWER] = torch.where(told & (h[..., IS_MASK] > 0), 1.0, h[..., ANSWER])
        h[..., COUNT] += 1
        return h


class Head(nn.Module):
    def forward(self, h):
        return torch.stack((0.5 - h[..., ANSWER], h[..., ANSWER] - 0.5), -1)


def counting_rows(rows, right=1):
    """`rows`: token ids, OTHER at padding. `right`: the answer that is right."""
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**SMALL, num_steps=4)).eval()
    model.encoder.refiners[0], model.head = Counting(), Head()
    ids = torch.tensor(rows)
    keep = ids != 0
    found = Rows(model, ids, keep, ids == MASK, torch.full_like(ids, right), np.arange(len(rows)))
    start = torch.zeros(*ids.shape, 4)
    start[..., IS_SOURCE], start[..., IS_MASK] = ids == SOURCE, ids == MASK
    found.__dict__["start"] = start
    return found


ROWS = [[OTHER, SOURCE, MASK, OTHER, OTHER], [OTHER, MASK, OTHER, 0, 0]]


@pytest.mark.parametrize("earliest", [0, 1])
def test_the_oracle_finds_how_many_steps_each_token_needs(earliest):
    """The source has to count two; the mask turns at step 3, where it reads that; nobody else is read."""
    e = earliest
    assert oracle(counting_rows(ROWS), earliest).tolist() == [[e, 2, 3, e, e], [e, e, e, 0, 0]]


def test_a_wrong_answer_need_not_stay_the_same_wrong_answer():
    rows = counting_rows([ROWS[0]], right=0)
    assert oracle(rows).tolist() == [[1, 2, 3, 1, 1]]
    assert oracle(rows, right_only=True).tolist() == [[1, 1, 1, 1, 1]]


@pytest.fixture(scope="module", params=["pnn_equations", "pnn_published", "pnn_schedule"])
def some_rows(request):
    config = build(request.param).config
    model = shake(pnn.PNNForMaskedLM(type(config).from_dict(config.to_dict() | {"max_position_embeddings": 32})))
    text = Text(Lines(12), np.arange(12), SpecialTokens(MASK, 40, (0, 1, 2, 3, 4)), 0.3, 0, 150)
    return [Rows.of(model, batch) for batch in text.batches()]


@torch.no_grad()
def test_all_steps_are_the_models_own(some_rows):
    for rows in some_rows:
        out = rows.model.encoder(rows.ids, attention_mask=rows.keep, output_states=True)
        for ours, theirs in zip(rows.states(torch.full_like(rows.ids, 4)), out.states, strict=True):
            assert torch.allclose(ours[rows.keep], theirs[rows.keep], atol=1e-5)
        # nobody reads the last step of a token that is not masked
        assert torch.allclose(rows.states(rows.all_steps)[-1][rows.targets], out.states[-1][rows.targets], atol=1e-5)


@torch.no_grad()
def test_a_loop_over_single_tokens_gives_the_same_states(some_rows):
    rows = some_rows[0]
    taken = torch.randint(0, 5, rows.ids.shape, generator=torch.Generator().manual_seed(2)) * rows.keep
    found = rows.states(taken)[-1]
    encoder = rows.model.encoder
    for row, length in enumerate(rows.keep.sum(1).tolist()):
        h = rows.start[row : row + 1, :length]
        for step in range(4):
            refined = encoder.refiners[encoder.config.schedule[step]].refine(h, Layout()).delta
            h = torch.stack([h[0, i] + refined[0, i] * (step < taken[row, i]) for i in range(length)])[None]
        assert torch.allclose(found[row, :length], h[0], atol=1e-5)


@torch.no_grad()
def test_no_prediction_changes_and_something_is_saved(some_rows):
    for rows in some_rows:
        taken = oracle(rows)
        final = rows.predictions(rows.states(rows.all_steps)[-1])
        assert torch.equal(rows.predictions(rows.states(taken)[-1]), final)
        assert int(taken.sum()) < int(rows.all_steps.sum())
        allowed = {*halts_after(rows.model, 1), 3, 4}
        assert set(taken[rows.keep].tolist()) <= allowed
        assert not taken[~rows.keep].any()


def test_a_token_halts_where_the_schedule_begins_again():
    assert halts_after(build("pnn_equations"), 0) == [0, 1, 2, 3]
    assert halts_after(build("pnn_schedule"), 1) == [2]


def test_chance_deals_out_what_the_oracle_took():
    rows = counting_rows(ROWS)
    pools = {"targets": torch.tensor([3]), "context": torch.tensor([1, 2])}
    drawn = at_random(rows, pools)
    assert drawn[rows.targets].tolist() == [3, 3]
    assert set(drawn[rows.keep & ~rows.targets].tolist()) <= {1, 2}
    assert torch.equal(drawn, at_random(rows, pools))
    assert not drawn[~rows.keep].any()


def test_a_dial_counts_what_is_read():
    rows = counting_rows(ROWS)
    assert dial(rows, 2).tolist() == [[1, 1, 2, 1, 1], [1, 2, 1, 0, 0]]
    assert dial(rows, 4, 0).tolist() == [[0, 0, 4, 0, 0], [0, 4, 0, 0, 0]]
