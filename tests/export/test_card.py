"""The card says what the run's files say, and no more."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from pnn.evaluation.choosing import store
from pnn.export.card import model_card
from pnn.export.loading import open_for_export
from pnn.models import PNNConfig
from pnn.models.registry import ENTRIES


def card(run, bf16=False, remote_code=False, onnx_steps=None, licence=None) -> str:
    exported = open_for_export(str(run))
    return model_card(exported, bf16=bf16, remote_code=remote_code, onnx_steps=onnx_steps, licence=licence)


def head(text) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


@pytest.fixture
def run(trained_run, tmp_path):
    shutil.copytree(trained_run, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def test_a_pretrained_models_card(run):
    evaluation = json.loads((run / "evaluation.json").read_text())
    text = card(run, licence="cc-by-sa-4.0")
    assert head(text)["license"] == "cc-by-sa-4.0"
    assert head(text)["pipeline_tag"] == "fill-mask"
    assert f"| validation | {100 * evaluation['accuracy']:.1f} % |" in text
    low, high = evaluation["accuracy_interval"]
    assert f"{100 * low:.1f}–{100 * high:.1f}" in text
    assert f"{evaluation['parameters']:,}" in text
    for known in ("Trained on `synthetic`", "20 updates of 16 sequences", "learning rate of 0.002", "seed 0", "One seed"):
        assert known in text
    assert "30.0 %" not in text
    assert "15.0 % of the tokens were masked" in text
    assert "halt" not in text
    assert "rounded to bf16" not in text
    assert "rounded to bf16" in card(run, bf16=True)
    # what the files say is where it comes from
    evaluation["accuracy"] = 0.12345
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    assert "| validation | 12.3 % |" in card(run)


def test_token_shards_are_told_by_the_text_they_were_made_of(run):
    assert "tokenizer `corpus`" in card(run)
    tokens, config = json.loads((run / "tokens.json").read_text()), yaml.safe_load((run / "config.yaml").read_text())
    tokens["train"]["recipe"]["source"] = {"files": [["one.txt", "digest"], ["two.txt.xz", "digest"]], "column": "text"}
    (run / "tokens.json").write_text(json.dumps(tokens))
    config["data"]["train"] = f"elsewhere/{Path(tokens['train']['folder']).name}"
    config["training"] |= {"max_steps": None, "epochs": 3}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = card(run)
    assert "Trained on `one.txt`, `two.txt.xz`, tokenised in advance" in text
    assert "`corpus`" not in text
    assert "3 epochs in updates of 16 sequences" in text


def test_a_step_without_a_loss_is_not_reported(run):
    path = run / "checkpoints" / "best" / "config.json"
    config, evaluation = json.loads(path.read_text()), json.loads((run / "evaluation.json").read_text())
    by_step = [f"{100 * one:.1f}" for one in evaluation["accuracy_by_step"]]
    assert f"Accuracy after each refinement step, from 0: {' → '.join(by_step)}." in card(run)
    last = len(by_step) - 1
    (path.parent / "checksums.json").unlink()  # the config is changed by hand
    path.write_text(json.dumps(config | {"step_weights": [0.0, 0.3] + [0.0] * (last - 3) + [0.7]}))
    read = f"{by_step[2]} after 2, {by_step[last]} after {last}"
    assert f"Accuracy after the steps that have learned to be read: {read}." in card(run)


def test_whether_tokens_halt_and_did_when_it_was_measured_is_said(run):
    store(run / "checkpoints" / "best", {"halt": {"criterion": "context", "min_steps": 2}})
    text = card(run)
    assert "| tokens halt | by context, after 2 steps |" in text
    assert "When this was measured no token halted" in text
    evaluation = json.loads((run / "evaluation.json").read_text())
    halt = {"criterion": "change", "threshold": 0.1, "min_steps": 2}
    (run / "evaluation.json").write_text(json.dumps(evaluation | {"halt": halt}))
    text = card(run)
    assert "Tokens halted by change, 0.1, after 2 steps at the earliest." in text
    assert "When this was measured" not in text


def test_where_steps_begin_is_said_of_a_model_that_recalls(run, checkpoints):
    assert "| every step begins | between the state and the embeddings (halfway) |" in card(checkpoints["pnn_recall"])
    assert "| every step begins | between the state and the embeddings (learned) |" in card(checkpoints["pnn_learned_recall"])
    assert "every step begins" not in card(run)


def test_when_masked_tokens_read_their_guess_is_said(run, checkpoints):
    assert "| masked tokens read their guess | after steps 1, 2 |" in card(checkpoints["pnn_guess"])
    assert "read their guess" not in card(run)


def test_numbers_are_those_of_the_exported_weights(run):
    """A run's evaluation is of one checkpoint; others have an accuracy of their own."""
    evaluation = json.loads((run / "evaluation.json").read_text())
    shutil.copytree(run / "checkpoints" / "best", run / "checkpoints" / "average")
    assert "Not measured by this run." in card(run / "checkpoints" / "average")
    averaged = evaluation | {"checkpoint": "average", "accuracy": 0.98765}
    (run / "evaluation.json").write_text(json.dumps(evaluation | {"average": averaged}))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["training"]["average_decay"] = 0.999
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = card(run / "checkpoints" / "average")
    assert "| validation | 98.8 % |" in text
    assert "a running average (decay 0.999)" in text
    for same in (run, run / "checkpoints" / "best"):
        assert f"| validation | {100 * evaluation['accuracy']:.1f} % |" in card(same)


