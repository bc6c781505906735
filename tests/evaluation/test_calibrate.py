"""Choosing how many steps are enough, storing that, and everybody using it."""

import json
import shutil

import numpy as np
import pytest
import torch
from planted import Lines
from small_models import SMALL, build, shake
from torch import nn

import pnn
from pnn import runs
from pnn.data.run_tokens import held_out
from pnn.data.synthetic import paragraphs
from pnn.errors import UserError
from pnn.evaluation import choosing as room
from pnn.evaluation.calibrate import calibrate
from pnn.evaluation.choosing import check_can_be_calibrated, fastest, settings, store
from pnn.evaluation.masked import evaluate_masked
from pnn.models.loading import load_run
from pnn.nn.packing import only_at
from pnn.turns import LEAST

# A model that is right from its second step on ------------------------------------------------------------------------


class Counting(nn.Module):
    def forward(self, h, layout, at=None):
        return only_at(h + 1, at)


class Head(nn.Module):
    """Says word 5, the first of every line, once a token has counted two; before that a word that no line has."""

    def forward(self, h):
        logits = torch.zeros(*h.shape[:-1], 60)
        logits[..., 5], logits[..., 59] = (h[..., 0] > 1.5).float(), 0.5
        return logits


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(60, 4)
        nn.init.zeros_(self.token.weight)

    def forward(self, tokens, places):
        return tokens


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setattr(room, "halting_settings", lambda *_: [])  # it has no attention that could leave tokens out
    model = pnn.PNNForMaskedLM(pnn.PNNConfig(**(SMALL | {"max_position_embeddings": 32}), num_steps=4)).eval()
    model.encoder.refiners[0], model.encoder.embeddings, model.head = Counting(), Embedded(), Head()
    return model


@pytest.mark.parametrize(("lose", "enough"), [(0.003, {2, 3, 4}), (0.2, {1, 2, 3, 4})])
def test_what_is_chosen_loses_little_enough_and_is_the_fastest(counting, lose, enough, monkeypatch):
    monkeypatch.setattr(room, "SECONDS", 0.01)
    lines = Lines(300)
    found = calibrate(counting, lines, np.arange(300), lose, mask_probability=0.3)
    assert found["changes"]["num_steps"] in enough
    by_steps = {row["changes"]["num_steps"]: row for row in found["rows"]}
    assert [by_steps[step]["lost"]["value"] for step in (2, 3, 4)] == [0, 0, 0]
    assert 0.01 < by_steps[1]["lost"]["value"] < 0.2
    assert by_steps[1]["lost"]["interval"][0] > 0
    good = [row for row in found["rows"] if row["changes"]["num_steps"] in enough]
    assert found["chosen"] == min(good, key=lambda row: row["seconds"])["setting"]
    shares = [by_steps[step]["flops_share"] for step in (1, 2, 3, 4)]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert counting.config.num_steps == 4  # measuring changes nothing
    assert counting.config.trained_steps is None


def test_the_halves_share_no_sequence(counting, monkeypatch):
    monkeypatch.setattr(room, "SECONDS", 0.01)
    found = calibrate(counting, Lines(300), np.arange(300), 0.01, mask_probability=0.3)
    whole = evaluate_masked(counting, Lines(300), np.arange(300), mask_probability=0.3)
    assert sum(found["targets"].values()) == whole["targets"]
    targets = np.array(whole["by_sequence"]["targets"])
    assert found["targets"] == {"chose": targets[::2].sum(), "checked": targets[1::2].sum()}


def test_the_fastest_is_chosen_by_the_clock_among_those_that_may():
    def row(name, lost, seconds):
        return {"setting": name, "lost_where_it_was_chosen": {"value": lost}, "seconds": seconds}

    rows = [row("all", 0.0, 4.0), row("three", 0.002, 3.5), row("two", 0.004, 2.0), row("halting", 0.003, 2.5)]
    assert fastest(rows, 0.003)["setting"] == "halting"
    assert fastest(rows, 0.0)["setting"] == "all"


