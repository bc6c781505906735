"""Decoders through the same loop: they learn, resume to the bit, evaluate with their protocol stated, and continue texts."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from pnn.cli.train import next_command
from pnn.config import RunConfig, from_dict, load_config, validate
from pnn.data.shards import prepare
from pnn.data.tokenizers import trained_on
from pnn.errors import UserError
from pnn.evaluation.causal import evaluate_causal
from pnn.evaluation.generate import continue_texts
from pnn.models.loading import load_decoder
from pnn.results import Measured
from pnn.training.loop import Stopped, Trainer
from pnn.training.run import train_run
from pnn.training.updates import Plan

DECODER = {
    "model": {"type": "ddl", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "data": {"train": "synthetic", "synthetic_paragraphs": 600, "validation_sequences": 20, "max_length": 32, "filter": "none"},
    "training": {
        "max_steps": 48,
        "batch_size": 4,
        "effective_batch_size": 8,
        "learning_rate": 5.0e-3,
        "warmup_steps": 4,
        "log_every": 1,
        "evaluate_every": 12,
        "save_every": 6,
        "tensorboard": False,
    },
}


def config_of(prepared_folder, **training) -> RunConfig:
    raw = json.loads(json.dumps(DECODER))
    raw["data"]["prepared"] = str(prepared_folder)
    raw["training"] |= training
    return validate(from_dict(RunConfig, raw))


@pytest.fixture(scope="module")
def run(tmp_path_factory, prepared_folder) -> Path:
    folder = tmp_path_factory.mktemp("decoder") / "run"
    train_run(config_of(prepared_folder), folder, quiet=True)
    return folder


def test_a_decoder_learns_and_says_what_it_measured(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[0] == pytest.approx(math.log(82), abs=0.3)
    assert losses[-1] < losses[0] - 0.8
    assert {"validation_loss", "validation_perplexity"} <= rows[-1].keys()
    result = json.loads((run / "evaluation.json").read_text())
    assert (result["model_type"], result["context"], result["stride"], result["targets"]) == ("ddl", 32, 32, 20 * 31)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["loss_interval"][0] < result["loss"] < result["loss_interval"][1]


def test_an_update_is_whole_rows(prepared_folder, tmp_path):
    trainer = Trainer(config_of(prepared_folder), tmp_path / "run", quiet=True)
    assert trainer.plan == Plan(batch_tokens=4 * 32, accumulation=2, updates=48)
    batch = next(trainer.stream)
    assert batch.cu_seqlens.tolist() == [0, 32, 64, 96, 128]
    inputs = trainer.objective.inputs(batch, torch.device("cpu"))
    assert inputs["input_ids"].shape == (4, 32)
    assert trainer.objective.targets(inputs).item() == 4 * 31


def test_rows_of_any_length_stay_whole(prepared_folder):
    class Fake:
        class train:  # noqa: N801
            lengths = np.full(50, 30)

        train_sequences = np.arange(50)

    plan = Plan.of(config_of(prepared_folder, batch_size=3, effective_batch_size=6), Fake, processes=1)
    assert plan.batch_tokens == 3 * 30  # 88 would be a multiple of 8


def test_accumulated_gradients_are_those_of_the_whole_update(prepared_folder, tmp_path):
    norms = []
    for size in (2, 8):
        trainer = Trainer(config_of(prepared_folder, batch_size=size), tmp_path / str(size), quiet=True)
        from pnn.training.updates import updates_ahead

        update = next(iter(updates_ahead(trainer.stream, trainer.plan, 0, 1, 1)))
        loss, _, norm = trainer.apply(update, 1e-3)
        norms.append((loss.item(), norm.item()))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_stopped_run_resumes_to_the_same_bits(run, prepared_folder, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    trainer = Trainer(config_of(prepared_folder), folder, quiet=True)
    apply = trainer.apply

    def interrupted(update, rate):
        if trainer.step == 9:
            trainer.signal = 15
        return apply(update, rate)

    monkeypatch.setattr(trainer, "apply", interrupted)
    with pytest.raises(Stopped):
        trainer.train()
    train_run(config_of(prepared_folder), folder, resume=True, quiet=True)
    ours, theirs = (load_file(one / "checkpoints" / "last" / "model.safetensors") for one in (folder, run))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


# Evaluation -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(run, prepared_folder):
    return load_decoder(run), prepare(config_of(prepared_folder).data, lambda items, _: items)


def by_hand(model, stream, context, stride):
    """Nats of every scored token, one window and one token at a time."""
    nats = {}
    last = len(stream) - context
    for start in range(0, len(stream), context) if stride is None else [*range(0, last, stride), last]:
        window = stream[start : start + context]
        losses = F.cross_entropy(model(window[None]).logits[0, :-1], window[1:], reduction="none")
        for place, loss in enumerate(losses.tolist(), 1):
            nats.setdefault(start + place, loss)  # a token counts in the first window that reaches it
    return nats


@pytest.mark.parametrize("stride", [None, 8, 5, 31])
@torch.no_grad()
def test_every_token_is_scored_once_in_its_window(loaded, stride):
    (run, prepared) = loaded
    model, rows = run.model.eval(), prepared.validation_sequences[:4]
    found = evaluate_causal(model, prepared.validation, rows, stride=stride, batch_tokens=70)
    stream = torch.from_numpy(prepared.validation.take(rows))
    nats = by_hand(model, stream, 32, stride)
    assert found["targets"] == len(nats) == (4 * 31 if stride is None else 127)  # of 128: all but what begins a window
    assert found["loss"] == pytest.approx(np.mean(list(nats.values())), abs=1e-5)
    text = prepared.tokenizer.decode(stream, skip_special_tokens=True)
    assert (found["words"], found["bytes"], found["tokens"]) == (len(text.split()), len(text.encode()), 128)
    assert found["word_perplexity"] == pytest.approx(math.exp(found["loss"] * 128 / found["words"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * 128 / found["bytes"] / math.log(2))


@pytest.mark.parametrize("stride", [0, 32, 100])
def test_a_stride_that_makes_no_windows_is_a_clear_error(loaded, stride):
    run, prepared = loaded
    with pytest.raises(UserError, match=r"evaluation.stride: \d+, but it must be at least 1 and below the context of 32"):
        evaluate_causal(run.model, prepared.validation, prepared.validation_sequences, stride=stride)


# Commands -------------------------------------------------------------------------------------------------------------


def test_evaluate_prints_perplexity_and_keeps_the_tasks(run, pnn_command):
    held = run / "evaluation.json"
    before = json.loads(held.read_text())
    measured = {key: before[key] for key in Measured.__annotations__}
    held.write_text(json.dumps(before | {"tasks": {**measured, "shots": {}}}))
    code, out, _ = pnn_command("evaluate", run)
    assert code == 0
    assert "perplexity" in out
    assert "windows of 32 tokens" in out
    assert json.loads(held.read_text())["tasks"]["checkpoint"] == before["checkpoint"]
    code, _, err = pnn_command("evaluate", run, "--num-steps", "2")
    assert code == 2
    assert "has no refinement steps" in err


def test_another_stride_is_kept_under_a_name_of_its_own(run, pnn_command):
    own = {name: (run / name).read_text() for name in ("evaluation.json", "evaluation_by_sequence.json")}
    code, out, err = pnn_command("evaluate", run, "--stride", "8")
    assert code == 0
    assert "8 scored" in out
    assert "evaluation_stride_8.json" in err
    kept = json.loads((run / "evaluation_stride_8.json").read_text())
    assert kept["stride"] == 8
    assert f"{kept['loss']:.4f}" in out
    assert own == {name: (run / name).read_text() for name in own}
    code, _, err = pnn_command("evaluate", run, "--stride", "0")
    assert code == 2
    assert "--stride 0: expected at least 1 token" in err


def test_a_bare_checkpoint_reads_text_as_decoders_are_trained(run, pnn_command, tmp_path):
    """Short lines too, which the filter of masked models drops."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(["the fox", "it has old boots ."] * 40))
    sizes = []
    for folder in (run, (run / "checkpoints" / "last").resolve()):
        code, out, _ = pnn_command("evaluate", folder, "--data", path, "--json")
        assert code == 0
        sizes.append(json.loads(out)["sets"][str(path)]["tokens"])
    assert sizes[0] == sizes[1] > 200


