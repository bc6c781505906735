"""Decoders on lm-eval's tasks: the same prompts and the same accuracies as lm-eval's own command, from local documents."""

import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from beside import DATA
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

import pnn
from pnn.data.tokenizers import of_synthetic_language
from pnn.evaluation import harness
from pnn.evaluation.harness import evaluate_tasks
from pnn.evaluation.task_files import TASKS, read_documents, write_tasks
from pnn.models.loading import load_decoder

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
import lm_eval.__main__
import lm_eval.tasks

DEFINITIONS = Path(lm_eval.tasks.__file__).parent
THINGS = ["apple", "kettle", "ladder", "river", "candle", "hammer", "violin", "garden"]


def pair(task: str, i: int) -> tuple[dict, dict]:
    """A document as a local file has it, and as the hub has it."""
    thing, other = THINGS[i], THINGS[(i + 3) % len(THINGS)]
    four = [f"the {thing}", f"a very old {other}", f"{other}s and {thing}s", "none of them"]
    gold = i % 4
    if task.startswith("arc"):
        labels = ["1", "2", "3", "4"] if i % 2 else ["A", "B", "C"]
        texts, key = four[: len(labels)], labels[i % 3]
        local = {
            "stem": f"What is a {thing}?",
            "choices": [{"text": t, "label": k} for t, k in zip(texts, labels, strict=True)],
        }
        hub = {"question": f"What is a {thing}?", "choices": {"text": texts, "label": labels}, "answerKey": key}
        return {"id": f"q{i}", "question": local, "answerKey": key}, hub
    if task == "hellaswag" and i % 2:  # a caption, whose last sentence has only begun
        before, begun = f'A man sees the {thing}. He says "it is a {other}!"', "the other man"
        local = {"query": f"Finding things: {before} {begun}", "choices": four, "gold": gold}
        return local, {"activity_label": "Finding things", "ctx_a": before, "ctx_b": begun, "endings": four, "label": str(gold)}
    if task == "hellaswag":
        steps = f"How to clean a {thing}. Take a soft cloth. Rub the {thing}."
        hub = {"activity_label": "Home", "ctx_a": f"[header] {steps}", "ctx_b": "", "endings": four, "label": str(gold)}
        return {"query": f"Home: {steps}", "choices": four, "gold": gold}, hub
    if task == "openbookqa":
        choices = {"text": four, "label": ["A", "B", "C", "D"]}
        hub = {"question_stem": f"A {thing} is made by", "choices": choices, "answerKey": "ABCD"[gold]}
        return {"query": f"A {thing} is made by", "choices": four, "gold": gold}, hub
    if task == "piqa":
        hub = {"goal": f"Mend a {thing}", "sol1": four[0], "sol2": four[1], "label": i % 2}
        return {"query": f"Question: Mend a {thing}\n", "choices": four[:2], "gold": i % 2}, hub
    if task == "sciq":
        wrong = four[:gold] + four[gold + 1 :]
        hub = {f"distractor{n}": text for n, text in enumerate(wrong, 1)} | {"correct_answer": four[gold]}
        text = {"support": f"About {thing}s." if i % 3 else "", "question": f"Which {thing}?"}
        return text | {"choices": four, "gold": gold}, text | hub
    if task == "social_iqa":
        hub = {"context": f"Kai lost the {thing}. Kai was sad.", "question": "What will Kai do?"}
        answers = {"answerA": four[0], "answerB": four[1], "answerC": four[2]}
        local = {"query": f"{hub['context']} {hub['question']}", "choices": four[:3], "gold": i % 3}
        return local, hub | answers | {"label": str(i % 3 + 1)}
    names = ("Sarah", "Samantha") if i % 2 else ("cup", "cups")  # names that begin alike, one the beginning of the other
    end = f"was behind the {thing}."
    local = {"context_options": [f"We saw the {name}" for name in names], "continuation": end, "gold": i % 2}
    return local, {"sentence": f"We saw the _ {end}", "option1": names[0], "option2": names[1], "answer": str(i % 2 + 1)}


