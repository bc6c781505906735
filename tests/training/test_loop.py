"""The loop in this process: arithmetic of a run, stopping on a broken loss, precision, rotation, what a run folder holds."""

import itertools
import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer

from pnn.config import TrainingConfig, load_config
from pnn.errors import UserError
from pnn.evaluation.fill import fill
from pnn.evaluation.refining import refining
from pnn.files import point
from pnn.models import PNNConfig, PNNForMaskedLM
from pnn.models.loading import load_run
from pnn.training import checkpoint
from pnn.training.loop import Trainer, _step_seed
from pnn.training.optim import learning_rate, make_optimizer
from pnn.training.updates import Plan, updates_ahead


def test_a_smaller_batch_keeps_the_effective_batch(tiny_config, tmp_path):
    plans = []
    for batch_size in (2, 8, 16):
        config = load_config(str(tiny_config(training={"batch_size": batch_size, "max_steps": None, "epochs": 3})))
        trainer = Trainer(config, tmp_path / str(batch_size), quiet=True)
        plans.append(trainer.plan)
        assert trainer.plan.accumulation == 16 // batch_size
    assert len({plan.updates for plan in plans}) == 1
    tokens = [plan.batch_tokens * plan.accumulation for plan in plans]
    assert tokens[1] == pytest.approx(tokens[2], rel=0.05)


@pytest.mark.parametrize("batch_size", [4, 8, 16])
def test_an_update_takes_the_effective_batch_on_average(tiny_config, tmp_path, batch_size):
    config = load_config(str(tiny_config(training={"batch_size": batch_size, "max_steps": None, "epochs": 3})))
    trainer = Trainer(config, tmp_path / "run", quiet=True)
    for _ in range(trainer.plan.updates * trainer.plan.accumulation):
        next(trainer.stream)
    assert trainer.stream.position / trainer.plan.updates == pytest.approx(16, rel=0.06)
    assert trainer.stream.position / len(trainer.prepared.train_sequences) == pytest.approx(3, rel=0.06)


def test_the_papers_protocol_gives_its_number_of_updates():
    class Fake:
        """A million sequences at the mean length measured on the real text."""

        class train:  # noqa: N801
            lengths = torch.full((1_000_000,), 82).numpy()

        train_sequences = slice(None)

    config = load_config("pnn_wikitext103")
    plan = Plan.of(config, Fake, processes=1)
    assert (plan.accumulation, plan.batch_tokens) == (3, 31488)
    assert plan.updates == 13021  # 15 × 1,000,000 / 1,152
    config = load_config("pnn_wikitext103", ["training.batch_size=128"])
    assert Plan.of(config, Fake, processes=1).accumulation == 9
    assert Plan.of(config, Fake, processes=3).accumulation == 3
    with pytest.raises(UserError, match="not a multiple"):
        Plan.of(config, Fake, processes=2)