def test_generate_continues_texts_the_same_way_every_time(run, pnn_command):
    code, _, err = pnn_command("generate", run, "it has", "\udcff")
    assert (code, "prompt 2 is not valid UTF-8" in err) == (2, True)
    arguments = ("generate", run, "the fox of", "it has", "--max-new-tokens", "6", "--json")
    code, out, _ = pnn_command(*arguments)
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["the fox of", "it has"]
    assert all(len(row["continuation"].split()) <= 6 for row in rows)
    assert all(row["continuation"].startswith(" ") for row in rows)  # the prompt's last word stays a word
    after_a_space = json.loads(pnn_command("generate", run, "it has ", "--temperature", 0, "--max-new-tokens", 3)[1])
    assert not after_a_space["continuation"].startswith(" ")
    assert pnn_command(*arguments)[1] == out
    alone = json.loads(pnn_command("generate", run, "it has", "--max-new-tokens", "6", "--temperature", "0")[1])
    together = pnn_command("generate", run, "the fox of", "it has", "--max-new-tokens", "6", "--temperature", "0")[1]
    assert json.loads(together.splitlines()[1]) == alone  # padding on the left changes nothing


def test_generate_says_which_words_it_does_not_know(run, pnn_command):
    code, out, err = pnn_command("generate", run, "The", "the fox of", "The Zebra of", "--max-new-tokens", "3")
    assert code == 0
    assert [json.loads(line).get("unknown") for line in out.splitlines()] == [1, None, 2]
    assert "note: prompt 1: 1 word of it is not in the model's vocabulary: it read [UNK] there" in err
    assert "note: prompt 3: 2 words of it are not in the model's vocabulary" in err
    assert err.count("note:") == 2
    assert "note: 1 word of it" in pnn_command("generate", run, "The", "--max-new-tokens", "3")[2]
    assert "note:" not in pnn_command("generate", run, "the fox", "--max-new-tokens", "3")[2]