# Tokens that halt ------------------------------------------------------------------------------------------------------


@pytest.fixture
def shaken():
    config = build("pnn_published").config
    return shake(pnn.PNNForMaskedLM(type(config).from_dict(config.to_dict() | {"max_position_embeddings": 32})))


def test_halting_is_measured_as_fewer_steps_are(shaken, monkeypatch):
    monkeypatch.setattr(room, "SECONDS", 0.01)
    found = calibrate(shaken, Lines(60), np.arange(60), 0.5, mask_probability=0.3)
    halting = [row for row in found["rows"] if row["changes"]["halt"] is not None]
    found_by = {row["changes"]["halt"]["criterion"] for row in halting}
    assert found_by == {"change", "confidence", "context"}  # it has no learned unit
    changes = [row["changes"] for row in halting if row["changes"]["halt"]["criterion"] == "context"]
    assert [(one["num_steps"], one["halt"]["min_steps"]) for one in changes] == [(4, 1), (4, 2), (3, 1)]
    by_change = [row for row in halting if row["changes"]["halt"]["criterion"] == "change"]
    assert len(by_change) == len(room.SETTLED)
    spent = [row["flops_share"] for row in sorted(by_change, key=lambda row: row["changes"]["halt"]["threshold"])]
    assert spent == sorted(spent, reverse=True)  # the higher the threshold, the sooner tokens halt
    assert spent[-1] < spent[0] < 1
    row = by_change[2]
    halted = evaluate_masked(shaken, Lines(60), np.arange(60), mask_probability=0.3, halt=row["changes"]["halt"])
    right, targets = (np.array(halted["by_sequence"][key])[1::2].sum() for key in ("correct", "targets"))
    assert row["accuracy"] == pytest.approx(right / targets)
    assert shaken.config.halt is None


def test_where_nothing_comes_again_nothing_can_halt(shaken, monkeypatch):
    monkeypatch.setattr(room, "SECONDS", 0.01)
    config = type(shaken.config).from_dict(shaken.config.to_dict() | {"schedule": [0, 1, 2, 3]})
    found = calibrate(shake(pnn.PNNForMaskedLM(config)), Lines(60), np.arange(60), 0.5, mask_probability=0.3)
    assert [row["changes"]["halt"] for row in found["rows"]] == [None] * 4


def test_when_tokens_halt_is_stored_too(run, monkeypatch):
    halt = {"criterion": "change", "threshold": 0.1}
    store(runs.find_checkpoint(run), {"num_steps": 4, "trained_steps": None, "halt": halt})
    assert load_run(run).model.config.halt == halt
    room.undo(run)
    assert load_run(run).model.config.halt is None


# What a config with fewer steps means ---------------------------------------------------------------------------------


