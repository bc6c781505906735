"""Models that change their shape while they train: what they compute, what the optimiser keeps, and resuming to the bit."""

from __future__ import annotations

import json
import shutil
import time

import pytest
import torch

from pnn.config import RunConfig, TrainingConfig, from_dict, load_config, validate
from pnn.errors import UserError
from pnn.files import point
from pnn.models.loading import load_model
from pnn.models.sections import build_model, model_config
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.in_training import InTraining, reorganise
from pnn.plasticity.units import rearrange, unit_map
from pnn.training.loop import Trainer
from pnn.training.optim import average_weights, descend, make_optimizer, moments
from pnn.training.run import train_run

MODELS = {
    "gpt2": {"type": "transformers", "architecture": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64},
    "ddl": {"type": "ddl", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "pnn": {"type": "pnn", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_steps": 2},
    "pnn_causal": {"type": "pnn_causal", "hidden_size": 32, "num_attention_heads": 4, "ffn": "geglu", "intermediate_size": 48},
}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS = {
    "bert": {"type": "bert", **LAYERS, "intermediate_size": 48},
    "opt": {"type": "transformers", "architecture": "opt", **LAYERS, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "llama": {"type": "transformers", "architecture": "llama", **LAYERS, "intermediate_size": 48},
}
CHANGES = {"start": 0.5, "changes": 3, "until": 0.75, "turnover": 0.3}  # after updates 3, 6 and 9 of 12


def config_of(prepared_folder, model="gpt2", training=None, **plasticity) -> RunConfig:
    raw = {
        "model": MODELS[model],
        "data": {
            "train": "synthetic",
            "synthetic_paragraphs": 400,
            "validation_sequences": 10,
            "max_length": 32,
            "prepared": str(prepared_folder),
        },
        "training": {
            "max_steps": 12,
            "batch_size": 4,
            "effective_batch_size": 4,
            "learning_rate": 5.0e-3,
            "warmup_steps": 2,
            "log_every": 1,
            "evaluate_every": 12,
            "save_every": 4,
            "keep_checkpoints": 9,
            "tensorboard": False,
            **(training or {}),
        },
        "plasticity": {**CHANGES, **plasticity},
    }
    return validate(from_dict(RunConfig, raw))


def rows_of(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# Surgery --------------------------------------------------------------------------------------------------------------


def half_a_model(name: str, optimizer: str = "adamw"):
    """Half of its units, trained for two updates with an average of its weights."""
    torch.manual_seed(0)
    model = build_model(model_config({**(MODELS | OTHERS)[name], "vocab_size": 50}, 50, max_position_embeddings=16))
    rearrange(
        model, {"head": [[0, 3]] * len(unit_map(model, "head")), "neuron": [[*range(20)]] * len(unit_map(model, "neuron"))}
    )
    made = make_optimizer(model, TrainingConfig(optimizer=optimizer))
    ids = torch.randint(5, 50, (3, 8))
    for _ in range(2):
        descend(model, made, model(input_ids=ids, labels=ids).loss, 1e-2)
        average_weights(made, 0.5)
    return model.eval(), made, ids


@pytest.mark.parametrize("kind", ["head", "neuron"])
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_growth_changes_nothing_and_the_optimiser_keeps_what_it_knew(name, kind):
    model, optimizer, ids = half_a_model(name)
    before = model(input_ids=ids).logits
    architecture = architecture_of(model)
    old = unit_map(model, kind)[0]
    outputs = [architecture.parts(kind, block)[-1] for block in architecture.blocks(model)]
    inputs = architecture.parts(kind, architecture.blocks(model)[0])[0]
    first, second = (one.clone() for one in moments(optimizer, outputs[0].weight))
    kept = [one.view().clone() for at in range(len(old)) for one in inputs.stretches(at)]

    grown = sorted({*old, old[-1] - 1, old[-1] + 5} - ({old[-1] + 5} if kind == "head" else set()))
    reorganise(model, optimizer, kind, [grown] * len(outputs), torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-5, rtol=1e-5)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}
    assert all(p in {*model.parameters()} for p in optimizer.state)

    output, (m, v) = outputs[0], moments(optimizer, outputs[0].weight)
    weight, average = output.weight, optimizer.state[outputs[0].weight]["average"]
    assert m.shape == v.shape == average.shape == weight.shape
    for position, index in enumerate(grown):
        (stretch,) = output.stretches(position)
        if index in old:
            at = old.index(index)
            was = [one.narrow(output.dim, at * output.width, output.width) for one in (first, second)]
            assert torch.equal(stretch.of(m), was[0])
            assert torch.equal(stretch.of(v), was[1])
        else:
            assert not stretch.view().any()
            assert not stretch.of(m).any()
            others = second.unflatten(output.dim, (len(old), output.width)).mean(output.dim)
            torch.testing.assert_close(stretch.of(v), others, atol=0, rtol=1e-5)
            assert torch.equal(stretch.of(average), stretch.view())
            assert all(one.view().std() > 0 for one in inputs.stretches(position) if one.parameter.dim() > 1)
    now = [one.view() for position, index in enumerate(grown) if index in old for one in inputs.stretches(position)]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))

    rest = [p.detach().clone() for p in model.parameters()]
    descend(model, optimizer, model(input_ids=ids, labels=ids).loss, 1e-2)
    assert all(not torch.equal(a, b) for a, b in zip(rest, model.parameters(), strict=True) if a.dim() > 1)


def test_muon_moves_what_grew():
    model, optimizer, ids = half_a_model("ddl", "muon")
    reorganise(model, optimizer, "neuron", [[*range(24)]] * 2, torch.Generator().manual_seed(0))
    down = architecture_of(model).parts("neuron", architecture_of(model).blocks(model)[0])[-1].weight
    assert optimizer.state[down]["momentum_buffer"].shape == down.shape
    descend(model, optimizer, model(input_ids=ids, labels=ids).loss, 1e-2)
    assert down[:, 20:].any()


# Who goes, and where new ones grow ------------------------------------------------------------------------------------


def plastic(prepared_folder, tmp_path, **plasticity) -> Trainer:
    return Trainer(config_of(prepared_folder, **plasticity), tmp_path / "run", quiet=True)


@pytest.mark.parametrize("by", ["fisher", "gradient", "magnitude"])
def test_the_least_useful_go(prepared_folder, tmp_path, by):
    trainer = plastic(prepared_folder, tmp_path, kinds=["head"], start=1.0, end=0.75, changes=1, turnover=0.0, prune_by=by)
    output = trainer.plasticity._outputs("head")[1]
    for projection in trainer.plasticity._outputs("head"):
        like = torch.ones_like(projection.weight)
        trainer.optimizer.state[projection.weight] = {"step": torch.tensor(1.0), "exp_avg": like, "exp_avg_sq": like}
        torch.nn.init.constant_(projection.weight, 1.0)
    for position, size in ((0, 0.2), (3, 0.1)):
        torch.nn.init.constant_(output.stretches(position)[0].view(), size)
    row = trainer.plasticity.change(trainer.optimizer, 9)
    assert unit_map(trainer.model, "head") == [[0, 1, 2, 3], [1, 2]]
    assert (row["heads"], row["heads_pruned"], row["heads_grown"]) == (6, 2, 0)
    assert "neurons" not in row


def test_growth_by_gradient_prefers_layers_that_are_asked_for_more(prepared_folder, tmp_path):
    trainer = plastic(prepared_folder, tmp_path, kinds=["head"], end=0.75, changes=1, turnover=0.0, grow_by="gradient")
    for size, projection in zip((1e-20, 1.0), trainer.plasticity._outputs("head"), strict=True):
        like = torch.full_like(projection.weight, size)
        trainer.optimizer.state[projection.weight] = {"step": torch.tensor(1.0), "exp_avg": like, "exp_avg_sq": like}
    trainer.plasticity.change(trainer.optimizer, 9)
    assert unit_map(trainer.model, "head") == [[0, 1], [0, 1, 2, 3]]


def test_what_is_turned_over_in_a_full_model_is_new(prepared_folder, tmp_path):
    trainer = plastic(prepared_folder, tmp_path, kinds=["neuron"], start=1.0, changes=1, turnover=0.25, prune_by="magnitude")
    outputs = trainer.plasticity._outputs("neuron")
    before = [projection.weight.detach().clone() for projection in outputs]
    row = trainer.plasticity.change(trainer.optimizer, 9)
    assert (row["neurons"], row["neurons_pruned"], row["neurons_grown"]) == (128, 32, 32)
    emptied = sum(int((~projection.weight.any(1 - projection.dim)).sum()) for projection in outputs)
    same = sum(int((a == b.weight).all(1 - b.dim).sum()) for a, b in zip(before, outputs, strict=True))
    assert (emptied, same) == (32, 96)


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gpt2", "ddl muon", "pnn", "pnn_causal"])
def finished(request, tmp_path_factory, prepared_folder):
    model, _, optimizer = request.param.partition(" ")
    training = {"optimizer": optimizer or "adamw", "average_decay": 0.9}
    config = config_of(prepared_folder, model, training)
    run = tmp_path_factory.mktemp(model) / "run"
    train_run(config, run, quiet=True)
    return config, run


def test_a_run_grows_to_its_full_size_and_counts_its_flops(finished):
    config, run = finished
    rows = rows_of(run)
    changes = [row for row in rows if "heads" in row]
    assert [row["step"] for row in changes] == [3, 6, 9]
    assert all(row["heads_pruned"] and row["neurons_pruned"] for row in changes)
    parameters = [row["parameters"] for row in changes]
    assert parameters == sorted({*parameters})
    torch.manual_seed(0)
    trained = load_model(run / "checkpoints" / "last")
    full = build_model(model_config(config.model, trained.config.vocab_size, max_position_embeddings=32))
    assert parameters[-1] == sum(p.numel() for p in full.parameters()) == sum(p.numel() for p in trained.parameters())
    early = load_model(run / "checkpoints" / "step-000004")
    assert sum(p.numel() for p in early.parameters()) == parameters[0]
    assert early.config.head_map != trained.config.head_map

    spent = {row["step"]: row["training_flops"] for row in rows if "training_flops" in row}
    assert list(spent) == list(range(1, 13))
    # between changes an update costs what the change said, for as many tokens
    costs = {row["step"]: row["training_flops_per_token"] for row in changes}
    tokens = [(spent[step + 1] - spent[step]) / costs[step] for step in (3, 6, 9)]
    assert all(one == pytest.approx(128, rel=1e-9 if config.kind.causal else 0.3) for one in tokens)  # packed lines differ
    assert json.loads((run / "checkpoints/last/trainer_state.json").read_text())["training_flops"] == spent[12]


@pytest.mark.parametrize("step", [4, 8])
def test_resumed_from_any_checkpoint_it_ends_with_the_same_bits(finished, tmp_path, step):
    config, run = finished
    other = tmp_path / "run"
    shutil.copytree(run, other, symlinks=True)
    shutil.rmtree(other / "checkpoints" / "average")
    for later in range(step + 4, 13, 4):
        shutil.rmtree(other / "checkpoints" / f"step-{later:06d}")
    (other / "checkpoints" / "best").unlink()
    point(other / "checkpoints" / "last", other / "checkpoints" / f"step-{step:06d}")
    train_run(config, other, resume=True, quiet=True)
    for file in ("last/model.safetensors", "last/optimizer.safetensors", "last/config.json", "average/model.safetensors"):
        assert (run / "checkpoints" / file).read_bytes() == (other / "checkpoints" / file).read_bytes(), file
    timed = ("tokens_per_second", "seconds")
    one, two = ([{k: v for k, v in row.items() if k not in timed} for row in rows_of(folder)] for folder in (run, other))
    assert one == two


@pytest.mark.slow
def test_killed_right_after_a_change_it_ends_with_the_same_bits(prepared_folder, tmp_path, start_pnn):
    config = config_of(prepared_folder, training={"save_every": 2})
    file = tmp_path / "growing.yaml"
    file.write_text(config.to_yaml())
    train_run(config, tmp_path / "unbroken", quiet=True)
    run = tmp_path / "run"
    process = start_pnn("train", file, "--output", run)
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or "heads" not in (run / "metrics.jsonl").read_text():
        assert process.poll() is None, process.output()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert start_pnn("train", file, "--output", run, "--resume").wait() == 0
    for name in ("model.safetensors", "optimizer.safetensors", "config.json"):
        one, two = (folder / "checkpoints" / "last" / name for folder in (tmp_path / "unbroken", run))
        assert one.read_bytes() == two.read_bytes(), name


@pytest.mark.slow
def test_several_processes_are_refused(prepared_folder, tmp_path, start_processes):
    file = tmp_path / "growing.yaml"
    file.write_text(config_of(prepared_folder).to_yaml())
    processes = start_processes(2, "train", file, "--output", tmp_path / "run")
    assert [process.wait() for process in processes] == [2, 2]
    assert "a model that changes its shape trains in one process, not in 2" in processes[0].output()
    assert not (tmp_path / "run").exists()


def test_a_model_may_shrink_while_it_trains(prepared_folder, tmp_path):
    config = config_of(prepared_folder, start=1.0, end=0.25, turnover=0.0, prune_by="random")
    trainer = Trainer(config, tmp_path / "run", quiet=True)
    trainer.train()
    sizes = [(row["heads"], row["neurons"]) for row in rows_of(tmp_path / "run") if "heads" in row]
    assert sizes == [(6, 96), (4, 64), (2, 32)]
    assert [len(row) for row in unit_map(trainer.model, "head")] == [1, 1]


def test_runs_without_the_section_say_nothing_of_it(trained_run):
    assert "plasticity" not in (trained_run / "config.yaml").read_text()
    assert "plasticity" not in RunConfig().to_dict()
    assert not any("training_flops" in row for row in rows_of(trained_run))


# What does not fit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("plasticity.start=0", "plasticity.start: must lie above 0 and up to 1, got 0"),
        ("plasticity.end=1.5", "plasticity.end: must lie above 0 and up to 1, got 1.5"),
        ("plasticity.turnover=-0.1", "plasticity.turnover: must be at least 0 and below 1, got -0.1"),
        ("plasticity.until=2", "plasticity.until: must lie above 0 and up to 1, got 2"),
        ("plasticity.changes=0", "plasticity.changes: must be above zero"),
        ("plasticity.prune_by=luck", "plasticity.prune_by: 'luck' is none of fisher, gradient"),
        ("plasticity.grow_by=fisher", "plasticity.grow_by: 'fisher' is none of random, gradient"),
        ("plasticity.kinds=[layer]", "plasticity.kinds: expected a list of head and neuron, got"),
        ("plasticity.kinds=[]", "plasticity.kinds: expected a list of head and neuron, got"),
        ("plasticity.evry=3", 'unknown key "plasticity.evry"'),
        ("plasticity.start=half", "plasticity.start: expected a number, got 'half'"),
        ("plasticity=true", "plasticity: expected a section of keys, got True"),
        ("training.compile=true", "training.compile: true, but a model that changes its shape is not compiled"),
    ],
)
def test_a_wrong_section_is_refused_in_one_sentence(tmp_path, setting, said):
    file = tmp_path / "wrong.yaml"
    file.write_text("extends: gpt2_tiny\nplasticity: {start: 0.5}\n")
    with pytest.raises(UserError) as error:
        load_config(str(file), [setting])
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"changes": 10}, "plasticity.changes: 10, but plasticity.until leaves 9 of the run's 12 updates for them"),
        ({"model": {"type": "transformers", "architecture": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2}}, "bloom"),
    ],
)
def test_a_run_that_cannot_change_is_refused_before_anything_is_written(prepared_folder, tmp_path, changes, said):
    config = config_of(prepared_folder, **{key: value for key, value in changes.items() if key != "model"})
    config.model = changes.get("model", config.model)
    with pytest.raises(UserError, match=said):
        Trainer(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_number_of_changes_is_even(prepared_folder, tmp_path):
    trainer = plastic(prepared_folder, tmp_path, changes=9)
    assert isinstance(trainer.plasticity, InTraining)
    assert trainer.plasticity.steps == list(range(1, 10))