def write_lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Local task files, eight documents each."""
    folder = tmp_path_factory.mktemp("files")
    for name, task in TASKS.items():
        write_lines(folder / task.file, [pair(name, i)[0] for i in range(len(THINGS))])
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """The same documents in the hub's layout, read by lm-eval's definitions: what one would write for lm-eval without us."""
    folder = tmp_path_factory.mktemp("hub")
    for name, task in TASKS.items():
        write_lines(folder / f"{name}.jsonl", [pair(name, i)[1] for i in range(len(THINGS))])
        reads = {"data_files": {"test": str(folder / f"{name}.jsonl")}, "cache_dir": str(folder / "cache")}
        splits = {"training_split": None, "validation_split": None, "test_split": "test", "fewshot_split": "test"}
        definition = {"include": str(DEFINITIONS / task.definition), "task": f"same_{name}", "dataset_path": "json"}
        text = yaml.safe_dump(definition | {"dataset_name": None, "dataset_kwargs": reads} | splits)
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([json.dumps(pair(name, i)) for name in TASKS for i in range(len(THINGS))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def tiny_ddl(vocab_size: int) -> pnn.DDLForCausalLM:
    set_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.5}
    config = pnn.DDLConfig(vocab_size=vocab_size, max_position_embeddings=256, bos_token_id=0, eos_token_id=0, **shape)
    return pnn.DDLForCausalLM(config)


def tiny_causal_pnn(vocab_size: int) -> pnn.PNNForCausalLM:
    set_seed(0)
    shape = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "initializer_range": 0.5}
    steps = {"update": "rewrite", "schedule": [0, 1, 2], "repeat": [1, 2], "num_steps": 4}
    config = pnn.PNNCausalConfig(
        vocab_size=vocab_size, max_position_embeddings=256, bos_token_id=0, eos_token_id=0, **shape, **steps
    )
    return pnn.PNNForCausalLM(config)


OURS = {"ddl": tiny_ddl, "pnn_causal": tiny_causal_pnn}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    """`saved("ddl")`: the folder of a decoder of ours, the same one each time."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("models") / name
            OURS[name](len(tokenizer)).save_pretrained(folders[name])
            tokenizer.save_pretrained(folders[name])
        return folders[name]

    return get


@pytest.fixture(scope="module")
def ddl(saved) -> Path:
    return saved("ddl")


@pytest.fixture(scope="module", params=OURS)
def ours(request, saved) -> Path:
    return saved(request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    set_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.5, eos_token_id=0, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def requests(folder: Path, names: list[str], shots: int) -> list[list[tuple[str, str]]]:
    """Every (context, continuation) that lm-eval would ask a model about."""
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    asked = []
    for task in (manager.load([name])["tasks"][name] for name in names):
        task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(1234)
        task.build_all_requests(rank=0, world_size=1)
        asked.append([instance.args for instance in task.instances])
    return asked


@pytest.mark.parametrize("shots", [0, 1])
def test_local_documents_give_lm_evals_own_prompts(files, hub, tmp_path, shots):
    write_tasks(files, DEFINITIONS, TASKS, shots, tmp_path)
    ours = requests(tmp_path, list(TASKS), shots)
    theirs = requests(hub, [f"same_{name}" for name in TASKS], shots)
    for name, asked, expected in zip(TASKS, ours, theirs, strict=True):
        assert asked == expected, name
        assert len(asked) > len(THINGS)


def test_a_document_is_never_its_own_example(files, tmp_path):
    write_tasks(files, DEFINITIONS, TASKS, 1, tmp_path)
    for name, asked in zip(TASKS, requests(tmp_path, list(TASKS), 1), strict=True):
        for context, continuation in asked:
            example, _, question = context.partition("\n\n")
            own = example.endswith(continuation) if name == "winogrande" else example.startswith(question)
            assert question, name
            assert not own, (name, context)


@pytest.fixture
def through_lm_eval(hub, tmp_path, monkeypatch):
    """lm-eval's own command, in this process (importing it and torch again would take most of the time), with the arguments
    that the protocol names. `import pnn` is all that it has of ours: our models are then known to transformers."""

    def evaluate(model: Path, shots: int, protocol: str) -> dict[str, dict[str, float]]:
        arguments = protocol.partition("--model_args ")[2].rstrip(".").replace("CHECKPOINT", str(model))
        options = {"--model": "hf", "--model_args": arguments, "--include_path": hub, "--output_path": tmp_path}
        options |= {"--tasks": ",".join(f"same_{name}" for name in TASKS), "--num_fewshot": shots, "--device": "cpu"}
        arguments = [str(word) for option in (options | {"--batch_size": 8, "--limit": 6}).items() for word in option]
        monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
        few = partial(lm_eval.tasks.TaskManager, include_defaults=False)  # thousands of tasks that nobody asks for
        monkeypatch.setattr(lm_eval.tasks, "TaskManager", few)
        lm_eval.__main__.cli_evaluate()
        (written,) = tmp_path.rglob("results*.json")
        return json.loads(written.read_text())["results"]

    return evaluate


def compare(result: dict, expected: dict[str, dict[str, float]]) -> None:
    for name, row in result["tasks"].items():
        theirs = expected[f"same_{name}"]
        assert row["documents"] == 6
        for metric, value in row["by_metric"].items():
            assert value["accuracy"] == theirs[f"{metric},none"], name
            assert value["standard_error"] == pytest.approx(theirs[f"{metric}_stderr,none"], abs=1e-12), name
        assert row["accuracy"] == theirs[f"{row['metric']},none"]
    accuracies = [expected[f"same_{name}"][f"{task.metric},none"] for name, task in TASKS.items()]
    assert result["average"]["accuracy"] == pytest.approx(sum(accuracies) / 8)
    assert len(set(accuracies)) > 2  # not all right or all wrong: the comparison can fail


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])  # autocast, as on a GPU
def test_ours_score_the_same_through_pnn_and_lm_evals_command(pnn_command, ours, files, through_lm_eval, monkeypatch, bf16):
    monkeypatch.setattr(harness, "gpu_has_bf16", lambda device: bf16)
    options = ("--task", "all", "--shots", "1", "--task-files", files, "--limit", 6, "--json")
    code, out, err = pnn_command("evaluate", ours, *options)
    assert code == 0, err
    result = json.loads(out)["shots"]["1"]
    mixed = "mixed_precision_dtype=bfloat16," if bf16 else ""
    wanted = f"pretrained=CHECKPOINT,dtype=float32,max_length=256,{mixed}softmax_dtype=float32."
    assert result["protocol"].endswith(f"computes the same with --model_args {wanted}")
    compare(result, through_lm_eval(ours, 1, result["protocol"]))