def test_fewer_steps_keep_every_refiner_and_what_was_trained(tmp_path):
    model = build("pnn_schedule", step_weights=[0.0, 0.5, 0.0, 0.5])  # refiners 0, 1, 0, 1
    assert [setting.changes["num_steps"] for setting in settings(model.config)] == [4, 2]
    model.save_pretrained(tmp_path)
    store(tmp_path, {"num_steps": 1, "trained_steps": 4})
    loaded, info = pnn.PNNForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys"))
    assert (loaded.config.num_steps, loaded.config.schedule, loaded.config.step_weights) == (
        1,
        [0, 1, 0, 1],
        [0.0, 0.5, 0.0, 0.5],
    )
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model(ids, num_steps=1).logits)
        assert torch.equal(loaded(ids, num_steps=4).logits, model(ids).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert pnn.PNNConfig.from_pretrained(tmp_path / "again").trained_steps == 4


def test_a_schedule_must_be_as_long_as_the_training():
    with pytest.raises(Exception, match="schedule has 3 entries, but trained_steps=4"):
        pnn.PNNConfig(**SMALL, num_steps=2, trained_steps=4, schedule=[0, 1, 0])
    assert pnn.PNNConfig(**SMALL, num_steps=2, trained_steps=4).schedule == [0, 0, 0, 0]


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(trained_run, tmp_path):
    shutil.copytree(trained_run, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


NEW = {"trained_steps": None, "halt": None, "trained_halt": None}


def config_of(run):
    return json.loads((runs.find_checkpoint(run) / "config.json").read_text())


def test_what_is_stored_is_used_by_everybody_and_can_be_undone(run, pnn_command, monkeypatch, tmp_path):
    monkeypatch.setattr(room, "SECONDS", 0.01)
    before = config_of(run)
    monkeypatch.setattr(room, "fastest", lambda rows, lose: rows[2])  # two steps, however fast this machine is now
    code, out, err = pnn_command("calibrate", run, "--lose", 5, "--data", "synthetic")
    assert code == 0, err
    assert "2 steps: " in out
    assert f"pnn calibrate {run} --undo" in out
    after = config_of(run)
    assert (after["num_steps"], after["trained_steps"]) == (2, 4)
    runs.verify_checkpoint(runs.find_checkpoint(run))
    code, out, err = pnn_command("fill", run, "the fox has [MASK] boots .", "--by-step", "--json")
    assert code == 0, err
    assert len(json.loads(out)["by_step"][0]) == 3  # steps 0, 1, 2
    code, out, err = pnn_command("evaluate", run, "--json")
    assert json.loads(out)["num_steps"] == 2
    code, out, err = pnn_command("evaluate", run, "--json", "--num-steps", 4)
    assert len(json.loads(out)["accuracy_by_step"]) == 5
    assert "note" not in err  # four steps are what it was trained with
    code, out, err = pnn_command("export", run, "--output", tmp_path / "exported")
    assert code == 0, err
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["num_steps"] == 2
    code, out, err = pnn_command("calibrate", run, "--undo")
    assert code == 0, err
    assert {**config_of(run), **NEW} == {**before, **NEW}
    runs.verify_checkpoint(runs.find_checkpoint(run))


HALT = {"criterion": "change", "threshold": 1e6}  # all tokens, after the first step


def test_fill_and_evaluate_halt_as_the_model_does_unless_a_number_is_named(run, pnn_command):
    full = json.loads((run / "evaluation.json").read_text())
    store(runs.find_checkpoint(run), {"halt": HALT})
    loaded, text = load_run(run, device="cpu"), "the fox of avon wore amber hats . it has old [MASK] boots ."
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"]])
    at = (ids[0] == loaded.tokenizer.mask_token_id).nonzero().squeeze(1)
    with torch.no_grad():
        halting, every = (
            float(loaded.model(ids, logit_positions=at, halt=halt).logits.softmax(-1).max()) for halt in (None, False)
        )
    assert abs(halting - every) > 1e-4
    for words, expected in (((), halting), (("--num-steps", 4), every)):
        code, out, err = pnn_command("fill", run, text, "--top", 1, "--json", *words)
        assert code == 0, err
        assert json.loads(out)["predictions"][0][0]["probability"] == pytest.approx(expected, abs=1e-6)

    tokens, sequences = held_out(run, runs.read_config(run).data, loaded.tokenizer, lambda items, _: items)
    alone = evaluate_masked(loaded.model, tokens, sequences, halt=HALT)
    assert alone["loss"] != full["loss"]
    for words, expected in (((), alone["loss"]), (("--num-steps", 4), full["loss"])):
        code, out, err = pnn_command("evaluate", run, "--json", *words)
        assert code == 0, err
        assert json.loads(out)["loss"] == pytest.approx(expected, rel=1e-6)
    assert json.loads((run / "evaluation.json").read_text())["halt"] == HALT | {"min_steps": 1}  # the two can be told apart
    assert "halt" not in json.loads((run / "evaluation_num_steps_4.json").read_text())
    said = "tokens halt by change, 1000000; --num-steps 4 measures every step of each"
    assert said in pnn_command("evaluate", run)[1]
    assert "halt" not in pnn_command("evaluate", run, "--num-steps", 4)[1]


@pytest.mark.parametrize("halt", [None, {"criterion": "change", "threshold": 0.1}])
def test_a_learned_unit_outlives_every_choice(run, halt, pnn_command, monkeypatch, tmp_path):
    loaded, unit = load_run(run), {"criterion": "learned", "threshold": 0.4, "min_steps": 1}
    loaded.model.encoder.set_halt(unit)
    nn.init.normal_(loaded.model.encoder.criterion.weight)
    for what in (loaded.model, loaded.tokenizer):
        what.save_pretrained(tmp_path / "unit")
    weight = loaded.model.encoder.criterion.weight

    def kept(folder):
        model, info = pnn.PNNForMaskedLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys"))
        assert torch.equal(model.encoder.criterion.weight, weight)
        return model.config

    store(tmp_path / "unit", settings(loaded.model.config)[1].changes | {"halt": halt})
    config = kept(tmp_path / "unit")
    assert (config.num_steps, config.halt, config.trained_halt) == (3, halt, unit)
    assert load_run(tmp_path / "unit").model(torch.arange(5, 12)[None]).logits.isfinite().all()
    code, _, err = pnn_command("export", tmp_path / "unit", "--output", tmp_path / "exported")
    assert code == 0, err
    assert kept(tmp_path / "exported").trained_halt == unit

    monkeypatch.setattr(room, "SECONDS", 0.01)
    monkeypatch.setattr(room, "fastest", lambda rows, lose: rows[2])
    text = tmp_path / "text.txt"
    text.write_text("\n".join(paragraphs(400, seed=0)))
    code, out, err = pnn_command("calibrate", tmp_path / "unit", "--lose", 5, "--data", text, "--json")
    assert code == 0, err
    assert "halting by learned" in out  # it is tried again
    assert kept(tmp_path / "unit").num_steps == 2
    code, out, err = pnn_command("calibrate", tmp_path / "unit", "--undo")
    assert (code, out) == (0, f"All 4 steps again, and the learned unit halts tokens again: {tmp_path / 'unit'}\n")
    config = kept(tmp_path / "unit")
    assert (config.num_steps, config.halt, config.trained_halt) == (4, unit, None)


def test_only_a_learned_unit_is_kept_beside_what_is_chosen():
    with pytest.raises(Exception, match="must be that of a learned unit"):
        pnn.PNNConfig(**SMALL, trained_halt={"criterion": "change", "threshold": 0.1})


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_kill_at_any_moment_leaves_a_model_that_loads(run, writes, monkeypatch):
    done, write = [], room.write_json

    def killed(path, value):
        if len(done) == writes:
            raise KeyboardInterrupt
        done.append(path)
        write(path, value)

    monkeypatch.setattr(room, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        store(runs.find_checkpoint(run), {"num_steps": 3, "trained_steps": 4})
    assert load_run(run).model.config.num_steps == (3 if writes == 2 else 4)
    monkeypatch.setattr(room, "write_json", write)
    store(runs.find_checkpoint(run), {"num_steps": 3, "trained_steps": 4})
    assert load_run(run).model.config.num_steps == 3
    assert "config.json" in json.loads((runs.find_checkpoint(run) / "checksums.json").read_text())


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "(--lose 0.3), or give --undo alone"),
        (("--lose", 1, "--undo"), "(--lose 0.3), or give --undo alone"),
        (("--lose", -1), "--lose -1: expected points of accuracy, from 0 to below 100"),
        (("--lose", 100), "from 0 to below 100"),
        (("--lose", "nan"), "from 0 to below 100"),
        (("--lose", 0.3), "too short to calibrate on"),
        (("--lose", 0), "and 0 points take 100 (--data names other text)"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(trained_run, pnn_command, words, says):
    before = config_of(trained_run)
    code, _, err = pnn_command("calibrate", trained_run, *words)
    assert code == 2
    assert says in err
    assert len([line for line in err.splitlines() if line.startswith("pnn: ")]) == 1
    assert config_of(trained_run) == before


def test_undoing_nothing_changes_nothing(run, pnn_command):
    def files():
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = files()
    said = f"pnn: {run} was never calibrated: there is nothing to undo\n"
    assert pnn_command("calibrate", run, "--undo") == (2, "", said)
    assert files() == before
    store(runs.find_checkpoint(run), settings(load_run(run).model.config)[0].changes)  # what was chosen may be all steps
    assert pnn_command("calibrate", run, "--undo")[0] == 0
    assert pnn_command("calibrate", run, "--undo") == (2, "", said)  # once is enough


@pytest.mark.parametrize("command", [("calibrate", "--lose", 1), ("evaluate",)])
def test_text_of_short_lines_is_told_with_what_to_give_instead(trained_run, command, pnn_command, tmp_path):
    (tmp_path / "short.txt").write_text("the fox\nit has boots\n" * 50)
    code, _, err = pnn_command(command[0], trained_run, *command[1:], "--data", tmp_path / "short.txt")
    assert code == 2
    assert [line for line in err.splitlines() if line.startswith("pnn: ")] == [
        f'pnn: the text "{tmp_path / "short.txt"}" is empty or too short: no line has more than 20 characters and at least '
        "5 words; give text with longer lines"
    ]


def test_a_model_without_text_or_a_place_to_store(trained_run, pnn_command, tmp_path):
    shutil.copytree(runs.find_checkpoint(trained_run), tmp_path / "bare")
    code, _, err = pnn_command("calibrate", tmp_path / "bare", "--lose", 1)
    assert (code, "say what to calibrate it on with --data" in err) == (2, True)
    code, _, err = pnn_command("calibrate", "somebody/something", "--lose", 1)
    assert (code, "is on the hub, where nothing can be stored" in err) == (2, True)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: pnn.BertBaselineConfig(**SMALL), "has no refinement steps"),
        (lambda: pnn.PNNConfig(**SMALL, num_steps=1), "the model has 1 step"),
        (lambda: pnn.PNNConfig(**SMALL, step_weights=[0.0, 0.0, 0.0, 1.0]), "read after step 4 alone"),
    ],
)
def test_models_with_nothing_to_leave_out(config, says):
    with pytest.raises(UserError, match=says):
        check_can_be_calibrated(config(), 0.003)


