"""Rows of latency and generation, and the script that gathers all of them, at sizes that say nothing about speed."""

import importlib
import json
from pathlib import Path

import pytest
import torch
import yaml

from pnn.bench import generation, latency
from pnn.bench.run import benchmark
from pnn.bench.timing import Budget
from pnn.config import load_config
from pnn.data.tokenizers import of_synthetic_language

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these check the rows of a CPU")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BRIEF = Budget(seconds=0.02, blocks=2, warmup=1)
SIZE = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64}


@pytest.fixture
def small(monkeypatch, small_product):
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    monkeypatch.setattr(latency, "BERT_BASE", {**tiny, "vocab_size": 100})
    monkeypatch.setattr(generation, "GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100})
    monkeypatch.setattr(generation, "NEW", 4)
    monkeypatch.setattr(generation, "BATCHES", (1, 3))
    monkeypatch.setattr(generation, "MANY", 7)
    monkeypatch.setattr(generation, "LENGTHS", (1, 6))
    monkeypatch.setattr(generation, "MEAN", 3)


@pytest.fixture
def decoder(tmp_path):
    def write(name, **changes):
        model = {"type": "ddl", "vocab_size": 100, "num_hidden_layers": 2, **SIZE, **changes}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"name": name, "model": model}))
        return str(path)

    return write


def test_latency_is_timed_in_turns(small, tiny_config, tmp_path):
    rewriting = {"type": "pnn", "update": "rewrite", "schedule": [0, 1], "guess_after": [1], "vocab_size": 90, **SIZE}
    runs = [load_config(str(tiny_config(model={"num_steps": 1}))), load_config(str(tiny_config("rewriting", model=rewriting)))]
    result, _ = benchmark(runs, ["latency"], ["naive", "transformers", "int8"], BRIEF, tmp_path / "out.json")
    names = ["pnn", "transformers bert", "onnxruntime, int8", "pnn rewrite", "transformers bert", "onnxruntime, int8"]
    assert [row["name"] for row in result["rows"]] == names
    for row in result["rows"]:
        assert 0 < row["milliseconds_per_update"] <= row["milliseconds_p99"]
        assert row["threads"] == torch.get_num_threads()
        assert row["turns"] == result["rows"][0 if row["config"] == result["rows"][0]["config"] else 3]["turns"]
    assert result["rows"][0]["ours_over_it"] == 1
    expected = {
        f"{ours}_latency_vs_{theirs}" for ours in ("pnn", "rewrite") for theirs in ("transformers_bert", "onnxruntime_int8")
    }
    assert set(result["ratios"]) == expected
    assert result["ratios"]["rewrite_latency_vs_onnxruntime_int8"] == result["rows"][5]["ours_over_it"]
    assert [row["precision"] for row in result["rows"]] == ["fp32", "fp32", "int8"] * 2


def test_generation_stands_beside_gpt2_and_the_additive_decoder(small, decoder, tmp_path):
    runs = [
        load_config(decoder("scalar", value_channels=1)),
        load_config(decoder("additive", value_channels=1, residual="additive")),
        load_config(decoder("channel")),
    ]
    result, _ = benchmark(runs, ["generate"], ["transformers", "batches"], BRIEF, tmp_path / "out.json")
    assert [row["name"] for row in result["rows"][:3]] == [
        "ddl scalar, batch 1",
        "transformers gpt2, batch 1",
        "ddl scalar, batch 3",
    ]
    assert set(result["ratios"]) == {
        f"{name}{end}"
        for name in ("ddl_generate_vs_transformers_gpt2", "ddl_scalar_generate_vs_additive", "ddl_channel_generate_vs_additive")
        for end in ("", "_batch_3")
    } | {f"ddl_{name}_continuous_vs_batches" for name in ("scalar", "additive", "channel")}
    gpt2 = result["rows"][1]
    assert result["ratios"]["ddl_generate_vs_transformers_gpt2"] == gpt2["ours_over_it"]
    assert gpt2["tokens_per_second"]["median"] == pytest.approx(1000 / gpt2["milliseconds_per_update"])