def test_the_prompt_that_training_suggests_is_known(run, prepared_folder, pnn_command):
    command = next_command(config_of(prepared_folder), run)
    pnn, generate, folder, prompt = shlex.split(command)
    assert (pnn, generate, folder) == ("pnn", "generate", str(run))
    assert len(prompt.split()) == 4
    code, _, err = pnn_command(generate, folder, prompt, "--max-new-tokens", "3")
    assert (code, "note:" in err) == (0, False), err


def test_prompts_of_a_batch_do_not_see_each_others_padding(run):
    loaded, prompts = load_decoder(run), ["it has", "the fox of avon wore amber hats . it", "the"]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.model.parameters():  # what is learnt hardly looks back: a random model does
            parameter.normal_(std=0.5)

    def continued(*prompts, at_once=16):
        made = continue_texts(loaded, [*prompts], temperature=0, max_new_tokens=8, batch_size=at_once)
        return [row["continuation"] for row in made]

    alone = [text for prompt in prompts for text in continued(prompt)]
    assert continued(*prompts) == continued(*prompts, at_once=2) == alone
    # by transformers' own loop, which a generation_config that says more asks for
    loaded.model.generation_config.repetition_penalty = 1.0 + 1e-9
    asked = Mock(wraps=loaded.model.generate)
    loaded.model.generate = asked
    assert continued(*prompts) == alone
    assert asked.call_count == 1