def test_learning_rate_warms_up_and_ends_at_the_minimum():
    training = TrainingConfig(learning_rate=3e-4, min_learning_rate=1e-5, warmup_steps=500)
    rates = [learning_rate(step, 2000, training) for step in range(2000)]
    assert rates[0] == pytest.approx(3e-4 / 500)  # the first update is not wasted
    assert rates[499] == rates[500] == pytest.approx(3e-4)
    assert rates[-1] == pytest.approx(1e-5)
    assert all(a >= b for a, b in itertools.pairwise(rates[500:]))
    quarter = learning_rate(500 + 1499 // 4, 2000, training)  # of the way down: a cosine has fallen by 15 % only
    assert quarter == pytest.approx(1e-5 + 2.9e-4 * (1 + 0.5**0.5) / 2, rel=2e-3)


def test_decay_spares_norms_biases_and_the_temperature():
    model = PNNForMaskedLM(PNNConfig(vocab_size=20, hidden_size=8, num_attention_heads=2, intermediate_size=8, gate_bias=True))
    matrices, vectors = make_optimizer(model, TrainingConfig(weight_decay=0.01)).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.01, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    spared = {names[id(p)] for p in vectors["params"]}
    assert all(("norm" in n or n.endswith("bias") or n.endswith("temperature")) for n in spared)
    assert len(spared) + len(matrices["params"]) == len(names)
    assert "encoder.refiners.0.gate.temperature" in spared


def test_a_non_finite_loss_stops_the_run_and_keeps_the_last_good_checkpoint(tiny_config, tmp_path, pnn_command):
    config = tiny_config(training={"learning_rate": 1e30, "warmup_steps": 1, "log_every": 5, "save_every": 1})
    code, _, err = pnn_command("train", config, "--output", tmp_path / "run")
    assert code == 2
    assert "non-finite at step " in err
    step = int(err.partition("non-finite at step ")[2].split()[0])
    good = tmp_path / "run" / "checkpoints" / "last"
    assert int(good.resolve().name.removeprefix("step-")) < step
    assert good.resolve().name in err
    model = PNNForMaskedLM.from_pretrained(good)
    assert all(torch.isfinite(p).all() for p in model.parameters())


class Killed(BaseException):
    """As sudden as a signal: nobody catches it."""


@pytest.mark.parametrize("killed", [False, True])
def test_best_is_the_lowest_of_all_evaluations_also_after_a_resume(tiny_config, tmp_path, monkeypatch, killed):
    losses, alive = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5}, [not killed]

    def measured(trainer):
        if trainer.step == 6 and not alive[0]:
            alive[0] = True
            raise Killed
        return {"validation_loss": losses[trainer.step]}

    monkeypatch.setattr(Trainer, "_evaluation", measured)
    config = load_config(str(tiny_config(training={"max_steps": 8, "evaluate_every": 2, "save_every": 2})))
    with pytest.raises(Killed) if killed else nullcontext():
        Trainer(config, tmp_path / "run", quiet=True).train()
    if killed:
        Trainer(config, tmp_path / "run", resume=True, quiet=True).train()
    assert (tmp_path / "run" / "checkpoints" / "best").resolve().name == "step-000004"
    state = json.loads((tmp_path / "run" / "checkpoints" / "last" / "trainer_state.json").read_text())
    assert (state["step"], state["best_step"], state["best_loss"]) == (8, 4, 1.0)


def test_what_a_kill_left_unfinished_is_gone_when_the_run_goes_on(tiny_config, tmp_path):
    run, config = (
        tmp_path / "run",
        load_config(str(tiny_config(training={"max_steps": 4, "evaluate_every": 2, "save_every": 2}))),
    )
    run.mkdir()
    for resume in (False, True):  # killed at its very first file, and later
        for leftover in (".config.yaml.partial-4194305", ".metrics.jsonl.partial-4194305"):  # no such process
            (run / leftover).write_text("half")
        Trainer(config, run, resume=resume, quiet=True).train()
        assert not list(run.rglob("*.partial-*"))


def test_gradients_are_clipped_after_fp16_is_unscaled(tiny_config, tmp_path):
    """A CPU computes in fp32, so that only the scale differs; fp16 itself is tested on a GPU."""
    config, norms, weights = load_config(str(tiny_config(model={"dropout": 0.0}))), [], []
    for scale in (None, 1024.0):
        trainer = Trainer(config, tmp_path / str(scale), quiet=True)
        accelerator = trainer.accelerator
        if scale is not None:
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
            trainer.stepper = AcceleratedOptimizer(trainer.optimizer, device_placement=False, scaler=accelerator.scaler)
            accelerator._optimizers = [trainer.stepper]
        update = next(updates_ahead(trainer.stream, trainer.plan, 0, 1, 1))
        norms.append(float(trainer.apply(update, 1e-3)[2]))
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert torch.allclose(weights[1], weights[0], atol=1e-5)


def test_bf16_trains_on_a_cpu(tiny_config, tmp_path):
    config = load_config(str(tiny_config(training={"precision": "bf16", "max_steps": 30})))
    Trainer(config, tmp_path / "run", quiet=True).train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.5


def test_a_run_folder_holds_what_the_contract_says(trained_run):
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "evaluation.json"):
        assert (trained_run / name).is_file()
    for name in ("best", "last", "step-000020"):
        folder = trained_run / "checkpoints" / name
        for file in ("config.json", "model.safetensors", "tokenizer.json", "trainer_state.json"):
            assert (folder / file).is_file()
    environment = json.loads((trained_run / "environment.json").read_text())
    assert environment["seed"] == 0
    assert environment["versions"]["torch"].startswith("2.")
    evaluation = json.loads((trained_run / "evaluation.json").read_text())
    assert len(evaluation["accuracy_by_step"]) == len(evaluation["loss_by_step"]) == 5
    assert 0 < evaluation["accuracy"] < evaluation["ceiling"] < 1
    assert set(evaluation["by_kind"]) == {"grammar", "agreement", "fact", "free"}