def test_what_is_not_known_is_not_said(run, checkpoints, trained_run):
    text = card(checkpoints["ddl"])
    assert "license" not in head(text)
    for unknown in (
        "Not known: this checkpoint came without",
        "## Training\n\nNot known.",
        "Not measured",
        "does not say under",
    ):
        assert unknown in text
    assert "seed" not in text
    evaluation = json.loads((run / "evaluation.json").read_text())
    (run / "evaluation.json").unlink()
    text = card(run)
    assert "Not measured by this run." in text
    assert "How well it does is not known." in text
    # paths of somebody's machine are nobody's business
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["train"] = "/home/somebody/secret/text.txt"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "evaluation.json").write_text(json.dumps(evaluation | {"source": "/home/somebody/secret/text.txt"}))
    assert "Trained on `text.txt`" in card(run)
    assert "somebody" not in card(run)
    assert str(trained_run.parent) not in card(run)


def test_the_code_is_named_also_without_git(run):
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(environment | {"git": None}))
    assert f"digest `{environment['source_sha256'][:12]}`" in card(run)


def test_weights_without_their_run_keep_what_their_card_says(checkpoints, tmp_path):
    folder = tmp_path / "shared"
    shutil.copytree(checkpoints["pnn"], folder)
    assert "Not known" in card(folder)
    told = "## Data\n\nOld letters, see [the page](../../page.md).\n\n## Use\n\nLoad it.\n\n## Licence\n\nTheirs.\n"
    (folder / "README.md").write_text(f"---\nlanguage: en\nlicense: cc0-1.0\nlibrary_name: none\n---\n\n# Letters\n\n{told}")
    text = card(folder)
    assert "## Data\n\nOld letters, see the page.\n\n## Training\n\nNot known" in text
    assert "## Licence\n\nTheirs." in text
    assert "Load it." not in text
    assert {"language": "en", "license": "cc0-1.0", "library_name": "transformers"}.items() <= head(text).items()
    assert "Theirs." not in card(folder, licence="mit")
    assert head(card(folder, licence="mit"))["license"] == "mit"
    (folder / "README.md").write_text("---\nlicense: [\n---\n# broken")
    assert "Not known" in card(folder)


def test_how_to_load_it_follows_from_the_export(checkpoints):
    assert card(checkpoints["pnn"], remote_code=True).count("trust_remote_code=True)") == 2  # the model and its tokenizer
    plain = card(checkpoints["pnn"])
    assert "import pnn" in plain
    assert "trust_remote_code" not in plain
    assert "with 7 refinement steps" in card(checkpoints["pnn"], onnx_steps=7)
    assert "AutoModelForMultipleChoice.from_pretrained" in card(checkpoints["bert_choice"])


