"""One room for loading: the same sentence in every command for a folder that is damaged or holds something else."""

import io
import json
import re
import resource
import shutil
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import pnn
from pnn.data.tokenizers import load_tokenizer, of_synthetic_language
from pnn.errors import UserError
from pnn.export.loading import open_for_export
from pnn.models.loading import (
    check_num_steps,
    load_any,
    load_as_named,
    load_decoder,
    load_model,
    load_run,
    load_with_new_head,
    read_config,
)

SHAPE = {"vocab_size": 100, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.manual_seed(0)
    config = pnn.PNNConfig(**SHAPE, intermediate_size=16)
    decoder = pnn.DDLConfig(**SHAPE, num_hidden_layers=1)
    models = {
        "pnn": pnn.PNNForMaskedLM(config),
        "classifier": pnn.PNNForSequenceClassification(config),
        "encoder": pnn.PNNModel(config),
        "ddl": pnn.DDLForCausalLM(decoder),
        "bert": hf.BertForMaskedLM(hf.BertConfig(**SHAPE, intermediate_size=16, num_hidden_layers=1)),
        "pruned": pnn.plasticity.prune(pnn.DDLForCausalLM(decoder), [(0, 0)]),
    }
    root = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.save_pretrained(root / name)
        of_synthetic_language(32).save_pretrained(root / name)
    return root


# Everything that reads a checkpoint folder
WAYS = [
    load_model,
    load_as_named,
    load_any,
    load_run,
    pnn.plasticity.load,
    lambda folder: open_for_export(str(folder)),
    lambda folder: load_with_new_head(folder, read_config(folder), hf.AutoModelForSequenceClassification, seed=0),
]


@pytest.mark.parametrize("load", WAYS)
def test_damaged_folders(folders, tmp_path, load):
    def broken(name: str):
        return shutil.copytree(folders / "pnn", tmp_path / name)

    def says(folder, pattern: str) -> None:
        with pytest.raises(UserError, match=f"^{re.escape(str(folder))}: {pattern}"):
            load(folder)

    (broken("config") / "config.json").write_text("{")
    says(tmp_path / "config", "cannot load a model ")
    (broken("weights") / "model.safetensors").write_bytes(b"no weights")
    says(tmp_path / "weights", r"cannot load a (masked language model|sequence classifier) \(")
    config = broken("another") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"schedule": [0, 1, 0, 1]}))
    says(tmp_path / "another", r"the weights are not those of the architecture in config.json \(\d+ missing keys, first enc")
    (broken("code") / "model.safetensors").rename(tmp_path / "code" / "pytorch_model.bin")  # a pickle is not read
    says(tmp_path / "code", r"cannot load a (masked language model|sequence classifier) \(")


def test_a_changed_file_is_noticed_by_all(folders, tmp_path):
    folder = shutil.copytree(folders / "pnn", tmp_path / "model")
    (folder / "checksums.json").write_text(json.dumps({"model.safetensors": "0" * 64}))
    for load in WAYS:
        with pytest.raises(UserError, match="does not match its checksum"):
            load(folder)