def test_one_text_waits_for_the_device_only_now_and_then(run, monkeypatch):
    loaded = load_decoder(run)
    monkeypatch.setattr(type(loaded.model), "generate", Mock(side_effect=AssertionError("it asks at every token")))
    (row,) = continue_texts(loaded, ["the fox of"], temperature=0, max_new_tokens=8)
    assert row["continuation"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt 1 is empty"),
        (["the fox", " ".join(["the"] * 33), "--max-new-tokens", "5"], "prompt 2 has 33 tokens, but the model takes 32"),
        (["the fox", "--max-new-tokens", "31"], "prompt 1 has 2 tokens and leaves room for 30"),
        (["the fox", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["the fox", "--temperature", "-1"], "--temperature -1.0"),
        (["the fox", "--top-k", "0"], "--top-k 0"),
    ],
)
def test_prompts_that_cannot_be_continued_are_clear_errors(run, pnn_command, arguments, message):
    code, out, err = pnn_command("generate", run, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_masked_models_and_decoders_are_not_mistaken_for_each_other(run, trained_run, pnn_command):
    for command, folder, message in (
        (("generate", trained_run, "the fox"), trained_run, "fills in masks, it does not continue a text"),
        (("fill", run, "the [MASK]"), run, "is not one of our masked models"),
        (("analyze", "convergence", run), run, "is not one of our masked models"),
        (("analyze", "rewrites", trained_run), trained_run, "fills in masks, it does not continue a text"),
        (("compare", run, trained_run), run, f"{run} predicts next tokens and {trained_run} masked ones"),
    ):
        code, _, err = pnn_command(*command)
        assert code == 2, folder
        assert message in err


def worse_copy(run, target, noise):
    """A run folder like another, its embeddings shaken."""
    shutil.copytree(run, target, symlinks=True)
    best = (target / "checkpoints" / "best").resolve()
    weights = load_file(best / "model.safetensors")
    shaken = torch.randn(weights["model.embeddings.weight"].shape, generator=torch.Generator().manual_seed(0))
    weights["model.embeddings.weight"] += noise * shaken
    save_file(weights, best / "model.safetensors", metadata={"format": "pt"})
    (best / "checksums.json").unlink()
    return target


def test_decoders_are_compared_by_their_loss(run, pnn_command, tmp_path):
    worse, same = worse_copy(run, tmp_path / "worse", 0.3), worse_copy(run, tmp_path / "same", 0.0)
    code, out, err = pnn_command("compare", run, worse, same, "--output", tmp_path / "compared.json")
    assert code == 0, err
    result = json.loads((tmp_path / "compared.json").read_text())
    kept = json.loads((run / "evaluation.json").read_text())
    for key in ("loss", "perplexity", "bits_per_byte", "accuracy", "targets"):
        assert result["runs"][0][key] == pytest.approx(kept[key], rel=1e-5)
    assert (result["stride"], result["max_length"]) == (kept["stride"], kept["context"])
    assert "mask_seed" not in result
    apart, equal = result["against_first"]["rows"]
    assert apart["loss"]["difference"] == pytest.approx(result["runs"][1]["loss"] - result["runs"][0]["loss"])
    assert 0 < apart["loss"]["interval"][0] < apart["loss"]["difference"] < apart["loss"]["interval"][1]
    assert result["against_first"]["hold"] == 1
    assert f"worse is {apart['loss']['difference']:.4f} nats per token above {run.name}" in out
    assert equal["sentence"] == f"same has the same loss as {run.name} in every row: equal"
    assert f"{kept['perplexity']:.2f}" in out
    code, out, err = pnn_command("compare", run, worse, "--sequences", "5", "--json")
    assert code == 0, err
    assert json.loads(out)["sequences"] == 5


def test_decoders_that_cannot_be_compared(run, pnn_command, tmp_path):
    for name in ("one", "two"):
        shutil.copytree((run / "checkpoints" / "best").resolve(), tmp_path / name)
    code, _, err = pnn_command("compare", tmp_path / "one", tmp_path / "two")
    assert code == 2
    assert "say what to compare on with --data" in err
    trained_on(["the red fox sat on the mat"] * 20, 40, 32).save_pretrained(tmp_path / "two")
    (tmp_path / "two" / "checksums.json").unlink()
    code, _, err = pnn_command("compare", run, tmp_path / "two")
    assert code == 2
    assert "have different tokenizers, so their losses per token do not compare" in err


@pytest.mark.slow
def test_rewrites_are_analysed_from_the_command_line(run, pnn_command, tmp_path):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    code, out, _ = pnn_command("analyze", "rewrites", tmp_path / "run", "--sequences", "8")
    assert code == 0
    assert "gates_differ_between_tokens" in out
    assert json.loads((tmp_path / "run" / "analysis" / "rewrites.json").read_text())["sequences"] == 8
    assert (tmp_path / "run" / "figures" / "rewrites.png").exists()


def test_wrong_settings_are_clear_errors(tmp_path, pnn_command):
    for setting, message in (
        ("model.value_channels=0", "value_channels=0, but at least one is needed"),
        ("model.hidden_size=0", "model.hidden_size: must be above zero, got 0"),
        ("model.residual=rewrite", "residual='rewrite' is none of"),
        ("model.compressor_kernel_size=65", "compressor_kernel_size=65 is longer than the context"),
    ):
        code, _, err = pnn_command("train", "ddl_tiny", "--output", tmp_path / "run", "--set", setting)
        assert code == 2
        assert message in err
        assert not (tmp_path / "run").exists()


def test_the_shipped_tiny_decoder_is_what_its_file_says():
    config = load_config("ddl_tiny")
    assert (config.data.train, config.data.layout, config.data.max_length) == ("synthetic", "rows", 64)


@pytest.mark.parametrize("name", ["ddl_tiny", "gpt2_tiny"])
def test_a_shipped_decoder_takes_the_vocabulary_of_another_text(name, pnn_command, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"the fox number {i} of house {i * i} has old boots" for i in range(400)))
    text = [f"data.train={tmp_path / 'text.txt'}", f"data.prepared={tmp_path}", "data.vocab_size=200"]
    settings = [word for one in (*text, "data.validation_sequences=9") for word in ("--set", one)]
    run = ("--max-steps", 1, "--output", tmp_path / "run", *settings)
    code, _, err = pnn_command("train", name, *run)
    assert code == 0, err
    assert "note: model.vocab_size is 128, but the text's vocabulary has 200 entries: the model takes them all" in err
    config = load_decoder(tmp_path / "run").model.config
    assert (config.vocab_size, load_config(str(tmp_path / "run" / "config.yaml")).model["vocab_size"]) == (200, 128)
    assert pnn_command("train", name, *run, "--resume")[0] == 0
    tokenizer = tmp_path / "run" / "checkpoints" / "last"
    code, _, err = pnn_command("train", name, *run, "--output", tmp_path / "other", "--set", f"data.tokenizer={tokenizer}")
    assert code == 2  # a vocabulary that the config names
    assert err.strip().endswith("model.vocab_size: 128, but the tokenizer has 200 entries: --set model.vocab_size=200")
