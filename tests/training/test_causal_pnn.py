"""A causal PNN through the commands: it learns, says its loss after every step, continues a text, and is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pnn.config import RunConfig, from_dict, load_config, validate
from pnn.data.shards import prepare
from pnn.export.run import export_run
from pnn.models.loading import load_decoder
from pnn.training.run import train_run


def config_of(prepared_folder) -> RunConfig:
    raw = {
        "model": {"type": "pnn_causal", "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_steps": 3},
        "data": {"train": "synthetic", "synthetic_paragraphs": 600, "validation_sequences": 20, "max_length": 32},
        "training": {"max_steps": 30, "batch_size": 8, "effective_batch_size": 8, "learning_rate": 1e-2, "warmup_steps": 4},
    }
    raw["model"] |= {"update": "rewrite", "initializer_range": 0.1}
    raw["data"] |= {"filter": "none", "prepared": str(prepared_folder)}
    raw["training"] |= {"log_every": 1, "evaluate_every": 15, "save_every": 30, "tensorboard": False}
    return validate(from_dict(RunConfig, raw))


@pytest.fixture(scope="module")
def run(tmp_path_factory, prepared_folder) -> Path:
    folder = tmp_path_factory.mktemp("causal") / "run"
    train_run(config_of(prepared_folder), folder, quiet=True)
    return folder


@torch.no_grad()
def test_it_learns_and_its_loss_is_told_after_every_step(run, prepared_folder):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["last_step_loss"] for row in rows if "last_step_loss" in row]
    assert losses[-1] < losses[0] - 1
    result = json.loads((run / "evaluation.json").read_text())
    assert (result["model_type"], result["num_steps"], len(result["loss_by_step"])) == ("pnn_causal", 3, 4)
    assert result["loss_by_step"][-1] == pytest.approx(result["loss"])
    assert set(result["anatomy"]) == {"embeddings", "block", "head"}
    prepared = prepare(config_of(prepared_folder).data, lambda items, _: items)
    text = torch.from_numpy(prepared.validation.take(prepared.validation_sequences)).view(-1, 32)
    model = load_decoder(run).model.eval()
    for state, told in zip(model(text, output_states=True).states, result["loss_by_step"], strict=True):
        by_hand = F.cross_entropy(model.head(state)[:, :-1].reshape(-1, model.config.vocab_size), text[:, 1:].reshape(-1))
        assert told == pytest.approx(by_hand.item(), abs=1e-4)


def test_it_is_evaluated_with_other_numbers_of_steps(run, pnn_command):
    code, out, err = pnn_command("evaluate", run, "--num-steps", "2", "--json")
    assert code == 0, err
    found, whole = json.loads(out), json.loads((run / "evaluation.json").read_text())
    assert found["loss"] == pytest.approx(whole["loss_by_step"][2], abs=1e-5)
    code, _, err = pnn_command("evaluate", run, "--num-steps", "0")
    assert code == 2
    assert "--num-steps 0: this model takes 1 to 10,000" in err


def test_it_continues_a_text_and_is_compared_with_itself(run, pnn_command, tmp_path):
    code, out, err = pnn_command("generate", run, "the fox of avon", "--temperature", "0", "--max-new-tokens", "5")
    assert code == 0, err
    assert json.loads(out)["continuation"].strip()
    checkpoint = (run / "checkpoints" / "best").resolve()
    export_run(str(run), tmp_path / "exported", remote_code=True)
    assert "A causal Plastic Neural Network" in (card := (tmp_path / "exported" / "README.md").read_text())
    assert "Loss after each refinement step, from 0:" in card
    assert {"modeling_pnn_causal.py", "modeling_decoders.py", "nn_causal.py"} <= {
        one.name for one in (tmp_path / "exported").iterdir()
    }
    code, out, err = pnn_command("compare", run, tmp_path / "exported", "--json")
    assert code == 0, (err, checkpoint)
    assert json.loads(out)["against_first"]["rows"][0]["loss"]["difference"] == pytest.approx(0, abs=1e-6)


def test_rewrites_of_a_refiner_are_not_those_of_a_deep_delta_decoder(run, pnn_command):
    code, _, err = pnn_command("analyze", "rewrites", run)
    assert code == 2
    assert "rewrites are those of a DDL decoder, and this is a PNNForCausalLM" in err


@pytest.mark.parametrize("name", ["pnn_causal_tiny", "pnn_causal_mini", "pnn_causal_small"])
def test_shipped_ones_train_as_the_deep_delta_decoder_of_their_size(name):
    ours, theirs = load_config(name), load_config(name.replace("pnn_causal", "ddl"))
    assert (ours.data, ours.training, ours.evaluation) == (theirs.data, theirs.training, theirs.evaluation)
    assert ours.kind.layout == "rows"