def test_a_fine_tuned_models_card(checkpoints, tmp_path):
    """From a result that the fine-tuning's own tests make for real; here with numbers chosen to be told apart."""
    run = tmp_path / "run" / "cola"
    shutil.copytree(checkpoints["pnn_classifier"], run / "checkpoints" / "best")
    result = {
        "task": "cola",
        "benchmark": "GLUE",
        "score": 0.21,
        "score_is": "dev matthews",
        "score_interval": [0.15, 0.27],
        "score_std": 0.013,
        "score_by_step": [0.0, 0.1, 0.21],
        "metrics": {"matthews": 0.21},
        "baselines": {"majority": {"matthews": 0.0, "score": 0.0}, "bag_of_words": {"matthews": 0.16, "score": 0.16}},
        "learning_rate": 3e-5,
        "learning_rates_tried": [{}, {}],
        "seeds": [{}, {}, {}],
        "checkpoint": {"seed": 2, "epoch": 1},
        "settings": {"epochs": 3, "batch_size": 32, "max_length": 40},
        "data": {
            "source": "local files",
            "examples": {"train": 8551, "dev": 1043},
            "truncated": {"train": 3, "dev": 1},
            "unknown_tokens": 0.031,
        },
    }
    (run / "result.json").write_text(json.dumps(result))
    (run / "finetune.json").write_text(json.dumps({"model": "small"}))
    text = card(run)
    assert text.split("---\n")[2].strip().startswith("# small-cola")
    for known in (
        "Fine-tuned on cola (GLUE)",
        "| matthews | 21.0 % | 0.0 % | 16.0 % |",
        "95 % interval over dev examples 15.0–27.0",
        "standard deviation between seeds 1.3 points",
        "8,551 train, 1,043 dev",
        "4 texts were longer than 40",
        "learning rate of 3e-05 (chosen on dev among 2)",
        "seed 2, epoch 1",
        "Read after each refinement step, of which the last alone was trained, from 0: 0.0 → 10.0 → 21.0",
        "3.1 % of the training set's tokens",
        "It is not shown to be better than the baseline bag of words (16.0 %)",
    ):
        assert known in text, known
    assert "baseline majority" not in text  # that it does beat


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_steps": 3}, "one gated refiner is applied to every token's state again and again, 3 times."),
        ({"num_steps": 1}, "one gated refiner is applied to every token's state once."),
        ({"schedule": [0, 1]}, "2 gated refiners are applied to every token's state, one after the other."),
        ({"schedule": [0, 1, 0, 1]}, "2 gated refiners are applied to every token's state, 4 steps in all."),
        ({"schedule": [0, 1], "shared_attention": True}, "2 gated refiners that share one attention are applied"),
        ({"num_steps": 3, "gate": "none"}, "one refiner is applied to every token's state again and again, 3 times. What a"),
        ({"num_steps": 3, "update": "delta"}, "one refiner is applied to every token's state again and again, 3 times. A step"),
    ],
)
def test_what_a_pnn_does_follows_from_its_config(changes, says):
    assert ENTRIES["pnn"].sentence(PNNConfig(**changes)).startswith(f"A Plastic Neural Network: {says}")


def test_a_pruned_and_grown_models_card_says_what_was_done(pnn_command, checkpoints, tmp_path):
    pruned, grown = tmp_path / "pruned", tmp_path / "grown"
    steps = (
        ("prune", checkpoints["bert"], "--ratio", "0.5", "--by", "contribution", "--data", "synthetic", "--output", pruned),
        ("grow", pruned, "--ratio", "0.3", "--by", "balanced", "--output", grown),
    )
    for step in steps:
        code, _, err = pnn_command("plasticity", *step)
        assert code == 0, err
    code, _, err = pnn_command("export", grown, "--output", tmp_path / "exported")
    assert code == 0, err
    text = (tmp_path / "exported" / "README.md").read_text()
    name = checkpoints["bert"].name
    assert f"Made from `{name}`: 2 of 4 attention heads pruned, chosen by contribution on `synthetic`; then 1 " in text
    assert f"On what `{name}` was trained, this checkpoint does not say." in text
    assert "was not measured" in text
    (grown / "plasticity.json").write_text('{"source": "x"}')
    (grown / "checksums.json").unlink()
    code, _, err = pnn_command("export", grown, "--output", tmp_path / "again")
    assert (code, (tmp_path / "again").exists()) == (2, False)
    assert "does not say what was done to the model" in err