@pytest.mark.slow
def test_llama_scores_the_same_through_pnn_and_lm_evals_command(pnn_command, llama, files, through_lm_eval):
    options = ("--task", "all", "--shots", "0", "--task-files", files, "--limit", 6, "--json")
    code, out, err = pnn_command("evaluate", llama, *options)
    assert code == 0, err
    result = json.loads(out)["shots"]["0"]
    compare(result, through_lm_eval(llama, 0, result["protocol"]))


@pytest.fixture
def run(ddl, tmp_path) -> Path:
    """A run folder that was evaluated on text and, before another training, on a task."""
    shutil.copytree(ddl, tmp_path / "run" / "checkpoints" / "best")
    (tmp_path / "run" / "config.yaml").write_text("name: run\n")
    (tmp_path / "run" / "evaluation.json").write_text('{"loss": 2.5, "tasks": {"checkpoint": "old", "shots": {"5": {}}}}')
    return tmp_path / "run"


def test_a_run_that_was_not_evaluated_keeps_no_tasks(pnn_command, run, files):
    (run / "evaluation.json").unlink()
    code, _, err = pnn_command("evaluate", run, "--task", "piqa", "--task-files", files)
    assert (code, "has no evaluation.json: let its training finish" in " ".join(err.split())) == (2, True)
    assert not (run / "evaluation.json").exists()


def test_a_run_folder_keeps_the_result_beside_what_it_has(pnn_command, run, files):
    options = ("--task", "piqa,winogrande", "--task-files", files)
    code, out, err = pnn_command("evaluate", run, *options)
    assert code == 0, err
    for words in ("piqa", "winogrande", "acc_norm", "average", "0-shot", "1-shot", "never the one that is asked"):
        assert words in out
    held = json.loads((run / "evaluation.json").read_text())
    assert held["loss"] == 2.5
    assert set(held) == {"loss", "tasks"}
    assert set(held["tasks"]["shots"]) == {"0", "1"}
    for shots, result in held["tasks"]["shots"].items():
        assert set(result["tasks"]) == {"piqa", "winogrande"}
        piqa = result["tasks"]["piqa"]
        assert (piqa["metric"], piqa["documents"], piqa["shots"]) == ("acc_norm", 8, int(shots))
        assert set(piqa["by_metric"]) == {"acc", "acc_norm"}
        assert piqa["accuracy"] == piqa["by_metric"]["acc_norm"]["accuracy"]
        errors = [row["standard_error"] for row in result["tasks"].values()]
        assert result["average"]["standard_error"] == pytest.approx(math.sqrt(sum(e * e for e in errors)) / 2)