def test_numbers_of_steps_that_training_drew_are_tried():
    drawn = pnn.PNNConfig(num_steps=4, random_steps=[2, 7])
    assert [setting.changes["num_steps"] for setting in settings(drawn)] == [4, 3, 2]
    hybrid = pnn.PNNConfig(schedule=[0, 1, 2], repeat=[1, 2], num_steps=6)
    assert [setting.changes["num_steps"] for setting in settings(hybrid)] == [6]


def test_every_setting_is_told_of(shaken, monkeypatch):
    monkeypatch.setattr(room, "SECONDS", 0.01)
    told = []

    def progress(items, label):
        told.append((label, len(items)))
        return items

    rows = calibrate(shaken, Lines(60), np.arange(60), 0.5, mask_probability=0.3, progress=progress)["rows"]
    timed = sum(row["seconds"] is not None for row in rows)
    assert told == [("measuring, setting", len(rows)), ("timing, warming up", timed)]


def test_a_slow_model_is_timed_on_fewer_batches(shaken, monkeypatch):
    """As many as a pass in the first setting gets through."""
    monkeypatch.setattr(room, "SECONDS", 0.0)
    seen = []
    monkeypatch.setattr(room, "predictions", lambda model, batch: seen.append(batch))
    for longest, batches in ((60.0, [1, 2, 3]), (0.0, [1])):
        monkeypatch.setattr(room, "LONGEST", longest)
        seen.clear()
        room._timed(shaken, settings(shaken.config)[:1], [1, 2, 3], lambda items, _: items)
        assert seen == batches * (1 + 1 + LEAST)  # to see how many, to warm up, and timed