def test_generating_gives_as_many_tokens_as_it_says(small, decoder):
    run = load_config(decoder("scalar", value_channels=1))
    model = generation.build_model(generation.model_config(run.model)).eval()
    assert generation.generate(model, 3).shape == (3, generation.PROMPT + 4)


def test_only_decoders_generate_and_only_encoders_have_a_latency(pnn_command, decoder, tiny_config, tmp_path):
    for config, what, says in (
        (tiny_config(), "generate", "is not a decoder"),
        (decoder("a"), "latency", "only train and generate"),
    ):
        code, _, err = pnn_command("bench", config, "--what", what, "--output", tmp_path / "out.json")
        assert code == 2
        assert says in err


def test_the_script_gathers_parts_in_one_file(small, tiny_config, decoder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    use = importlib.import_module("use")
    every = [part for parts in use.parts_for("text/*.txt", "bert", "gpt2").values() for part in parts]
    for part in every:  # what it will be asked for exists
        for name in part.configs:
            load_config(name, part.settings)
    out, result = tmp_path / "out.json", {"rows": [], "ratios": {}, "rates": {}}
    scalar, additive = decoder("scalar", value_channels=1), decoder("additive", value_channels=1, residual="additive")
    for _ in range(2):  # a second time replaces the first
        use.measure([use.Part([str(tiny_config())], "latency", ["transformers"], seconds=0.02)], result, out)
    for names in ([scalar, additive], [additive]):  # what the second measures replaces its own rows alone
        use.measure([use.Part(names, "generate", [], seconds=0.02)], result, out)
    written = json.loads(out.read_text())
    assert [row["what"] for row in written["rows"]] == ["latency"] * 2 + ["generate"] * 4
    assert [row["config"] for row in written["rows"][2:]] == ["scalar"] * 2 + ["additive"] * 2
    assert {"pnn_latency_vs_transformers_bert", "ddl_scalar_generate_vs_additive_batch_3"} <= set(written["ratios"])
    assert list(written["rates"]) == ["latency: tiny", "generate: scalar, additive", "generate: additive"]
    assert {rates["matrix_rate"]["product"] for rates in written["rates"].values()} == {"64³ fp32"}


@pytest.mark.slow
def test_reading_text_stands_beside_datasets(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    reading = importlib.import_module("reading")
    monkeypatch.setattr(reading, "TURNS", 1)
    of_synthetic_language(128).save_pretrained(tmp_path / "tokenizer")
    text = tmp_path / "text.txt"
    text.write_text("the fox of avon wore amber hats .\n\nit has old boots .\n" * 40)
    result = reading.measure(text, str(tmp_path / "tokenizer"), 0.01)
    ours, theirs, masking = result["rows"]
    assert 9_900 < ours["bytes"] == theirs["bytes"] <= 10_000
    assert ours["minutes_for_a_gigabyte"] == pytest.approx(1e9 / ours["bytes"] * ours["seconds"][0] / 60)
    assert masking["tokens_per_second"] > 0
    assert result["ratios"] == {"reading_vs_datasets": theirs["seconds"][0] / ours["seconds"][0]}


def test_where_the_time_goes(tiny_config, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    where = importlib.import_module("where_time_goes")
    monkeypatch.setattr(where, "BEFORE", 1)
    monkeypatch.setattr(where, "PROFILED", 2)
    row = where.row_of(load_config(str(tiny_config())), rate=1e9)
    assert row["groups"]["products"] > 0
    assert sum(row["groups"].values()) == pytest.approx(row["milliseconds_per_update"])
    assert row["config"] in where.table(row)
    kernels = {
        "nvjet_tst_256x128_64x4_TNT": "products",
        "norm_backward": "norm",
        "attention_forward": "attention",
        "gate_backward": "gate",
        "pointwise_kernel": "GELU and dropout",
        "_losses_and_gradients": "loss",
    }
    assert {name: where.group_of(name) for name in kernels} == kernels