def test_whatever_the_batch_padding_has_no_part_in_it(pnn_command, ours, files):
    options = ("--task", "piqa,winogrande", "--task-files", files, "--shots", "0", "--json")
    together, one_by_one = (
        json.loads(pnn_command("evaluate", ours, *options, *more)[1])["shots"]["0"] for more in ((), ("--batch-tokens", 1))
    )
    assert one_by_one["tasks"] == together["tasks"]


def test_a_task_joins_those_that_were_measured_before(pnn_command, run, files):
    def measure(tasks: str, shots: str) -> dict[str, dict]:
        code, out, err = pnn_command("evaluate", run, "--task-files", files, "--task", tasks, "--shots", shots, "--json")
        assert code == 0, err
        result = json.loads(out)["shots"]
        assert {name for one in result.values() for name in one["tasks"]} == set(tasks.split(","))  # what was asked for
        return result

    first, second, third = measure("piqa,sciq", "0,1"), measure("winogrande", "0"), measure("sciq", "2")
    held = json.loads((run / "evaluation.json").read_text())["tasks"]["shots"]
    assert held["0"]["tasks"] == first["0"]["tasks"] | second["0"]["tasks"]
    accuracies = [row["accuracy"] for row in held["0"]["tasks"].values()]
    assert held["0"]["average"]["accuracy"] == pytest.approx(sum(accuracies) / 3)
    assert held["1"] == first["1"]
    assert held["2"] == third["2"]


def test_a_trial_on_a_few_documents_is_not_kept(pnn_command, run, files):
    before = (run / "evaluation.json").read_bytes()
    code, out, err = pnn_command("evaluate", run, "--task", "piqa", "--task-files", files, "--limit", 5)
    assert code == 0, err
    assert "first 5 documents" in out
    assert (run / "evaluation.json").read_bytes() == before


def test_a_single_document_has_no_standard_error_and_the_model_comes_back_as_it_was(ours, files):
    loaded = load_decoder(ours)
    model, tokenizer = loaded.model, loaded.tokenizer
    model.train()
    result = evaluate_tasks(model, tokenizer, ["sciq"], 0, local=files, limit=1, device="cpu")
    assert result["tasks"]["sciq"]["standard_error"] is None
    assert result["average"]["standard_error"] is None
    assert model.training
    assert model.config.use_cache


def test_where_there_is_bf16_logits_are_computed_in_it_and_still_tell_answers_apart(ours, files, monkeypatch):
    """On a CPU, which is told that it has it."""
    loaded = load_decoder(ours)
    model, tokenizer = loaded.model, loaded.tokenizer
    exact = evaluate_tasks(model, tokenizer, list(TASKS), 0, local=files, device="cpu")
    kinds = set()
    model.head.register_forward_hook(lambda module, args, out: kinds.add(out.dtype))
    monkeypatch.setattr(harness, "gpu_has_bf16", lambda device: True)
    rounded = evaluate_tasks(model, tokenizer, list(TASKS), 0, local=files, device="cpu")
    assert kinds == {torch.bfloat16}
    assert rounded["average"]["accuracy"] == pytest.approx(exact["average"]["accuracy"], abs=0.1)
    assert next(model.parameters()).dtype == torch.float32


def test_a_tokenizer_that_lm_evals_command_cannot_read(files):
    """It has no end of text, which lm-eval asks for; [SEP] serves here, and no command is promised the same."""
    tokenizer = of_synthetic_language(256)
    result = evaluate_tasks(tiny_ddl(len(tokenizer)), tokenizer, ["piqa"], 0, local=files, limit=2, device="cpu")
    assert result["tasks"]["piqa"]["documents"] == 2
    assert "--model_args" not in result["protocol"]


def test_the_eight_tasks_as_published(pnn_command, ours, tmp_path):
    archive = DATA / "lm_eval_tasks.tar.xz"
    if not archive.exists():
        pytest.skip(f"no {archive}")
    shutil.unpack_archive(archive, tmp_path)
    files = tmp_path / "lm_eval_tasks"
    counts = {name: len(read_documents(files, name, 1)) for name in TASKS}
    assert list(counts.values()) == [1172, 2376, 10042, 500, 1838, 1000, 1954, 1267]
    options = ("--task", "all", "--task-files", files, "--limit", 4, "--json")
    code, out, err = pnn_command("evaluate", ours, *options)
    assert code == 0, err
    for result in json.loads(out)["shots"].values():
        assert set(result["tasks"]) == set(TASKS)
        for row in result["tasks"].values():
            assert row["documents"] == 4
            assert row["accuracy"] in (0, 0.25, 0.5, 0.75, 1)


