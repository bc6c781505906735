"""Reorganised models on disk: they come back the same, through our loader and through transformers'."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers as hf

import pnn
from pnn.data.tokenizers import of_synthetic_language
from pnn.errors import UserError
from pnn.models.loading import load_any
from pnn.models.plastic import PlasticConfig
from pnn.plasticity import grow, heads, load, prune, save
from pnn.plasticity.heads import head_map

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}


def uneven(model):
    """Layers with different numbers of heads, one with none, one with a head more than it had."""
    gone = [head for head in heads(model) if head[0] == 0] + [(1, 1)]
    return grow(prune(model, gone, whole_layers=True), [(2, len(head_map(model)[2]))], init="random")


def auto_class(model):
    return hf.AutoModelForCausalLM if model.can_generate() else hf.AutoModelForMaskedLM


def test_a_saved_model_comes_back_the_same(model, logits, tmp_path):
    changed = uneven(model)
    save(changed, tmp_path / "model")
    back = load(tmp_path / "model")
    assert torch.equal(logits(back), logits(changed))
    assert head_map(back) == head_map(changed)
    assert type(back) is type(changed)
    assert isinstance(back, type(model))
    assert not back.training


def test_transformers_loads_it(model, logits, tmp_path):
    changed = uneven(model)
    changed.save_pretrained(tmp_path)  # as the HF Trainer does
    back = auto_class(model).from_pretrained(tmp_path)
    assert torch.equal(logits(back), logits(changed))
    if model.can_generate():
        ids = torch.randint(1, 50, (1, 5), generator=torch.Generator().manual_seed(0))
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(back.generate(ids, **settings), changed.generate(ids, **settings))


def test_a_loaded_model_is_pruned_grown_and_saved_again(model, logits, tmp_path):
    save(uneven(model), tmp_path / "first")
    first = load(tmp_path / "first")
    second = prune(grow(first, [(0, 0), (1, 1)]), [(1, 0)])
    save(second, tmp_path / "second")
    assert torch.equal(logits(load(tmp_path / "second")), logits(second))
    assert head_map(second)[:2] == [[0], [index for index in head_map(model)[1] if index]]


def test_config_json_says_what_it_is(built, tmp_path):
    save(prune(built("gpt2"), [(0, 1)]), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "pnn_plastic"
    assert config["architectures"] == ["PlasticForCausalLM"]
    assert config["original_class"] == "GPT2LMHeadModel"
    assert config["original"]["model_type"] == "gpt2"
    assert config["head_map"] == [[0, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert {path.suffix for path in (tmp_path / "model").iterdir()} == {".json", ".safetensors"}


def test_a_model_as_it_was_saves_and_loads_too(model, logits, tmp_path):
    save(model, tmp_path / "model")
    back = load(tmp_path / "model")
    assert type(back) is type(model)
    assert torch.equal(logits(back), logits(model))


@pytest.mark.parametrize(
    ("auto", "kind", "name"),
    [
        (hf.AutoModel, lambda: hf.BertModel(hf.BertConfig(**SMALL, num_hidden_layers=2)), "PlasticModel"),
        (
            hf.AutoModelForSequenceClassification,
            lambda: pnn.PNNForSequenceClassification(pnn.PNNConfig(**SMALL)),
            "PlasticForSequenceClassification",
        ),
        (
            hf.AutoModelForMultipleChoice,
            lambda: hf.BertForMultipleChoice(hf.BertConfig(**SMALL, num_hidden_layers=2)),
            "PlasticForMultipleChoice",
        ),
    ],
)
def test_models_without_a_language_head(auto, kind, name, tmp_path):
    pruned = prune(kind().eval(), [(0, 1), (0, 2)])
    assert type(pruned).__name__ == name
    save(pruned, tmp_path / "model")
    for back in (load(tmp_path / "model"), auto.from_pretrained(tmp_path / "model")):
        assert type(back) is type(pruned)
        assert all(torch.equal(value, pruned.state_dict()[key]) for key, value in back.state_dict().items())


def test_what_a_caller_asks_of_transformers_is_heard(built, tmp_path):
    save(prune(built("gpt2"), [(0, 1)]), tmp_path / "model")
    auto = hf.AutoModelForCausalLM
    assert auto.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert auto.from_pretrained(tmp_path / "model").dtype == torch.float32
    eager = auto.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"
    fresh = auto.from_config(hf.AutoConfig.from_pretrained(tmp_path / "model"))
    assert heads(fresh) == heads(eager)


@pytest.mark.parametrize(
    "asked",
    [
        {"num_labels": 3},
        {"num_labels": 1, "problem_type": "regression", "pad_token_id": 0},
        {"id2label": {0: "no", 1: "yes", 2: "both"}, "label2id": {"no": 0, "yes": 1, "both": 2}},
        {"resid_pdrop": 0.5, "output_hidden_states": True},
    ],
)
def test_what_is_said_of_a_new_head_is_heard(built, tmp_path, asked):
    """As transformers does it with the original."""
    models = {"whole": built("gpt2"), "smaller": prune(built("gpt2"), [(0, 1)])}
    found = {}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        found[name] = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / name, **asked)
        found[f"{name}, by its config"] = hf.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / name, config=hf.AutoConfig.from_pretrained(tmp_path / name, **asked)
        )
    wanted = found["whole"].config
    for model in found.values():
        assert model.score.weight.shape == (wanted.num_labels, 32)
        assert all(getattr(model.config, key) == getattr(wanted, key) for key in asked)
    found["smaller"].save_pretrained(tmp_path / "again")
    again = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    assert again.config.id2label == wanted.id2label
    assert head_map(again) == head_map(models["smaller"])


def test_attention_weights_are_given_to_who_asks_for_them(built, tmp_path):
    prune(built("gpt2"), [(0, 1)]).save_pretrained(tmp_path)
    assert hf.AutoConfig.from_pretrained(tmp_path, num_labels=3).num_labels == 3
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, output_attentions=True)  # which needs the eager form
    assert [weights.shape[1] for weights in model(torch.ones(1, 3).long()).attentions] == [3, 4, 4]


def test_with_a_tokenizer_it_is_a_folder_that_commands_take(tmp_path):
    tokenizer = of_synthetic_language(32)
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_head=2, n_layer=2, n_positions=32, eos_token_id=None)
    )
    pruned = prune(model.eval(), [(0, 1)])
    save(pruned, tmp_path / "model", tokenizer)
    loaded = load_any(tmp_path / "model", device="cpu")
    assert heads(loaded.model) == [(0, 0), (1, 0), (1, 1)]
    pipe = hf.pipeline("text-generation", model=str(tmp_path / "model"), device="cpu")
    text = pipe("the", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert text.startswith("the")


def test_a_copy_of_a_reorganised_model_is_one_too(built, logits):
    changed = uneven(built("opt"))
    twin = copy.deepcopy(changed)
    assert torch.equal(logits(twin), logits(changed))
    with torch.no_grad():
        twin.model.decoder.layers[0].self_attn.out_proj.bias.add_(1.0)  # the layer without heads has its own bias
    assert not torch.equal(logits(twin), logits(changed))


# Errors ---------------------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten(built, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "note.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        save(built("gpt2"), tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["note.txt"]


def test_a_damaged_file_is_noticed(built, tmp_path):
    save(prune(built("gpt2"), [(0, 1)]), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="does not match its checksum"):
        load(tmp_path / "model")


def test_no_folder(tmp_path):
    with pytest.raises(UserError, match="cannot load a model"):
        load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"original_class": "os.system"}, "nothing for AutoModelForCausalLM"),
        ({"original": {}}, "without its original's config"),
        ({"head_map": [[0], [0], [0]]}, "size mismatch|mismatched"),
    ],
)
def test_a_config_that_does_not_fit(built, tmp_path, change, message):
    pruned = prune(built("gpt2"), [(0, 1)])
    pruned.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("pruned", [False, True])
def test_a_config_with_a_wrong_value(built, tmp_path, pruned):
    (prune(built("gpt2"), [(0, 1)]) if pruned else built("gpt2")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (config["original"] if pruned else config)["n_embd"] = "wide"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"cannot load a model .*n_embd"):
        load(tmp_path)


def test_an_interrupted_save_leaves_nothing(built, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    pruned = prune(built("gpt2"), [(0, 1)])
    monkeypatch.setattr(PlasticConfig, "save_pretrained", fail)
    with pytest.raises(UserError, match="disk full"):
        save(pruned, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_push_while_saving_would_send_the_wrong_config(built, tmp_path):
    with pytest.raises(UserError, match="call its push_to_hub"):
        prune(built("gpt2"), [(0, 1)]).save_pretrained(tmp_path, push_to_hub=True)


def test_a_class_that_could_not_be_loaded_again_is_refused():
    config = hf.GPT2Config(vocab_size=20, n_embd=16, n_head=2, n_layer=1)
    with pytest.raises(UserError, match="GPT2DoubleHeadsModel could not be loaded again"):
        prune(hf.GPT2DoubleHeadsModel(config), [(0, 0)])
