"""`pnn bench`: the file it writes, the sentences it says, and that it survives what may go wrong."""

import json
import os

import pytest
import torch

from pnn.bench import inference, training, transformers_bert
from pnn.bench import run as bench_run
from pnn.bench.scaling import with_steps, with_width
from pnn.bench.timing import Budget, Clock, copy_rate, hardware_slug
from pnn.config import RunConfig, from_dict, load_config
from pnn.figures.scaling import scaling
from pnn.models.sections import model_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these check the rows of a CPU")
BRIEF = Budget(seconds=0.05, blocks=2, warmup=1)
SMALL_EVALUATION = {"batch_tokens": 256}
ROW = {
    "name",
    "what",
    "config",
    "implementation",
    "parameters",
    "precision",
    "compiled",
    "shapes",
    "tokens_per_second",
    "milliseconds_per_update",
    "blocks",
    "updates_per_block",
    "flops_per_token",
    "share_of_matmul_rate",
    "peak_memory_bytes",
}


@pytest.fixture
def pair(tiny_config):
    """A tiny PNN and a tiny BERT on the same text."""
    bert = {"type": "bert", "num_hidden_layers": 2}
    return [tiny_config("pnn", evaluation=SMALL_EVALUATION), tiny_config("bert", model=bert, evaluation=SMALL_EVALUATION)]


def rows_by_name(result):
    return {(row["what"], row["name"]): row for row in result["rows"]}


def test_only_steps_that_can_be_read_are_timed(tiny_config):
    weighted = {"schedule": [0, 1, 0, 1], "step_weights": [0, 0.3, 0, 0.7]}
    run = load_config(str(tiny_config("pnn", model=weighted)))
    assert [name for name, _ in bench_run.inference_rows(run, [], BRIEF)] == ["pnn", "pnn, 2 steps"]