def fails(pnn_command, *arguments) -> str:
    code, out, err = pnn_command("evaluate", *arguments)
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("pnn: ")]
    return line


def test_arguments_that_make_no_sense(pnn_command, ddl, files, tmp_path):
    assert 'did you mean "arc_easy"' in fails(pnn_command, ddl, "--task", "piqa,arc_esay", "--task-files", files)
    assert "known: all, arc_challenge" in fails(pnn_command, ddl, "--task", "", "--task-files", files)
    assert "--shots 0,x" in fails(pnn_command, ddl, "--task", "piqa", "--shots", "0,x", "--task-files", files)
    assert "8 documents: too few" in fails(pnn_command, ddl, "--task", "piqa", "--shots", "8", "--task-files", files)
    assert "no such folder" in fails(pnn_command, ddl, "--task", "piqa", "--task-files", tmp_path / "nowhere")
    assert "no piqa.jsonl, which piqa needs" in fails(pnn_command, ddl, "--task", "piqa", "--task-files", tmp_path)
    assert "need --task" in fails(pnn_command, ddl, "--limit", 3)
    assert "leave out --data" in fails(pnn_command, ddl, "--task", "piqa", "--data", "synthetic")
    assert "nothing" in fails(pnn_command, tmp_path / "nothing", "--task", "piqa", "--task-files", files)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds 0 documents"),
        (b'{"query": "a", "choices": ["b", "c"], "gold": 1}\n{"query": \n', "line 2 is not JSON"),
        (b'{"query": "a", "choices": ["b", "c"], "gold": 2}\n', "line 1 is not a document of piqa (gold is 2, but there are 2"),
        (b'{"query": "a", "choices": ["b", "c", "d"], "gold": 1}\n', "line 1 is not a document of piqa"),
        (b'{"goal": "a", "gold": 1}\n', "line 1 is not a document of piqa (no 'choices')"),
        (b"\xff\n", "not valid UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read(pnn_command, ddl, tmp_path, content, says):
    (tmp_path / "piqa.jsonl").write_bytes(content)
    line = fails(pnn_command, ddl, "--task", "piqa", "--task-files", tmp_path)
    assert str(tmp_path / "piqa.jsonl") in line
    assert says in line


def test_models_that_do_not_predict_the_next_token(pnn_command, files, tmp_path):
    shape = {"vocab_size": 80, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    pnn.PNNForMaskedLM(pnn.PNNConfig(**shape)).save_pretrained(tmp_path / "pnn")
    BertForMaskedLM(BertConfig(**shape, num_hidden_layers=1)).save_pretrained(tmp_path / "bert")
    for name, kind in (("pnn", "PNNForMaskedLM"), ("bert", "BertForMaskedLM")):
        of_synthetic_language(64).save_pretrained(tmp_path / name)
        line = fails(pnn_command, tmp_path / name, "--task", "piqa", "--task-files", files)
        assert f"a {kind} fills in masks, it does not continue a text" in line


def test_checkpoints_that_cannot_be_trusted(pnn_command, ddl, files, tmp_path):
    def broken(name: str) -> Path:
        shutil.copytree(ddl, tmp_path / name)
        return tmp_path / name

    options = ("--task", "piqa", "--task-files", files)
    (broken("weights") / "model.safetensors").write_bytes(b"no weights")
    assert "cannot load a causal language model" in fails(pnn_command, tmp_path / "weights", *options)
    config = broken("larger") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    assert "weights are not those of the architecture" in fails(pnn_command, tmp_path / "larger", *options)
    for file in broken("tokenizer").glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in fails(pnn_command, tmp_path / "tokenizer", *options)


def test_results_that_are_damaged_are_left_alone(pnn_command, ddl, files, tmp_path):
    shutil.copytree(ddl, tmp_path / "checkpoints" / "best")
    (tmp_path / "config.yaml").write_text("name: run\n")
    (tmp_path / "evaluation.json").write_text('{"loss": ')
    assert "is not JSON" in fails(pnn_command, tmp_path, "--task", "piqa", "--task-files", files)
    assert (tmp_path / "evaluation.json").read_text() == '{"loss": '


def test_no_hub_and_no_lm_eval(pnn_command, ddl, monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    assert "give them with --task-files" in fails(pnn_command, ddl, "--task", "piqa")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install lm-eval" in fails(pnn_command, ddl, "--task", "piqa")
