"""Configs: every shipped one loads, and every mistake is an error that names the key."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import yaml

from pnn import config as config_module
from pnn.config import (
    CHOICES,
    POSITIVE,
    DataConfig,
    EvaluationConfig,
    RunConfig,
    TrainingConfig,
    from_dict,
    load_config,
    shipped_configs,
    validate,
    with_overrides,
)
from pnn.errors import UserError, did_you_mean
from pnn.models import BertBaselineConfig, DDLConfig, PNNCausalConfig, PNNConfig
from pnn.models.sections import model_config

NAMES = (
    "ablation_no_gate",
    "bert_baseline",
    "paper_reproduction",
    "pnn_wikitext103",
    "quickstart_bert",
    "quickstart_pnn",
    "quickstart_rewrite",
)


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def error_of(name, *overrides):
    with pytest.raises(UserError) as caught:
        load_config(name, list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Shipped configs ------------------------------------------------------------------------------------------------------


def test_the_published_rows_are_shipped():
    assert set(NAMES) <= set(shipped_configs())


@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_config_loads_and_its_model_section_builds(name):
    config = load_config(name)
    assert config.name == name
    built = model_config(config.model)
    ours = {"bert": BertBaselineConfig, "pnn": PNNConfig, "ddl": DDLConfig, "pnn_causal": PNNCausalConfig}
    kind = config.model["type"]
    assert isinstance(built, ours[kind]) if kind in ours else built.model_type == config.model["architecture"]
    for key, value in config.model.items():
        if key not in ("type", "architecture") and value is not None:
            said = getattr(built, key)
            assert (said[: len(value)] if key == "schedule" else said) == value  # a part of it may repeat
    assert shipped_configs()[name].read_text(encoding="utf-8").startswith("#")  # says what it is


@pytest.mark.parametrize("name", ["paper_reproduction", "bert_baseline", "ablation_no_gate", "pnn_wikitext103"])
def test_the_papers_rows_share_the_papers_recipe(name):
    config = load_config(name)
    assert (config.training.epochs, config.training.batch_size, config.training.effective_batch_size) == (15, 384, 1152)
    assert (config.training.learning_rate, config.training.min_learning_rate) == (3e-4, 1e-5)
    assert (config.training.warmup_steps, config.training.weight_decay, config.training.gradient_clip) == (500, 0.01, 1.0)
    assert (config.data.max_length, config.data.max_sequences, config.data.mask_probability) == (128, 1_000_000, 0.15)
    assert (config.data.filter, config.data.masking, config.data.tokenizer) == ("paper", "mask", "bert-base-uncased")


def test_the_published_code_has_its_own_config():
    model = load_config("paper_reproduction").model
    assert {k: model[k] for k in ("delta_norm", "gate_bias", "zero_init")} == {
        "delta_norm": True,
        "gate_bias": True,
        "zero_init": False,
    }
    assert load_config("ablation_no_gate").model["gate"] == "none"
    assert model_config(load_config("pnn_wikitext103").model).to_dict() == PNNConfig().to_dict()


def test_the_long_config_names_every_key_that_is_pnns_own():
    raw = yaml.safe_load(shipped_configs()["pnn_wikitext103"].read_text(encoding="utf-8"))
    own = set(inspect.get_annotations(PNNConfig)) - set(inspect.get_annotations(BertBaselineConfig))
    own -= {"trained_steps", "trained_halt", "mask_token_id"}  # written by `pnn calibrate`, and taken from the tokenizer
    assert {"num_steps", "schedule", "update", "gate", "zero_init"} <= own <= set(raw["model"])


@pytest.mark.parametrize("name", shipped_configs())
def test_a_config_survives_being_written_and_read(name, written):
    config = load_config(name)
    assert load_config(written(config.to_yaml())) == config
    assert from_dict(RunConfig, config.to_dict()) == config


# Values ---------------------------------------------------------------------------------------------------------------


def test_a_config_by_path_takes_its_name_from_the_file_and_defaults_from_the_code(written):
    config = load_config(written("model: {type: pnn}"))
    assert config == validate(RunConfig(name="mine"))
    assert config.training == TrainingConfig()
    assert load_config(written("name: other\ntraining: {seed: 3}")).training.seed == 3


@pytest.mark.parametrize("text", ["3e-4", "0.0003", "3.0e-4", "'3e-4'"])
def test_numbers_may_be_written_as_text(written, text):
    """YAML 1.1 reads 3e-4 as text."""
    assert load_config(written(f"training: {{learning_rate: {text}}}")).training.learning_rate == 3e-4


def test_whole_numbers_serve_as_numbers(written):
    value = load_config(written("training: {epochs: 3}")).training.epochs
    assert value == 3
    assert isinstance(value, float)


def test_null_means_none_where_it_is_allowed(written):
    config = load_config(written("training: {max_steps: null, compile: null}\ndata: {max_sequences: 5}"))
    assert (config.training.max_steps, config.training.compile, config.data.max_sequences) == (None, None, 5)


def test_further_evaluation_sets_are_sections_by_name(written):
    config = load_config(
        written("evaluation: {sets: {raw: {source: a.txt, undo_wikitext_marks: true}, other: {source: b.txt}}}")
    )
    assert config.evaluation.sets["raw"].undo_wikitext_marks is True
    assert config.evaluation.sets["other"].source == "b.txt"


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainig: {}", 'unknown key "trainig" (did you mean "training"?)'),
        ("training: {learning_rat: 1}", 'unknown key "training.learning_rat" (did you mean "learning_rate"?)'),
        ("data: {zzz: 1}", 'unknown key "data.zzz" (known: filter,'),
        ("evaluation: {sets: {a: {source: x, sorce: y}}}", 'unknown key "evaluation.sets.a.sorce" (did you mean "source"?)'),
        ("training: {seed: many}", "training.seed: expected a whole number, got 'many'"),
        ("training: {seed: 1.5}", "training.seed: expected a whole number, got 1.5"),
        ("training: {seed: true}", "training.seed: expected a whole number, got True"),
        ("training: {learning_rate: fast}", "training.learning_rate: expected a number, got 'fast'"),
        ("training: {learning_rate: true}", "training.learning_rate: expected a number, got True"),
        ("training: {learning_rate: [1]}", "training.learning_rate: expected a number, got [1]"),
        ("training: {tensorboard: 1}", "training.tensorboard: expected true or false, got 1"),
        ("training: {compile: 1}", "training.compile: expected true or false or null, got 1"),
        ("training: {max_steps: x}", "training.max_steps: expected a whole number or null, got 'x'"),
        ("training: {batch_size: null}", "training.batch_size: expected a whole number, got None"),
        ("data: {train: 5}", "data.train: expected text, got 5"),
        ("data: [1, 2]", "data: expected a section of keys, got [1, 2]"),
        ("data:", "data: expected a section of keys, got None"),
        ("model: pnn", "model: expected a section of keys, got 'pnn'"),
        ("evaluation: {sets: [a]}", "evaluation.sets: expected a section of keys, got ['a']"),
        ("evaluation: {sets: {a: {}}}", "evaluation.sets.a: the key source is missing"),
        ("data: {filter: papr}", "data.filter: 'papr' is none of paper, none"),
        ("data: {masking: xx}", "data.masking: 'xx' is none of mask, bert"),
        ("training: {trackers: wandb}", "training.trackers: expected a list or null, got 'wandb'"),
        ("training: {trackers: [wanbd]}", "training.trackers: 'wanbd' is none of wandb, mlflow, trackio"),
        ("training: {precision: fp8}", "training.precision: 'fp8' is none of auto, fp32, fp16, bf16"),
        ("training: {learning_rate: 0}", "training.learning_rate: must be above zero, got 0.0"),
        ("training: {learning_rate: .nan}", "training.learning_rate: must be above zero, got nan"),
        ("training: {max_steps: -1}", "training.max_steps: must be above zero, got -1"),
        ("data: {max_sequences: 0}", "data.max_sequences: must be above zero, got 0"),
        ("data: {mask_probability: 1}", "data.mask_probability: must lie between 0 and 1, got 1.0"),
        ("data: {mask_probability: 0}", "data.mask_probability: must lie between 0 and 1, got 0.0"),
        ("training: {epochs: .inf}", "training.epochs: must be finite, got inf"),
        ("training: {warmup_steps: -3}", "training.warmup_steps: must not be below zero, got -3"),
        ("training: {adam_beta1: 7}", "training.adam_beta1: must be at least 0 and below 1, got 7.0"),
        ("data: {max_length: 2}", "data.max_length: must lie between 3 and 65535, got 2"),
        (
            "training: {batch_size: 7, effective_batch_size: 40}",
            "training.batch_size: 7 does not divide training.effective_batch_size 40",
        ),
        ("training: {batch_size: 80, effective_batch_size: 40}", "training.batch_size: 80 does not divide"),
    ],
)
def test_a_mistake_is_an_error_that_names_the_key(written, text, message):
    assert message in error_of(written(text))


@pytest.mark.parametrize("text", ["", "\n\n", "# a comment\n", "---\n", "{}", "null"])
def test_a_file_with_nothing_in_it_is_named(written, tmp_path, text):
    path = written(text)
    assert error_of(path).startswith(f"{path}: no settings in it")
    assert error_of(path, "training.seed=3").startswith(f"{path}: no settings in it")
    (tmp_path / "above.yaml").write_text("extends: mine.yaml\ntraining: {seed: 3}\n")
    assert error_of(str(tmp_path / "above.yaml")).startswith(f"{path}: no settings in it")


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "5", "0", "false", "[]"])
def test_a_file_that_is_no_mapping_is_named(written, text):
    path = written(text)
    assert error_of(path).startswith(f"{path}: expected sections of keys, got ")


@pytest.mark.parametrize("content", [b"a: [1", b"a: \xff\xfe", b"a: b: c"])
def test_a_file_that_is_no_yaml_is_named(tmp_path, content):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    assert error_of(str(path)).startswith(f"{path}: not a YAML file")


def test_a_config_constructs_nothing(tmp_path):
    sprung, path = tmp_path / "sprung", tmp_path / "trap.yaml"
    path.write_text(f"name: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{str(sprung)!r}]]\n")
    assert error_of(str(path)).startswith(f"{path}: not a YAML file")
    assert "training.seed" in error_of("quickstart_pnn", "training.seed=!!python/object/apply:os.getpid []")
    assert not sprung.exists()


def test_an_unknown_config_gets_a_suggestion(tmp_path):
    assert 'no config "paper_reproducton"' in error_of("paper_reproducton")
    assert '(did you mean "paper_reproduction"?)' in error_of("paper_reproducton")
    assert error_of(str(tmp_path)).endswith("neither a file nor a shipped name (pnn configs lists them)")


def test_every_choice_and_bound_belongs_to_a_key_that_exists():
    sections = {"data": DataConfig, "training": TrainingConfig, "evaluation": EvaluationConfig}
    for key in (*CHOICES, *POSITIVE):
        section, name = key.split(".")
        assert name in {field.name for field in dataclasses.fields(sections[section])}, key


def test_removed_keys_are_read_and_ignored_with_one_note(written, capsys):
    config_module._note_removed.cache_clear()
    old = load_config(written("training: {fp8: true, seed: 3}"))
    assert old.training.seed == 3
    assert load_config("quickstart_pnn", ["training.fp8=true"]) == load_config("quickstart_pnn")
    assert capsys.readouterr().err.count("training.fp8 was removed") == 1


def test_committed_configs_still_load():
    committed = sorted((Path(__file__).parents[1] / "results").rglob("config.yaml"))
    assert len(committed) > 20
    for path in committed:
        model_config(load_config(str(path)).model)


# --set ----------------------------------------------------------------------------------------------------------------


def test_settings_override_the_file():
    config = load_config(
        "quickstart_pnn",
        ["training.learning_rate=3e-4", "training.max_steps=null", "data.train=my/*.txt", "model.schedule=[0, 1]", "name=mine"],
    )
    assert config.training.learning_rate == 3e-4
    assert config.training.max_steps is None
    assert config.data.train == "my/*.txt"
    assert config.model["schedule"] == [0, 1]
    assert config.name == "mine"
    assert load_config("quickstart_pnn").training.max_steps is not None  # the shipped one is as it was


def test_later_settings_win_and_missing_sections_are_made():
    assert with_overrides({}, ["a.b=1", "a.b=2", "a.c=x=y"]) == {"a": {"b": 2, "c": "x=y"}}
    assert with_overrides({}, ["a.b=[1"]) == {"a": {"b": "[1"}}  # what is no YAML is text


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.seed", '"training.seed" is not a setting of the form section.key=value'),
        ("=3", '"=3" is not a setting of the form section.key=value'),
        ("training.sed=3", 'unknown key "training.sed" (did you mean "seed"?)'),
        ("hidden_size=3", 'unknown key "hidden_size" (did you mean "model.hidden_size"?)'),
        ("hiden_size=3", 'unknown key "hiden_size" (did you mean "model.hidden_size"?)'),
        ("max_steps=3", 'unknown key "max_steps" (did you mean "training.max_steps"?)'),
        ("maxlength=3", 'unknown key "maxlength" (did you mean "data.max_length"?)'),
        ("trainig=3", 'unknown key "trainig" (did you mean "training"?)'),
        ("lr=1", 'unknown key "lr" (did you mean "training.learning_rate"?)'),
        ("training.lr=1", 'unknown key "training.lr" (did you mean "learning_rate"?)'),
        ("training.wd=1", 'unknown key "training.wd" (did you mean "weight_decay"?)'),
        ("zzz=3", 'unknown key "zzz" (known: data, evaluation, model, name, plasticity, training)'),
        ("data.train.x=3", '"data.train.x": train is not a section'),
        ("training.seed=x", "training.seed: expected a whole number, got 'x'"),
        ("training.batch_size=7", "training.batch_size: 7 does not divide training.effective_batch_size 40"),
    ],
)
def test_a_wrong_setting_is_named(setting, message):
    assert message in error_of("quickstart_pnn", setting)


def test_suggestions_name_the_closest_or_list_what_there_is():
    assert did_you_mean("wikitext103", ["c4", "wikitext-103"]) == ' (did you mean "wikitext-103"?)'
    assert did_you_mean("lr", ["lower", "learning_rate"]) == ' (did you mean "learning_rate"?)'
    assert did_you_mean("l", ["learning", "late"]) == " (known: late, learning)"
    assert did_you_mean("qqq", ["b", "a"]) == " (known: a, b)"
    assert re.fullmatch(r" \(known: \)", did_you_mean("x", []))


# One file that extends another -----------------------------------------------------------------------------------------


def test_a_config_holds_only_what_differs_from_the_one_it_extends(tmp_path):
    (tmp_path / "base.yaml").write_text("name: base\nmodel: {type: pnn, num_steps: 3}\ntraining: {seed: 5, epochs: 2}\n")
    (tmp_path / "middle.yaml").write_text("extends: base.yaml\ntraining: {epochs: 4}\n")
    (tmp_path / "top.yaml").write_text("extends: middle.yaml\nmodel: {num_steps: 6}\n")
    config = load_config(str(tmp_path / "top.yaml"), ["training.log_every=7"])
    assert config.name == "top"
    assert config.model == {"type": "pnn", "num_steps": 6}
    assert (config.training.seed, config.training.epochs, config.training.log_every) == (5, 4.0, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: nobody\n", 'no config "nobody"'),
        ("extends: [a, b]\n", "extends: expected text"),
        ("extends: self.yaml\n", "it extends itself"),
    ],
)
def test_extending_what_cannot_be_extended_is_a_clear_error(tmp_path, text, message):
    (tmp_path / "self.yaml").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(str(tmp_path / "self.yaml"))


def test_the_layout_follows_from_the_model_and_must_fit_it():
    assert load_config("ddl_small").data.layout == "rows"
    assert load_config("pnn_wikitext103").data.layout == "lines"
    with pytest.raises(UserError, match="a model of type ddl reads rows"):
        load_config("ddl_small", ["data.layout=lines"])
    with pytest.raises(UserError, match="a model of type pnn reads lines"):
        load_config("pnn_wikitext103", ["data.layout=rows"])


def test_naming_the_type_that_the_base_does_not_name_keeps_its_model(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {hidden_size: 64, num_attention_heads: 4}\n")
    (tmp_path / "same.yaml").write_text("extends: base.yaml\nmodel: {type: pnn, num_steps: 8}\n")
    (tmp_path / "other.yaml").write_text("extends: base.yaml\nmodel: {type: bert}\n")
    assert load_config(tmp_path / "same.yaml").model["hidden_size"] == 64
    assert load_config(tmp_path / "other.yaml").model.get("hidden_size") != 64