def test_old_checkpoints_are_rotated_away(tiny_config, tmp_path):
    changes = {"save_every": 3, "evaluate_every": 100, "keep_checkpoints": 2, "max_steps": 20}
    Trainer(load_config(str(tiny_config(training=changes))), tmp_path / "run", quiet=True).train()
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-000018", "step-000020"]


def test_the_newest_by_number_and_best_and_last_are_never_rotated_away(tmp_path):
    for step in (100, 200, 300, 999_999, 1_000_000):  # by name a million would come before all but 100
        checkpoint.step_folder(tmp_path, step).mkdir()
    point(tmp_path / "best", tmp_path / "step-000100")
    point(tmp_path / "last", tmp_path / "step-000300")
    (tmp_path / "step-000200-keep").mkdir()  # somebody's copy
    checkpoint.rotate(tmp_path, 1)
    kept = ["step-000100", "step-000200-keep", "step-000300", "step-1000000"]
    assert sorted(p.name for p in tmp_path.glob("step-*")) == kept


def test_more_masks_in_training_leave_the_evaluation_as_it_is(tiny_config, tmp_path):
    measured = []
    for share in (None, 0.4):
        config = load_config(str(tiny_config(data={"train_mask_probability": share})))
        measured.append(Trainer(config, tmp_path / str(share), quiet=True)._evaluation())
    assert measured[0] == measured[1]


def test_dropout_has_a_seed_of_its_own_for_every_run_step_and_process():
    cases = list(itertools.product(range(3), range(200), range(8)))
    assert len({_step_seed(*case) for case in cases}) == len(cases)


def test_a_run_that_guesses_learns_and_resumes(tiny_config, tmp_path):
    model = {"guess_after": [2], "embedding_size": 8, "head_transform": True, "tie_word_embeddings": True}
    training = {"max_steps": 20, "save_every": 10, "evaluate_every": 20}
    config = load_config(str(tiny_config(model=model, training=training)))
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    Trainer(config, unbroken, quiet=True).train()
    shutil.copytree(unbroken, resumed, symlinks=True)
    point(resumed / "checkpoints" / "last", resumed / "checkpoints" / "step-000010")
    shutil.rmtree(resumed / "checkpoints" / "step-000020")
    Trainer(config, resumed, resume=True, quiet=True).train()
    ends = [(folder / "checkpoints" / "step-000020" / "model.safetensors").read_bytes() for folder in (unbroken, resumed)]
    assert ends[0] == ends[1]
    losses = [row["loss"] for line in (unbroken / "metrics.jsonl").open() if "loss" in (row := json.loads(line))]
    assert losses[-1] < losses[0] - 0.1
    loaded = load_run(unbroken, device="cpu")
    assert loaded.model.config.mask_token_id == loaded.tokenizer.mask_token_id
    assert loaded.model.encoder.guess.share.unique().numel() > 1
    sentence = "the fox of avon wore amber hats . it has old [MASK] boots ."
    (filled,) = fill(loaded.model, loaded.tokenizer, [sentence], top=1)
    (masked,) = [row for row in refining(loaded, sentence, top=1)["rows"] if row["masked"]]
    assert masked["cells"][-1]["top"][0]["probability"] == pytest.approx(filled["predictions"][0][0]["probability"], abs=1e-6)


def test_a_golden_curve(tiny_config, tmp_path):
    """A refactor must not change what is learnt. Update the numbers only for a change that is meant to. (Without dropout: its
    draws depend on what is computed where, which a faster form may change.)"""
    config = tiny_config(model={"dropout": 0.0}, training={"max_steps": 10})
    Trainer(load_config(str(config)), tmp_path / "run", quiet=True).train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    golden = [float(x) for x in GOLDEN.split()]
    assert losses == pytest.approx(golden, rel=2e-5)


GOLDEN = """
4.562370 4.495337 4.574574 4.430100 4.497483 4.305144 4.183964 4.246405 4.155922 4.304255
"""
