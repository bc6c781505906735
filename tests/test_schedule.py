"""Schedules of which a part repeats, and numbers of steps that are drawn: what runs, what fits, what is said of the rest."""

from __future__ import annotations

import json

import pytest
import torch

import pnn
from pnn.analysis.trace import blocks_of
from pnn.config import load_config
from pnn.errors import Stopped, UserError
from pnn.figures.anatomy import anatomy
from pnn.models.flops import training_flops
from pnn.models.loading import check_num_steps
from pnn.models.registry import sentence
from pnn.models.sections import model_config
from pnn.objectives import step_weights, weights_at
from pnn.schedule import drawn_from, rounds
from pnn.training.loop import Trainer
from pnn.training.run import train_run

SIZE = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 12}
HYBRID = {"schedule": [0, 1, 2, 3], "repeat": [2, 3], "num_steps": 7}


def config(**changes):
    return pnn.PNNConfig(**SIZE | {"zero_init": False, "initializer_range": 0.2, "dropout": 0.0} | changes)


def model(**changes):
    torch.manual_seed(0)
    return pnn.PNNForMaskedLM(config(**changes)).eval()


def test_more_and_fewer_steps_repeat_the_part_and_leave_through_the_last():
    hybrid = config(**HYBRID)
    assert hybrid.schedule == hybrid.order() == [0, 1, 2, 2, 2, 2, 3]
    assert (hybrid.order(4), hybrid.order(9)) == ([0, 1, 2, 3], [0, 1, 2, 2, 2, 2, 2, 2, 3])
    assert hybrid.order(0) == []
    pairs = config(schedule=[0, 1, 2, 3], repeat=[1, 3])
    assert pairs.order(8) == [0, 1, 2, 1, 2, 1, 2, 3]
    assert config(schedule=[0, 1]).order(5) == [0, 1, 0, 1, 0]  # as ever


def test_the_model_runs_what_the_order_says():
    built, ids = model(**HYBRID), torch.arange(5, 15)[None]
    out = built.encoder(ids, num_steps=5, output_states=True)
    h = out.states[0]
    for number in (0, 1, 2, 2, 3):
        h = built.encoder.refiners[number](h, pnn.nn.packing.Layout())
    assert torch.equal(h, out.last_hidden_state)
    assert blocks_of(built, 5) == [built.encoder.refiners[number] for number in (0, 1, 2, 2, 3)]


def test_a_saved_hybrid_comes_back_and_may_have_another_number_of_steps(tmp_path):
    model(**HYBRID).save_pretrained(tmp_path)
    again = pnn.PNNForMaskedLM.from_pretrained(tmp_path)
    assert (again.config.schedule, again.config.repeat, again.config.num_steps) == ([0, 1, 2, 2, 2, 2, 3], [2, 3], 7)
    longer = pnn.PNNConfig.from_pretrained(tmp_path, num_steps=8)
    assert longer.order() == [0, 1, 2, 2, 2, 2, 2, 3]
    assert "repeat" in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"repeat": [2, 2]}, r"empty part.*0 <= start < end <= 4 would fit"),
        ({"repeat": [3, 9]}, r"no part of the schedule.*0 <= start < end <= 4 would fit"),
        ({"repeat": [1, 3], "num_steps": 7}, r"7 steps do not fit the schedule \[0, \(1, 2\) × 1, 3\].*: 6 or 8 would"),
        ({"repeat": [1, 3], "num_steps": 2}, r"2 steps do not fit.*: 4 would"),
        ({"random_steps": [2, 6]}, r"do not use every refiner of \[0, 1, 2, 3\]: \[4, 6\] would"),
        ({"random_steps": [4, 1_000_000]}, r"at most 1,000 steps can be drawn"),
        ({"repeat": [1, 3], "trained_steps": 4, "num_steps": 5}, r"5 steps do not fit the schedule.*: 4 or 6 would"),
        ({"random_steps": [6, 4]}, r"no range: \[fewest, most\]"),
        ({"repeat": [1, 3], "random_steps": [5, 5]}, r"do not use every refiner.*: \[4, 5\] would"),
    ],
)
def test_what_does_not_fit_is_told_with_what_would(given, said):
    with pytest.raises(UserError, match=said):
        model_config({"type": "pnn", "schedule": [0, 1, 2, 3]} | given)


def test_commands_refuse_a_number_of_steps_between_two_rounds(capsys):
    built = model(schedule=[0, 1, 2, 3], repeat=[1, 3])
    with pytest.raises(UserError, match=r"--num-steps: 5 steps do not fit.*: 4 or 6 would"):
        check_num_steps(built, 5)
    check_num_steps(model(random_steps=[2, 6]), 6)
    assert "note" not in capsys.readouterr().err
    check_num_steps(model(random_steps=[2, 6]), 7)
    assert "trained with 2 to 6 steps" in capsys.readouterr().err