def test_the_file_holds_what_the_contract_says(pair, small_product, tmp_path):
    runs = [load_config(str(path)) for path in pair]
    out = tmp_path / "new" / "train.json"
    result, path = bench_run.benchmark(runs, ["train", "inference"], ["naive", "transformers"], BRIEF, out)
    assert path == out
    assert json.loads(out.read_text()) == result
    assert result["hardware"]["cores"] == os.cpu_count()
    assert result["versions"]["torch"]
    assert result["matrix_rate"]["product"] == "64³ fp32"
    rows = rows_by_name(result)
    baselines = {"naive pnn", "transformers bert"}
    steps = {"pnn, 1 step", "pnn, 2 steps", "pnn, 3 steps"}
    assert {name for what, name in rows if what == "train"} == {"pnn", "bert"} | baselines
    assert {name for what, name in rows if what == "inference"} == {"pnn", "bert"} | baselines | steps
    rate = result["matrix_rate"]["flops_per_second"]["median"]
    for row in result["rows"]:
        assert set(row) == ROW
        speed = row["tokens_per_second"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
        assert row["share_of_matmul_rate"] == pytest.approx(speed["median"] * row["flops_per_token"] / rate)
        assert row["peak_memory_bytes"] is None
        assert 0.1 < row["shapes"]["target_share"] < 0.2
    assert "peak_memory_bytes" in result["notes"][0]  # why it is null
    ours, naive = rows["train", "pnn"], rows["train", "naive pnn"]
    assert ours["parameters"] == naive["parameters"]
    assert ours["flops_per_token"] == naive["flops_per_token"]
    assert set(result["ratios"]) == {
        "pnn_cpu_train_vs_naive",
        "bert_train_vs_transformers",
        "pnn_share_of_matmul_rate",
        "bert_share_of_matmul_rate",
        "pnn_inference_vs_naive",
        "pnn_inference_share_of_matmul_rate",
        "bert_inference_vs_transformers",
    }
    expected = ours["tokens_per_second"]["median"] / naive["tokens_per_second"]["median"]
    assert result["ratios"]["pnn_cpu_train_vs_naive"] == pytest.approx(expected)


def test_ratios_of_a_gpu_and_never_across_configs():
    def row(name, config, speed, memory, what="train"):
        tokens = {"median": speed, "low": speed, "high": speed}
        measured = {"tokens_per_second": tokens, "peak_memory_bytes": memory, "share_of_matmul_rate": 0.5}
        return {"name": name, "what": what, "config": config, **measured}

    rows = [row("pnn", "a", 1200.0, 10), row("naive pnn", "a", 100.0, 50), row("bert", "b", 300.0, 20)]
    found = bench_run.ratios([*rows, row("transformers bert", "c", 100.0, 30)], on_gpu=True)
    assert found["pnn_train_vs_naive"] == 12
    assert found["pnn_memory_vs_naive"] == 0.2
    assert found["pnn_share_of_matmul_rate"] == 0.5
    assert "bert_train_vs_transformers" not in found
    assert "pnn_cpu_train_vs_naive" not in found


def test_a_decoder_stands_beside_what_bytes_allow():
    def row(name, speed, **more):
        tokens = {"median": speed, "low": speed, "high": speed}
        measured = {"tokens_per_second": tokens, "peak_memory_bytes": 10, "share_of_matmul_rate": 0.5}
        return {"name": name, "what": "train", "config": name, "shapes": {"width": 8}, **measured, **more}

    rows = [row("ddl additive", 1e6), row("ddl channel", 0.7e6, rewriting_bytes_per_token=1000), row("ddl additive channel", 1)]
    copied = {"bytes_per_second": {"median": 4e9, "low": 4e9, "high": 4e9}}
    found = bench_run.ratios(rows, True, copied)
    assert found["ddl_channel_vs_additive"] == pytest.approx(0.7)
    assert found["ddl_channel_bound_by_bytes"] == pytest.approx(1 / 1.25)  # a microsecond, and a quarter more
    bounds = {name for name in found if name.endswith("bound_by_bytes")}
    assert bounds == {"ddl_channel_bound_by_bytes"}
    assert "ddl_channel_bound_by_bytes" not in bench_run.ratios(rows, True)
    assert "ddl_channel_bound_by_bytes" not in bench_run.ratios(rows[1:], True, copied)


def test_bytes_are_counted_where_kernels_move_them():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    rewrites, adds, pnn_config = (
        model_config(load_config(name).model) for name in ("ddl_small", "ddl_small_additive", "quickstart_pnn")
    )
    assert training._bytes_of(rewrites, gpu) == {"rewriting_bytes_per_token": 542 * 768 * 2}
    assert training._bytes_of(rewrites, cpu) == training._bytes_of(adds, gpu) == training._bytes_of(pnn_config, gpu) == {}


def test_the_rate_of_a_copy_counts_reading_and_writing(monkeypatch):
    monkeypatch.setattr("pnn.bench.timing.COPIED", 1 << 20)
    monkeypatch.setattr("pnn.bench.timing.time_updates", lambda copy, budget, device: {"tokens_per_second": copy()})
    assert copy_rate(torch.device("cpu")) == {"copied_bytes": 1 << 20, "bytes_per_second": 2 << 20}


def test_a_row_that_runs_out_of_memory_is_told_and_the_others_still_run(pair, small_product, tmp_path, monkeypatch):
    def forward(module, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.49 GiB.")

    build = training.NaivePNN.from_pnn

    def too_large(model):
        naive = build(model)
        naive.register_forward_pre_hook(forward)
        return naive

    monkeypatch.setattr(training.NaivePNN, "from_pnn", too_large)
    runs = [load_config(str(path)) for path in pair]
    out = tmp_path / "train.json"
    result, _ = bench_run.benchmark(runs, ["train"], ["naive"], BRIEF, out)
    names = [(row["config"], row["name"], row.get("error")) for row in result["rows"]]
    assert names == [("pnn", "pnn", None), ("pnn", "naive pnn", "out of memory"), ("bert", "bert", None)]
    assert "training.batch_size" in result["rows"][1]["advice"]
    assert "pnn_cpu_train_vs_naive" not in result["ratios"]


def test_what_was_timed_is_kept_when_a_later_row_fails(pair, small_product, tmp_path, monkeypatch):
    def broken(run, budget):
        raise RuntimeError("a bug")

    monkeypatch.setattr(training, "naive_train_row", broken)
    out = tmp_path / "train.json"
    with pytest.raises(RuntimeError, match="a bug"):
        bench_run.benchmark([load_config(str(pair[0]))], ["train"], ["naive"], BRIEF, out)
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == ["pnn"]


def test_the_clock_leaves_out_the_warm_up_and_fills_its_blocks(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pnn.bench.timing.time.perf_counter", lambda: now[0])
    clock = Clock(Budget(seconds=6.0, blocks=3, warmup=4), torch.device("cpu"))
    ticks, done = 0, False
    while not done:
        now[0] += 100.0 if ticks < 4 else 0.5
        done = clock.tick(10)
        ticks += 1
    assert ticks == 4 + 2 + 3 * 4  # warm-up, calibration, three blocks of two seconds
    result = clock.result()
    assert result["tokens_per_second"] == {"median": 20.0, "low": 20.0, "high": 20.0}
    assert result["milliseconds_per_update"] == 500.0
    assert result["updates_per_block"] == 4


def test_transformers_gets_the_configs_batch_but_no_micro_batch_above_the_papers(tiny_config):
    for sizes, rows in (((8, 16), 8), ((384, 1152), 384), ((1152, 1152), 384), ((500, 1000), 250)):
        run = load_config(str(tiny_config(training={"batch_size": sizes[0], "effective_batch_size": sizes[1]})))
        assert transformers_bert.micro_batch_rows(run) == rows


def test_file_names_say_what_was_timed_where():
    assert hardware_slug({"gpus": ["NVIDIA H200"], "cores": 16}) == "nvidia-h200"
    assert hardware_slug({"gpus": [], "cores": 2}) == "cpu-2-cores"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--what", "trian"], ("--what trian", 'did you mean "train"')),
        (["--what", ","], ("--what", "nothing to time")),
        (["--against", "naiv"], ("--against naiv", 'did you mean "naive"')),
        (["--set", "model.update=delta"], ("model.update: delta", "naive")),
        (["--what", "processes", "--set", "training.batch_size=1"], ("training.batch_size", "multiple of 2")),
        (["--set", "training.device=cuda"], ("training.device: cuda", "no GPU")),
        (["--set", "training.batchsize=1"], ("training.batchsize", "did you mean")),
    ],
)
def test_bad_input_is_one_sentence(pnn_command, tiny_config, tmp_path, arguments, says):
    out = tmp_path / "out.json"
    code, _, err = pnn_command("bench", tiny_config(), "--output", out, *arguments)
    assert code == 2
    assert all(words in err for words in says), err
    assert not out.exists()


@pytest.mark.slow
def test_rows_of_one_process_and_of_two(pnn_command, pair, small_product, tmp_path, monkeypatch, forked_python):
    """In processes of their own, two of them by torchrun. The default file name, a table that fits a terminal, and nothing left
    behind beside the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    code, printed, err = pnn_command("bench", pair[1], "--what", "train,processes", "--seconds", 0.1)
    assert code == 0, err
    out = tmp_path / "benchmarks" / "results" / f"train-cpu-{os.cpu_count()}-cores.json"
    assert f"Wrote {out.relative_to(tmp_path)}" in printed
    assert "transformers bert" in printed
    result = json.loads(out.read_text())
    rows = rows_by_name(result)
    for name, count in (("1 process", 1), ("2 processes", 2)):
        row = rows["processes", name]
        assert (row["processes"], row["threads_per_process"]) == (count, 1)
        assert row["shapes"]["effective_batch_size"] == 16
    assert result["ratios"]["two_processes_vs_one"] > 0
    assert "two_processes_vs_one" in printed
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    code, _, err = pnn_command("bench", pair[1], "--what", "train", "--seconds", 0.1)
    assert code == 2
    assert f"{out.relative_to(tmp_path)} exists: --output FILE writes elsewhere, --overwrite replaces it" in err
    assert json.loads(out.read_text()) == result
    assert pnn_command("bench", pair[1], "--what", "train", "--against", "none", "--seconds", 0.1, "--overwrite")[0] == 0
    assert len(json.loads(out.read_text())["rows"]) == 1


@pytest.mark.slow
def test_scaling_varies_one_thing_at_a_time_and_draws_it(pnn_command, small_product, tiny_config, tmp_path, monkeypatch):
    """Its rows of one process and of two are timed in this one: real ones are above."""

    def row(run, budget, count):
        return training.train_row(run, budget) | {"processes": count}

    monkeypatch.setattr("pnn.bench.scaling.processes_row", row)
    out = tmp_path / "scaling.json"
    config = tiny_config(data={"max_length": 16})
    code, _, err = pnn_command("bench", config, "--what", "scaling", "--seconds", "0.05", "--output", out)
    assert code == 0, err
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(out.read_text())["rows"]
    base = next(row for row in rows if row["varies"] == "base")
    shape = {key: base["shapes"][key] for key in ("effective_batch_size", "width", "steps")}
    varied = {"tokens": ("effective_batch_size", {4, 8, 32, 64}), "width": ("width", {16, 64}), "steps": ("steps", {1, 2, 8})}
    for axis, (key, values) in varied.items():
        chosen = [row["shapes"] for row in rows if row["varies"] == axis]
        assert {one[key] for one in chosen} == values
        for one in chosen:
            assert all(one[other] == value for other, value in shape.items() if other != key)
    assert [row["processes"] for row in rows if row["varies"] == "processes"] == [1, 2]


def test_a_narrow_table_is_scaled_with_the_width():
    narrow = {"type": "pnn", "hidden_size": 64, "num_attention_heads": 4, "embedding_size": 48, "head_transform": True}
    run = from_dict(RunConfig, {"model": narrow})
    assert with_width(run, 0.5).model["embedding_size"] == 24
    assert "embedding_size" not in with_width(from_dict(RunConfig, {"model": {"type": "pnn"}}), 2).model


def test_guesses_behind_the_last_step_are_left_out_where_steps_are_scaled():
    run = from_dict(RunConfig, {"model": {"type": "pnn", "num_steps": 4, "guess_after": [1, 2]}})
    assert [with_steps(run, factor).model["guess_after"] for factor in (2, 0.5, 0.25)] == [[1, 2], [1], None]


def test_a_cpu_is_timed_in_the_precision_that_it_predicts_in(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    wide = from_dict(RunConfig, {"model": {"type": "pnn"}})
    assert training.precision_name(wide) == "bf16"
    assert inference.inference_precision(wide) == "fp32"
    asked = from_dict(RunConfig, {"model": {"type": "pnn"}, "training": {"precision": "bf16"}})
    assert inference.inference_precision(asked) == "bf16"


def test_the_scaling_figure_shows_all_four_and_the_ideal():
    def row(varies, tokens=1000, width=64, steps=4, milliseconds=10.0, **more):
        shapes = {"batch_tokens": tokens, "micro_batches": 1, "width": width, "steps": steps}
        speed = {"median": 100.0, "low": 90.0, "high": 110.0}
        measured = {"tokens_per_second": speed, "milliseconds_per_update": milliseconds, "flops_per_token": 1e6 * steps}
        return {"config": "a", "varies": varies, "shapes": shapes, **measured, **more}

    rows = [row("base"), row("tokens", tokens=2000, milliseconds=15.0), row("steps", steps=8, milliseconds=18.0)]
    rows += [row("width", width=128, milliseconds=30.0), row("width", error="out of memory")]
    rows += [row("processes", processes=1), row("processes", tokens=500, processes=2, milliseconds=6.0)]
    figure = scaling({"rows": rows})
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Tokens of an update",
        "Width of the model",
        "Refinement steps or layers",
        "Processes",
    ]
    ideal = {axes.get_title(loc="left"): list(axes.lines[0].get_ydata()) for axes in figure.axes}
    assert ideal["Tokens of an update"] == [10.0, 20.0]
    assert ideal["Refinement steps or layers"] == [10.0, 20.0]
    assert ideal["Processes"] == [10.0, 5.0]


def test_muon_is_timed_by_itself(tiny_config, small_product, tmp_path):
    rewriting = {"type": "pnn", "update": "rewrite", "schedule": [0, 1], "hidden_size": 32, "num_attention_heads": 2}
    run = load_config(str(tiny_config("rewriting", model=rewriting)), ["training.optimizer=muon"])
    result, _ = bench_run.benchmark([run], ["train"], ["naive"], BRIEF, tmp_path / "out.json")
    (row,) = result["rows"]  # the naive design is of the paper's rule
    assert row["name"] == "pnn rewrite"
    assert set(result["ratios"]) == {"rewrite_share_of_matmul_rate", "muon_share_of_update"}
    assert result["ratios"]["muon_share_of_update"] == row["muon_milliseconds"] / row["milliseconds_per_update"]
    assert 0 < result["ratios"]["muon_share_of_update"] < 1
