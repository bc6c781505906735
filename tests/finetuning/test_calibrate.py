"""Fine-tuned classifiers that stop early: learning after every step, choosing a setting, storing it, everybody using it."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from official_files import tsv
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from pnn import runs
from pnn.evaluation import choosing
from pnn.finetuning import loop
from pnn.finetuning.calibrate import batches_of, calibrate
from pnn.finetuning.classifiers import load_classifier, read_config, read_tokenizer
from pnn.finetuning.encoding import Encoded, encode
from pnn.finetuning.examples import read_local
from pnn.finetuning.run import Settings
from pnn.finetuning.tasks import TASKS

WORDS = ["hen", "dog", "cat", "mat", "hat", "red"]


def texts(count):
    return [
        f"the {'old ' * (i % 4)}{WORDS[i % 6]} was {'good' if i % 5 < 2 else 'bad'} on the {WORDS[i // 6 % 6]}"
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    rows = [[text, str(int("good" in text))] for text in texts(200)]
    tsv(folder / "SST-2" / "train.tsv", ["sentence", "label"], rows[:140])
    tsv(folder / "SST-2" / "dev.tsv", ["sentence", "label"], rows[140:])
    return folder


@pytest.fixture(scope="module")
def tuned(data, tiny_encoders, tmp_path_factory):
    from pnn.finetuning.run import finetune

    output = tmp_path_factory.mktemp("tuned")
    asked = Settings(learning_rates=(3e-3,), epochs=1, batch_size=16, every_step=True)
    finetune(str(tiny_encoders["pnn"]), "sst2", data, output, asked, quiet=True)
    return output / "sst2"


@pytest.fixture
def run(tuned, tmp_path):
    shutil.copytree(tuned, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def hardly_timed(monkeypatch):
    monkeypatch.setattr(choosing, "SECONDS", 0.01)


def config_of(run):
    return json.loads((runs.find_checkpoint(run) / "config.json").read_text())


def one_by_one(model, tokenizer, threshold):
    """Plainly: a text alone, all its steps, and the first at which the classifier is sure. Labels and steps."""
    found = []
    for text in texts(200)[140:]:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            states = model.encoder(ids, output_states=True, halt=False).states
            said = [model.classifier(h[0, 0]).softmax(-1).max(-1) for h in states[1:]]
        sure = [step for step, one in enumerate(said, 1) if one.values >= threshold]
        stop = min([*sure, len(said)])
        found.append((int(said[stop - 1].indices), stop))
    return tuple(zip(*found, strict=True))


# Learning after every step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sst2", "copa"])
def test_the_loss_is_that_of_every_step(tiny_encoders, tiny_tokenizer, task_files, name):
    task, encoder = TASKS[name], tiny_encoders["pnn"]
    config = read_config(encoder, None)
    model = load_classifier(encoder, config, task, read_tokenizer(encoder, config)[0], 0).eval()
    encoded = encode(task, read_local(task, task_files).train, tiny_tokenizer, 48, token_types=False)
    cpu = torch.device("cpu")
    plan = loop.Plan(task, encoded, {}, 1, 8, 0, 48, cpu, torch.float32, every_step=True)
    chosen = np.arange(5)
    batch = loop.collate(encoded, chosen, 0, 48, cpu)
    labels = torch.from_numpy(encoded.labels[chosen]).long()
    losses = [F.cross_entropy(model(**batch, num_steps=step).logits, labels) for step in (1, 2, 3)]
    expected = sum(weight * loss for weight, loss in zip((1 / 6, 2 / 6, 3 / 6), losses, strict=True))
    torch.testing.assert_close(loop._loss(model, plan, chosen), expected)
    torch.testing.assert_close(loop._loss(model, replace(plan, every_step=False), chosen), losses[-1])
    model.config.step_weights = [0.0, 0.25, 0.75]  # as an encoder may have been pretrained
    torch.testing.assert_close(loop._loss(model, plan, chosen), 0.25 * losses[1] + 0.75 * losses[2])


def test_the_head_reads_in_fp32(tiny_encoders, tiny_tokenizer, task_files):
    task, encoder = TASKS["sst2"], tiny_encoders["pnn"]
    config = read_config(encoder, None)
    model = load_classifier(encoder, config, task, read_tokenizer(encoder, config)[0], 0)
    encoded = encode(task, read_local(task, task_files).train, tiny_tokenizer, 48, token_types=False)
    plan = loop.Plan(task, encoded, {}, 1, 8, 0, 48, torch.device("cpu"), torch.bfloat16)
    with torch.no_grad():
        found = torch.from_numpy(loop.outputs(model, plan, encoded))
    assert not torch.equal(found, found.bfloat16().float())
    exact = loop.outputs(model, replace(plan, precision=torch.float32), encoded)
    torch.testing.assert_close(found, torch.from_numpy(exact), atol=0.05, rtol=0)


def test_what_was_asked_for_is_kept_and_older_folders_stay_the_same_fine_tuning(tuned, data):
    asked = json.loads((tuned / "finetune.json").read_text())
    assert asked["settings"]["every_step"] is True
    assert asked["files"] == str(data)
    assert json.loads((tuned / "result.json").read_text())["settings"]["every_step"] is True
    assert "every_step" not in Settings().as_asked()


def test_only_refinement_steps_can_be_learnt_after(pnn_command, tiny_encoders, data):
    code, _, err = pnn_command("finetune", tiny_encoders["bert"], "--task", "sst2", "--data", data, "--every-step")
    assert (code, "--every-step: a pnn_bert_baseline model has no refinement steps" in err) == (2, True)


def test_a_threshold_of_another_head_does_not_come_along(tiny_encoders, tmp_path):
    shutil.copytree(tiny_encoders["pnn"], tmp_path / "encoder")
    for halt, kept in (
        ({"criterion": "confidence", "threshold": 0.4}, False),
        ({"criterion": "change", "threshold": 0.4}, True),
    ):
        choosing.store(tmp_path / "encoder", {"halt": halt})
        config = read_config(tmp_path / "encoder", None)
        tokenizer, _ = read_tokenizer(tmp_path / "encoder", config)
        model = load_classifier(tmp_path / "encoder", config, TASKS["stsb"], tokenizer, 0)
        assert (model.config.halt is not None) == kept


def test_fine_tuning_takes_as_many_steps_as_were_calibrated_unless_told(tiny_encoders, data, tmp_path):
    from pnn.finetuning.run import finetune

    shutil.copytree(tiny_encoders["pnn"], tmp_path / "encoder")
    choosing.store(
        tmp_path / "encoder", {"num_steps": 2, "trained_steps": 3, "halt": {"criterion": "change", "threshold": 0.4}}
    )
    asked = Settings(learning_rates=(3e-3,), epochs=1, batch_size=16)
    for number, steps in ((None, 2), (3, 3)):
        output = tmp_path / f"tuned {steps}"
        finetune(str(tmp_path / "encoder"), "sst2", data, output, replace(asked, steps=number), quiet=True)
        assert json.loads((output / "sst2" / "result.json").read_text())["settings"]["num_steps"] == steps
        assert len(json.loads((output / "sst2" / "result.json").read_text())["score_by_step"]) == steps + 1
        config = config_of(output / "sst2")
        assert (config["num_steps"], config["halt"] is None) == (steps, number is not None)


# Calibrating ----------------------------------------------------------------------------------------------------------


def test_a_halting_classifier_is_stored_used_and_undone(run, pnn_command, monkeypatch, tmp_path):
    before = config_of(run)
    found = {}

    def a_threshold(rows, lose):
        found.update({row["setting"]: row for row in rows})
        return next(
            row
            for row in rows
            if (row["changes"]["halt"] or {}).get("criterion") == "confidence" and 0.2 < row["flops_share"] < 0.9
        )

    monkeypatch.setattr(choosing, "fastest", a_threshold)
    code, out, err = pnn_command("calibrate", run, "--lose", 99)
    assert code == 0, err
    assert "30 dev examples that did not choose" in out
    assert f"pnn calibrate {run} --undo" in out
    halt = config_of(run)["halt"]
    assert halt["criterion"] == "confidence"
    checkpoint = runs.find_checkpoint(run)
    runs.verify_checkpoint(checkpoint)
    criteria = {(row["changes"]["halt"] or {"criterion": "dial"})["criterion"] for row in found.values()}
    assert criteria == {"dial", "context", "change", "confidence"}
    assert "3 steps, 1 for all but the first token" in found
    assert any(name.startswith("halting by confidence") and name.endswith(" within 2 steps") for name in found)

    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    labels, steps = one_by_one(model, tokenizer, halt["threshold"])
    assert 1 < np.mean(steps) < 3  # some stop early
    said = pipeline("text-classification", model=str(checkpoint), batch_size=7)(texts(200)[140:])
    assert [int(one["label"]) for one in said] == list(labels)
    with torch.no_grad():
        out = model(**tokenizer(texts(200)[140:], padding=True, return_tensors="pt"))
    assert out.halted_at[:, 0].tolist() == list(steps)
    right = np.array(labels) == np.array(["good" in text for text in texts(200)[140:]])
    row = found[f"halting by confidence, {halt['threshold']:.9g}"]
    assert row["accuracy"] == pytest.approx(right[1::2].mean())  # the half that checks

    code, _, err = pnn_command("export", run, "--output", tmp_path / "exported")
    assert code == 0, err
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["halt"] == halt
    code, out, err = pnn_command("calibrate", run, "--undo")
    assert (code, out) == (0, f"All 3 steps again: {run}\n")
    after = config_of(run)
    new = {"trained_steps": None, "halt": None, "trained_halt": None}
    assert {**after, **new} == {**before, **new}
    assert after["halt"] is None
    runs.verify_checkpoint(checkpoint)


def test_fewer_steps_are_a_setting_too(run, pnn_command, monkeypatch, data):
    monkeypatch.setattr(choosing, "fastest", lambda rows, lose: rows[1])
    code, out, err = pnn_command("calibrate", run, "--lose", 99, "--data", data, "--batch-tokens", 200, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["chosen"], result["targets"]) == ("2 steps", {"chose": 30, "checked": 30})
    config = config_of(run)
    assert (config["num_steps"], config["trained_steps"]) == (2, 3)
    assert 0.3 < result["flops_share"] < 0.7


def test_the_examples_of_both_sets_and_whole_passages_are_counted():
    def some(count, units=None):
        ids = [[1, 2, 3][: 1 + i % 3] for i in range(count)]
        lengths = np.array([len(row) for row in ids])
        return Encoded(ids, None, 0, np.zeros(count), lengths, 0, int(lengths.sum()), 0, units=units)

    batches = batches_of([some(5), some(4)], 2)
    assert sorted(np.concatenate([batch.sequence for batch in batches])) == list(range(9))
    assert [len(batch.labels) for batch in batches] == [2, 2, 1, 2, 2]
    passages = batches_of([some(6, np.array([0, 0, 1, 1, 1, 2]))], 4)
    assert np.bincount(np.concatenate([batch.sequence for batch in passages])).tolist() == [2, 3, 1]


# What cannot be calibrated --------------------------------------------------------------------------------------------


def with_task(run, **changes):
    asked = json.loads((run / "finetune.json").read_text())
    (run / "finetune.json").write_text(json.dumps(asked | changes))


def as_bert(run, encoders):
    shutil.rmtree(run / "checkpoints" / "best")
    shutil.copytree(encoders["bert"], run / "checkpoints" / "best")


@pytest.mark.parametrize(
    ("change", "lose", "says"),
    [
        (
            lambda run, encoders: None,
            0.3,
            "too few dev examples to calibrate on: one half has 30 dev examples, and 0.3 points take 334",
        ),
        (lambda run, encoders: None, -1, "from 0 to below 100"),
        (
            lambda run, encoders: with_task(run, task="stsb"),
            50,
            "stsb: calibrate is for classifiers, and this model predicts a number",
        ),
        (
            lambda run, encoders: with_task(run, task="copa"),
            50,
            "copa: calibrate is for classifiers, and this model predicts one of several",
        ),
        (lambda run, encoders: with_task(run, files=None), 50, "name their folder with --data"),
        (lambda run, encoders: with_task(run, files="nowhere"), 50, "--data nowhere: no such folder"),
        (as_bert, 50, "a pnn_bert_baseline model has no refinement steps"),
        (
            lambda run, encoders: choosing.store(run / "checkpoints" / "best", {"num_steps": 1, "schedule": [0]}),
            50,
            "the model has 1 step",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(run, tiny_encoders, pnn_command, change, lose, says):
    change(run, tiny_encoders)
    before = config_of(run)
    code, _, err = pnn_command("calibrate", run, "--lose", lose)
    assert code == 2
    assert says in err
    assert len([line for line in err.splitlines() if line.startswith("pnn: ")]) == 1
    assert config_of(run) == before


def test_in_python_the_model_stays_as_it_is(tuned, tiny_tokenizer, data):
    task = TASKS["sst2"]
    model = AutoModelForSequenceClassification.from_pretrained(tuned / "checkpoints" / "best").train()
    dev = encode(task, read_local(task, data).dev["dev"], tiny_tokenizer, 48, token_types=False)
    found = calibrate(model, [dev], 0.9)
    assert found["rows"][0]["flops_share"] == 1
    assert min(row["flops_share"] for row in found["rows"]) < 0.5
    assert (model.config.num_steps, model.config.halt, model.training) == (3, None, True)