@pytest.mark.parametrize("load", WAYS)
def test_weights_in_several_files(folders, tmp_path, load):
    folder = tmp_path / "model"
    load_model(folders / "pnn").save_pretrained(folder, max_shard_size="4KB")
    of_synthetic_language(32).save_pretrained(folder)
    load(folder)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    one = sorted(good["weight_map"])[0]

    def says(weight_map, text: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(UserError, match=re.escape(text)):
            load(folder)

    for other in ("model-00001.bin", "../pnn/model.safetensors", 3):  # none is there: the name is enough
        says(good["weight_map"] | {one: other}, f"{index} names {other}: weights are read from safetensors files")
    for nothing in (None, ["a"]):
        says(nothing, f"{index} has no weight_map")
    missing = folder / good["weight_map"][one]
    missing.unlink()
    says(good["weight_map"], f"{missing} is missing: the checkpoint is not whole")


def test_code_beside_a_model_is_not_named_by_what_is_made_from_it(folders, tmp_path):
    folder = shutil.copytree(folders / "pnn", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "modeling_pnn.PNNConfig", "AutoModelForMaskedLM": "modeling_pnn.PNNForMaskedLM"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    for number, load in enumerate((WAYS[1], WAYS[-1])):
        load(folder).save_pretrained(tmp_path / str(number))
        assert "auto_map" not in (tmp_path / str(number) / "config.json").read_text()


TRAP = """
from pathlib import Path
Path({sprung!r}).touch()
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast
class Config(BertConfig):
    model_type = "theirs"
class Model(BertForMaskedLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("answer", ["y\n", ""])
@pytest.mark.parametrize("model_type", ["pnn", "theirs"])
@pytest.mark.parametrize("load", WAYS)
def test_code_beside_a_model_is_never_run(folders, tmp_path, monkeypatch, load, model_type, answer):
    """Not for a config, a model or a tokenizer, and nobody is asked whether it may: standard input may be a text."""
    folder, sprung = shutil.copytree(folders / "pnn", tmp_path / "model"), tmp_path / "sprung"
    (folder / "theirs.py").write_text(TRAP.format(sprung=str(sprung)))
    code = {"AutoConfig": "theirs.Config", "AutoModelForMaskedLM": "theirs.Model", "AutoModel": "theirs.Model"}
    _change(folder / "config.json", {"auto_map": code, "model_type": model_type})
    _change(
        folder / "tokenizer_config.json",
        {"auto_map": {"AutoTokenizer": [None, "theirs.Tokenizer"]}, "tokenizer_class": "Tokenizer"},
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    with suppress(UserError):
        load(folder)
    with suppress(UserError):
        load_tokenizer(str(folder), 64)
    assert not sprung.exists()
    assert sys.stdin.read() == answer  # and what stands there is left for whom it is meant


@pytest.mark.parametrize(
    ("listing", "says"),
    [
        ([], "is damaged"),
        (7, "is damaged"),
        ({"model.safetensors": 7}, "is damaged"),
        ({}, "does not list model.safetensors"),
        ({"config.json": "0" * 64}, "does not list model.safetensors"),
    ],
)
def test_checksums_that_check_nothing_are_not_trusted(folders, tmp_path, listing, says):
    folder = shutil.copytree(folders / "pnn", tmp_path / "model")
    (folder / "checksums.json").write_text(json.dumps(listing))
    with pytest.raises(UserError, match=f"^{re.escape(str(folder))}/checksums.json {says}"):
        load_model(folder)


@pytest.mark.parametrize(
    "more",
    [
        {"attn_implementation": "flash_attention_3"},
        {"attn_implementation": "no_such_attention"},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    ],
)
@pytest.mark.parametrize("name", ["pnn", "bert"])
def test_what_a_config_asks_for_and_is_not_installed_is_told(folders, tmp_path, name, more):
    folder = shutil.copytree(folders / name, tmp_path / "model")
    _change(folder / "config.json", more)
    with pytest.raises(UserError, match=f"^{re.escape(str(folder))}: cannot load a masked language model "):
        load_model(folder)


@pytest.mark.parametrize("wanted", ["kernels-community/flash-attn", {"": "someone/their-code"}])
def test_attention_from_the_hub_is_code_of_others(folders, tmp_path, wanted):
    folder = shutil.copytree(folders / "bert", tmp_path / "model")
    _change(folder / "config.json", {"attn_implementation": wanted})
    with pytest.raises(UserError, match="asks for code of others"):
        load_model(folder)


@pytest.mark.parametrize("load", WAYS)
def test_an_index_that_names_a_pickle_is_refused_by_name(folders, tmp_path, load):
    folder = shutil.copytree(folders / "pnn", tmp_path / "model")
    weights = dict.fromkeys(load_file(folder / "model.safetensors"), "model.bin")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "model.bin")
    for name, config in (("model", {}), ("other", {"transformers_weights": "other.safetensors.index.json"})):
        (folder / f"{name}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        _change(folder / "config.json", config)
        with pytest.raises(UserError, match=rf"{name}.safetensors.index.json names model.bin: weights are read"):
            load(folder)
        (folder / f"{name}.safetensors.index.json").unlink()


@pytest.mark.parametrize("load", WAYS)
def test_weights_that_are_not_numbers_are_told(folders, tmp_path, load):
    folder = shutil.copytree(folders / "pnn", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["encoder.embeddings.token.weight"][3, 1] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"encoder.embeddings.token.weight holds values that are not finite"):
        load(folder)


@pytest.mark.parametrize("load", WAYS)
@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("pnn", {"num_steps": 10**9, "schedule": None}, "num_steps is 1,000,000,000, but at most 10,000 are allowed"),
        ("pnn", {"num_labels": 10**9}, "num_labels is 1,000,000,000"),
        ("pnn", {"vocab_size": 10**12}, r"needs at least \d+,000.0 GB"),
        ("pnn", {"intermediate_size": 10**12}, r"needs at least \d+,000.0 GB"),
        ("pnn", {"vocab_size": 10**18}, r"out of memory|overflow"),
        ("ddl", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000"),
        ("pruned", {"original": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1,000,000,000"),
    ],
)
def test_sizes_that_no_machine_has_take_no_memory(folders, tmp_path, load, name, values, says):
    folder = shutil.copytree(folders / name, tmp_path / "model")
    _change(folder / "config.json", values)
    with less_memory(), pytest.raises(UserError, match=f"^{re.escape(str(folder))}: .*({says})"):
        load(folder)


@contextmanager
def less_memory():
    """So that a test that fails does not take all of the machine's."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _change(file: Path, values: dict) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_language_model_is_asked_for_and_another_is_named(folders):
    for name, made in {"classifier": pnn.PNNForSequenceClassification, "encoder": pnn.PNNModel}.items():
        with pytest.raises(UserError, match=rf"cannot load a language model .its config.json names a {made.__name__}"):
            load_any(folders / name)
        assert type(load_as_named(folders / name)) is made


def test_each_kind_has_its_loader(folders):
    assert type(load_run(folders / "pnn").model) is pnn.PNNForMaskedLM
    for name in ("ddl", "pruned"):
        assert isinstance(load_decoder(folders / name).model, pnn.DDLForCausalLM)
        with pytest.raises(UserError, match="is not one of our masked models: it has no refinement steps to read"):
            load_run(folders / name)
    for name in ("pnn", "bert"):
        with pytest.raises(UserError, match="fills in masks, it does not continue a text"):
            load_decoder(folders / name)
    with pytest.raises(UserError, match="a BertForMaskedLM is not one of our masked models"):
        load_run(folders / "bert", of_decoders="never said of an encoder")


def test_a_class_that_no_auto_class_knows_is_read_as_a_language_model(folders, tmp_path):
    folder = shutil.copytree(folders / "ddl", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MyOwnDecoder"]}))
    assert type(load_model(folder)) is type(load_as_named(folder)) is pnn.DDLForCausalLM


def test_weights_in_bf16_are_computed_with_in_fp32_on_a_cpu(folders, tmp_path):
    half = tmp_path / "half"
    load_model(folders / "pnn").bfloat16().save_pretrained(half)
    of_synthetic_language(32).save_pretrained(half)
    loaded = load_any(half, device="cpu")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_steps_that_were_not_trained_to_be_read_are_told(tmp_path, capsys):
    shape = {**SHAPE, "intermediate_size": 16, "schedule": [0, 1, 0, 1], "step_weights": [0.0, 0.3, 0.0, 0.7]}
    pnn.PNNForMaskedLM(pnn.PNNConfig(**shape)).save_pretrained(tmp_path)
    of_synthetic_language(32).save_pretrained(tmp_path)
    load_run(tmp_path, num_steps=2, device="cpu")
    assert "note" not in capsys.readouterr().err
    load_run(tmp_path, num_steps=3, device="cpu")
    assert "trained to be read after steps 2, 4" in capsys.readouterr().err


def test_layers_that_were_not_trained_to_be_read_are_told(folders, capsys):
    bert = pnn.BertBaselineForMaskedLM(pnn.BertBaselineConfig(**SHAPE, intermediate_size=16, num_hidden_layers=2))
    for steps in (None, 2):
        check_num_steps(bert, steps)
    assert not capsys.readouterr().err
    check_num_steps(bert, 1)
    assert "trained to be read after all its 2 layers" in capsys.readouterr().err
    with pytest.raises(UserError, match="--num-steps -1: this model takes 0 to 10,000"):
        check_num_steps(load_model(folders / "pnn"), -1)