def test_rounds_are_counted_in_steps():
    assert rounds([0] * 4, None, 3) == [1, 2, 3]
    assert rounds([0, 1, 0, 1], None, 2) == [2, 4]
    assert rounds([0, 0, 1], None, 2) == [3, 6]
    assert rounds([0, 1, 2, 2, 3], [2, 3], 3) == [4, 5, 6]


def test_chosen_weights_stay_where_they_are_from_the_end():
    assert weights_at([0, 0.3, 0, 0.7], 6) == [0, 0, 0, 0.3, 0, 0.7]
    assert weights_at([0, 0.3, 0, 0.7], 2) == [0, 1.0]
    assert weights_at([0, 0, 0, 1.0], 5) == [0, 0, 0, 0, 1.0]
    assert weights_at([0.1, 0.2, 0.3, 0.4], 4) == [0.1, 0.2, 0.3, 0.4]
    built, ids = model(step_weights=[0, 0, 0.5, 0.5]), torch.arange(5, 15)[None]
    assert len(built(ids, labels=ids, num_steps=6).step_losses) == 2
    assert len(model()(ids, labels=ids, num_steps=6).step_losses) == len(step_weights(6))


def test_drawn_numbers_fit_and_are_all_drawn():
    assert drawn_from([0, 1, 2, 3], [1, 3], [3, 9]) == [4, 6, 8]
    hybrid, generator = config(schedule=[0, 1, 2, 3], repeat=[1, 3], random_steps=[3, 9]), torch.Generator().manual_seed(0)
    assert {hybrid.draw_steps(generator) for _ in range(60)} == {4, 6, 8}
    assert config().draw_steps() is None


def test_a_model_in_training_draws_and_one_in_use_does_not():
    built, ids = model(random_steps=[1, 6]), torch.arange(5, 15)[None]
    assert {len(built(ids, labels=ids).step_losses) for _ in range(5)} == {4}
    built.train()
    assert len({len(built(ids, labels=ids).step_losses) for _ in range(30)}) > 2
    assert len(built(ids, labels=ids, num_steps=3).step_losses) == 3


def test_flops_are_the_mean_over_what_is_drawn():
    fixed = [training_flops(config(num_steps=steps), 10, 0.15) for steps in (2, 3, 4)]
    assert training_flops(config(random_steps=[2, 4]), 10, 0.15) == pytest.approx(sum(fixed) / 3)
    chosen = [config(num_steps=n, step_weights=[0.0] * (n - 2) + [0.5, 0.5]) for n in (2, 4)]
    drawn = config(num_steps=4, step_weights=[0, 0, 0.5, 0.5], schedule=[0] * 4, repeat=[0, 2], random_steps=[2, 4])
    assert training_flops(drawn, 10, 0.15) == pytest.approx(sum(training_flops(one, 10, 0.15) for one in chosen) / 2)


def test_cards_and_figures_say_which_part_repeats():
    built = model(**HYBRID, random_steps=[4, 9])
    assert "7 steps in all: [0, 1, (2) × 4, 3], whose middle part" in sentence(built)
    assert "trained with 4 to 9 steps" in sentence(built)
    assert anatomy(built.config.to_dict()).describe() == "4 refiners in 7 steps (2 + 1 × 4 + 1)"
    calibrated = pnn.PNNConfig(num_steps=3, trained_steps=4)
    assert anatomy(calibrated.to_dict()).schedule == (0, 0, 0)


def test_updates_draw_by_seed_and_step_and_resume_to_the_bit(tiny_config, tmp_path):
    changes = {"model": {"random_steps": [1, 4]}, "training": {"max_steps": 6, "save_every": 3, "evaluate_every": 6}}
    whole = load_config(str(tiny_config(**changes)))
    drawn, apply = [], Trainer._forward_backward

    def watched(self, inputs, num_steps=None):
        drawn.append((self.step, num_steps))
        return apply(self, inputs, num_steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_forward_backward", watched)
        train_run(whole, tmp_path / "whole", quiet=True)
    by_step = dict(drawn)
    assert len(drawn) == 12  # two micro-batches of an update share a draw
    assert set(drawn) == set(by_step.items())
    assert len(set(by_step.values())) > 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_agreed_signal", lambda self: 15 if self.step == 3 else None)
        with pytest.raises(Stopped):
            Trainer(whole, tmp_path / "half", quiet=True).train()
    train_run(whole, tmp_path / "half", resume=True, quiet=True)
    weights = [(tmp_path / run / "checkpoints" / "last" / "model.safetensors").read_bytes() for run in ("whole", "half")]
    assert weights[0] == weights[1]
