"""One answer to "masked or causal?", for ours, transformers' and reorganised models, with torch and without."""

import pytest
import transformers as hf

from pnn import kinds, plasticity
from pnn.errors import UserError
from pnn.models.registry import AUTO_CLASSES, ENTRIES, class_named, class_of, distinct_blocks, kind_of, language_class, sentence
from pnn.models.sections import build_model, model_config

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 16}
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_head": 2, "n_layer": 3, "bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize("kind", kinds.OURS, ids=lambda kind: kind.type)
def test_both_tables_tell_of_the_same_models(kind):
    entry = ENTRIES[kind.type]
    model = build_model(model_config({"type": kind.type, **SMALL}))
    assert entry.config.model_type == kind.model_type
    assert type(model) is entry.classes[language_class(model)]
    assert kind_of(model) == kind_of(model.config) == kinds.of_result({"model_type": kind.model_type}) == kind
    assert {class_of(one(model.config)) for one in entry.classes.values()} == set(entry.classes)
    assert len(distinct_blocks(model)) == {"pnn": 1, "bert": 12, "ddl": 12, "pnn_causal": 1}[kind.type]
    assert len(plasticity.heads(model)) == 2 * len(distinct_blocks(model))
    assert len(sentence(model)) > 20


def test_every_entry_has_a_kind():
    assert list(ENTRIES) == [kind.type for kind in kinds.OURS]


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        (hf.GPT2Config(**GPT2), True),
        (hf.OPTConfig(), True),
        (hf.LlamaConfig(), True),
        (hf.BertConfig(), False),
        (hf.BertConfig(is_decoder=True), True),
        (hf.DistilBertConfig(), False),
        (hf.T5Config(), False),  # neither: nothing here continues a text with it
    ],
    ids=lambda one: getattr(one, "model_type", str(one)),
)
def test_models_of_transformers(config, causal):
    kind = kind_of(config)
    assert (kind.causal, kind.masked, kind.ours, kind.has_steps) == (causal, not causal, False, False)
    assert kind.layout == ("rows" if causal else "lines")


def test_a_model_without_a_head_or_with_another_is_of_the_same_kind():
    config = hf.GPT2Config(**GPT2, num_labels=2)
    for made in (hf.GPT2Model, hf.GPT2LMHeadModel, hf.GPT2ForSequenceClassification):
        assert kind_of(made(config)).causal
    assert len(distinct_blocks(hf.GPT2LMHeadModel(config))) == 3


def test_a_reorganised_model_is_of_its_originals_kind(tmp_path):
    for name, model in {
        "gpt2": hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
        "pnn": build_model(model_config({"type": "pnn", **SMALL})),
    }.items():
        small = plasticity.prune(model, [(0, 1)])
        small.save_pretrained(tmp_path / name)
        config = hf.AutoConfig.from_pretrained(tmp_path / name)
        assert config.model_type == "pnn_plastic"
        assert kind_of(config) == kind_of(small) == kind_of(model)
        assert class_named(config) is class_of(small) is class_of(model) is language_class(model)


def test_what_config_json_names_decides_the_auto_class():
    for named, auto in {
        "GPT2LMHeadModel": hf.AutoModelForCausalLM,
        "GPT2ForSequenceClassification": hf.AutoModelForSequenceClassification,
        "GPT2Model": hf.AutoModel,
        "GPT2DoubleHeadsModel": None,
    }.items():
        assert class_named(hf.GPT2Config(**GPT2, architectures=[named])) is auto
    assert class_named(hf.GPT2Config(**GPT2)) is None
    assert all(head.what for head in AUTO_CLASSES.values())


def test_an_encoder_of_transformers_is_no_decoder_unless_it_is_told():
    section = {"type": "transformers", "architecture": "bert", "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50}
    with pytest.raises(UserError, match="a bert model sees the tokens that it predicts: set is_decoder"):
        model_config(section)
    assert kind_of(build_model(model_config(section | {"is_decoder": True, "num_hidden_layers": 1}))).causal


def test_results_need_no_model():
    assert kinds.of_result({"model_type": "pnn", "accuracy": 0.5}).has_steps
    other = kinds.of_result({"model_type": "gpt2"})
    assert (other.family, other.causal, other.ours, other.unit) == ("gpt2", True, False, "layer")
