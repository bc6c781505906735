"""Decoders of transformers' own, trained from fresh weights by our loop: ordinary folders that everything else takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from pnn.config import RunConfig, from_dict, load_config, validate
from pnn.models.sections import build_model, compile_blocks, model_config
from pnn.training.loop import Stopped, Trainer
from pnn.training.run import train_run

SHAPES = {
    "gpt2": {"architecture": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2},
    "opt": {
        "architecture": "opt",
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
    },
}
DATA = {"train": "synthetic", "synthetic_paragraphs": 600, "validation_sequences": 20, "max_length": 32, "filter": "none"}
TRAINING = {
    "max_steps": 36,
    "batch_size": 4,
    "effective_batch_size": 8,
    "learning_rate": 5.0e-3,
    "warmup_steps": 4,
    "log_every": 1,
    "evaluate_every": 12,
    "save_every": 6,
    "tensorboard": False,
}


def config_of(prepared_folder, name="gpt2", **training) -> RunConfig:
    raw = {
        "model": {"type": "transformers", **SHAPES[name]},
        "data": {**DATA, "prepared": str(prepared_folder)},
        "training": {**TRAINING, **training},
    }
    return validate(from_dict(RunConfig, raw))


@pytest.fixture(scope="module", params=list(SHAPES))
def run(request, tmp_path_factory, prepared_folder) -> Path:
    folder = tmp_path_factory.mktemp(request.param, numbered=False) / "run"
    train_run(config_of(prepared_folder, request.param), folder, quiet=True)
    return folder


def test_it_learns_and_loads_in_transformers(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[0] == pytest.approx(math.log(82), abs=0.5)
    assert losses[-1] < losses[0] - 0.4
    result = json.loads((run / "evaluation.json").read_text())
    model = hf.AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "last").eval()
    assert type(model) in (hf.GPT2LMHeadModel, hf.OPTForCausalLM)
    assert model.config.model_type == result["model_type"] == run.parent.name
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert hf.AutoTokenizer.from_pretrained(run / "checkpoints" / "last").vocab_size <= model.config.vocab_size


def test_the_loss_is_that_of_the_whole_update(prepared_folder, tmp_path):
    """However many micro-batches share it: transformers divides by the number that we give."""
    from pnn.training.updates import updates_ahead

    found = []
    for size in (2, 8):
        trainer = Trainer(config_of(prepared_folder, batch_size=size), tmp_path / str(size), quiet=True)
        trainer.wrapped.eval()  # GPT-2 has dropout, which depends on the shape
        update = next(updates_ahead(trainer.stream, trainer.plan, 0, 1, 1))
        loss, _, norm = trainer.apply(update, 1e-3)
        found.append((loss.item(), norm.item()))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_resumed_run_gives_the_same_bits(run, prepared_folder, tmp_path):
    name = run.parent.name
    trainer = Trainer(config_of(prepared_folder, name), tmp_path / "run", quiet=True)
    log = trainer._log

    def stop_at_17(metrics, row):
        log(metrics, row)
        if row["step"] == 17:
            trainer.signal = 15

    trainer._log = stop_at_17
    with pytest.raises(Stopped):
        trainer.train()
    train_run(config_of(prepared_folder, name), tmp_path / "run", resume=True, quiet=True)
    one, other = (load_file(folder / "checkpoints/last/model.safetensors") for folder in (run, tmp_path / "run"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_commands_take_the_run(run, tmp_path, pnn_command):
    code, out, err = pnn_command("evaluate", run)
    assert code == 0, err
    code, out, err = pnn_command("generate", run, "the fox of avon", "--temperature", "0", "--max-new-tokens", "5")
    assert code == 0, err
    assert out.strip()
    code, out, err = pnn_command("report", run)
    assert code == 0, err
    code, out, err = pnn_command(
        "plasticity", "prune", run, "--by", "magnitude", "--ratio", "0.25", "--output", tmp_path / "small", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["heads"] == 3
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / "small").can_generate()


def test_blocks_are_compiled_where_asked():
    model = build_model(model_config({"type": "transformers", **SHAPES["opt"]}, 82))
    compile_blocks(model)
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["model.decoder.layers.0", "model.decoder.layers.1"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2_distil", 81_912_576), ("gpt2_small", 124_439_808), ("opt_350m", 331_196_416)],  # as published
)
def test_shipped_shapes_are_the_published_ones(name, parameters):
    config = load_config(name)
    with torch.device("meta"):
        model = build_model(model_config(config.model, 50257, max_position_embeddings=config.data.max_length))
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert config.data.layout == "rows"


def test_the_tiny_config_has_nothing_left_of_what_it_extends():
    assert load_config("gpt2_tiny").model == {
        "type": "transformers",
        "architecture": "gpt2",
        "vocab_size": 128,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.n_layers=3", 'unknown key "model.n_layers" (did you mean "n_layer"?)'),
        ("model.n_layer=many", "model.n_layer: expected a whole number"),
        ("model.architecture=gpt-2", "transformers has no decoder 'gpt-2' (did you mean"),
        ("model.type=transformer", "no architecture 'transformer' (did you mean \"transformers\"?)"),
        ("model.n_head=5", "divisible"),
        ("model.n_embd=-8", "model.n_embd: must be above zero, got -8"),
        ("model.n_positions=16", "max_position_embeddings: 16, but data.max_length is 64"),
    ],
)
def test_wrong_settings_are_clear_errors(tmp_path, pnn_command, setting, message):
    code, _, err = pnn_command("train", "gpt2_tiny", "--output", tmp_path / "run", "--set", setting)
    assert code == 2
    assert message in err
    assert not (tmp_path / "run").exists()
