"""More rounds than were trained, of refiners that are known to go somewhere, to drift on, or to leave through another one."""

from __future__ import annotations

import pytest
import torch
from planted import ANSWER, MEDIUM, WRONG, model, tables, text
from torch import nn

import pnn
from pnn.analysis.subject import Subject
from pnn.nn.packing import only_at
from pnn.nn.refiner import Refinement
from pnn.studies.analyses.more_steps import after_rounds
from pnn.studies.run import perform


class Moves(nn.Module):
    """h ← h + move(h)."""

    def __init__(self, move):
        super().__init__()
        self.move = move

    def forward(self, h, layout, at=None):
        return only_at(h + self.move(h), at)

    def refine(self, h, layout):
        return Refinement(self.move(h), self.move(h), None)


def to_answers(h):
    """Where every medium position says its word."""
    point = torch.zeros_like(h)
    place = h[..., :31].argmax(-1)
    for position in MEDIUM:
        point[place == position, ANSWER[position]] = 2.0
    return point


def verdicts(move):
    built = model(tables())
    built.encoder.refiners[0] = Moves(move)
    result = perform("more_steps", Subject(built, text(20)))
    return result, {name: found["verdict"] for name, found in result["findings"].items()}


def written(h):
    """h in the dimensions that tell words."""
    kept = torch.zeros_like(h)
    kept[..., 32:44] = h[..., 32:44]
    return kept


def test_an_iteration_toward_the_answers_is_found():
    result, found = verdicts(lambda h: 0.5 * (to_answers(h) - written(h)))
    assert set(found.values()) == {"supported"}
    assert [one["value"] for one in result["contraction_by_round"]] == pytest.approx([0.5] * 6, rel=1e-3)
    assert (result["num_rounds"], result["steps_by_round"]) == (4, [*range(1, 9), 32])


def test_a_drift_that_never_ends_is_told_from_one():
    def drift(h):
        away = torch.zeros_like(h)
        away[..., WRONG[0]] = 0.4
        return away

    result, found = verdicts(drift)
    assert found["every_round_moves_less"] == found["states_near_a_point"] == "not supported"
    assert found["more_rounds_keep_the_accuracy"] == found["the_far_state_predicts_as_well"] == "not supported"
    assert result["findings"]["states_near_a_point"]["effect"]["value"] == pytest.approx(4 / 28, rel=1e-3)


def test_a_hybrid_is_read_behind_the_refiners_it_leaves_through():
    torch.manual_seed(0)
    size = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "zero_init": False}
    hybrid = pnn.PNNForMaskedLM(pnn.PNNConfig(**size, schedule=[0, 1, 2], repeat=[1, 2], num_steps=4)).eval()
    (batch, *_) = text(4).batches()
    passes = after_rounds(hybrid, batch, [3, 4])
    for steps, found in zip((3, 4), passes, strict=True):
        ids, borders = batch.masked.input_ids[None], batch.packed.cu_seqlens
        last = hybrid.encoder(ids, cu_seqlens=borders, num_steps=steps).last_hidden_state[0]
        torch.testing.assert_close(found, last[batch.masked.positions])
    result = perform("more_steps", Subject(hybrid, text(4)))
    assert (result["num_rounds"], result["steps_by_round"][:3], result["steps_by_round"][-1]) == (2, [3, 4, 5], 34)
