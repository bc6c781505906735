"""`pnn finetune` from the command to the files."""

import json
import shutil
import time

import numpy as np
import pytest
import torch
from beside import DATA
from official_files import tsv
from submission_rules import check
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    pipeline,
)

from pnn.finetuning.encoding import Encoded, training_order
from pnn.plasticity import load
from pnn.plasticity.heads import head_map

QUICK = ["--epochs", 1, "--batch-size", 8, "--learning-rates", "1e-3"]


def read(path):
    return json.loads(path.read_text())


def fails(pnn_command, *arguments, says):
    code, _, err = pnn_command("finetune", *arguments)
    lines = [line for line in err.splitlines() if line.startswith("pnn: ")]
    assert code == 2, err
    assert len(lines) == 1
    for text in says:
        assert text in lines[0], lines[0]


def test_all_tasks_of_both_benchmarks(pnn_command, tiny_encoders, task_files, tmp_path):
    run = tmp_path / "run"
    command = ["finetune", tiny_encoders["pnn"], "--task", "all", "--data", task_files, "--output", run, *QUICK]
    code, out, err = pnn_command(*command)
    assert code == 0, err
    summary = read(run / "results.json")
    assert len(summary["tasks"]) == 16
    for name, row in summary["tasks"].items():
        result = read(run / name / "result.json")
        low, high = row["score_interval"]
        assert low <= row["score"] <= high
        assert len(row["score_by_step"]) == 4  # h⁰ … h³
        assert row["score_by_step"][-1] == pytest.approx(row["score"])
        assert set(result["baselines"]) == {"majority", "bag_of_words"}
        assert name in out
        for path in (run / name / "predictions").iterdir():
            check(path, result["data"]["examples"][path.stem])
    assert set(summary["tasks"]["mnli"]["metrics"]) == {"accuracy_matched", "accuracy_mismatched"}
    assert len(list(run.glob("*/predictions/*"))) == 20
    # a second run of the command keeps what is done
    before = {path: path.stat().st_mtime_ns for path in run.glob("*/*")}
    code, _, err = pnn_command(*command)
    assert code == 0
    assert "cola: done already" in err
    assert {path: path.stat().st_mtime_ns for path in run.glob("*/*")} == before


def decided_by_a_word(count: int) -> list[str]:
    """Of several lengths, so that an answer given to another text shows."""
    words = ["hen", "dog", "cat", "mat", "hat", "red"]
    return [
        f"the {'old ' * (i % 4)}{words[i % 6]} was {'good' if i % 5 < 2 else 'bad'} on the {words[i // 6 % 6]}"
        for i in range(count)
    ]


@pytest.mark.parametrize("kind", ["pnn", "bert"])
def test_it_learns_and_the_checkpoint_is_what_was_measured(pnn_command, tiny_encoders, tmp_path, kind):
    """A word decides the label: what a model that learns at all finds, and a wrong label order, loss or head would not."""
    texts = decided_by_a_word(420)
    rows = [[text, str(int("good" in text))] for text in texts]
    tsv(tmp_path / "SST-2" / "train.tsv", ["sentence", "label"], rows[:300])
    tsv(tmp_path / "SST-2" / "dev.tsv", ["sentence", "label"], rows[300:])
    tsv(tmp_path / "SST-2" / "test.tsv", ["index", "sentence"], [[str(i), text] for i, text in enumerate(texts[300:])])
    options = ["--learning-rates", "1e-6,3e-3,1e-7", "--epochs", 4, "--batch-size", 16, "--seeds", 2]
    code, _, err = pnn_command(
        "finetune", tiny_encoders[kind], "--task", "sst2", "--data", tmp_path, "--output", tmp_path / "run", *options
    )
    assert code == 0, err
    run = tmp_path / "run" / "sst2"
    result = read(run / "result.json")
    assert result["learning_rate"] == 3e-3  # of the three, the one that learns
    assert [one["learning_rate"] for one in result["learning_rates_tried"]] == [1e-6, 3e-3, 1e-7]
    assert result["score"] > 0.98
    assert result["score"] == pytest.approx(sum(one["accuracy"] for one in result["seeds"]) / 2)
    assert result["baselines"]["majority"]["accuracy"] == pytest.approx(0.6)
    assert ("by_step" in result) == (kind == "pnn")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4 * 4  # three rates, and one more seed
    # what is on disk predicts what is written
    classify = pipeline("text-classification", model=str(run / "checkpoints" / "best"))
    written = [line.split("\t")[1] for line in (run / "predictions" / "SST-2.tsv").read_text().splitlines()[1:]]
    assert [one["label"] for one in classify(texts[300:])] == written


def test_the_best_epoch_of_the_best_seed_is_kept(pnn_command, tiny_encoders, tmp_path):
    """Dev says the opposite of what is trained, so the last epoch is the worst, and seeds differ in how soon they learn."""
    texts = decided_by_a_word(200)
    for file, chosen, good in (("train.tsv", texts[:140], "1"), ("dev.tsv", texts[140:], "0")):
        rows = [[text, good if "good" in text else str(1 - int(good))] for text in chosen]
        tsv(tmp_path / "SST-2" / file, ["sentence", "label"], rows)
    options = ["--task", "sst2", "--data", tmp_path, "--output", tmp_path / "run", "--seeds", 4]
    options += ["--learning-rates", "3e-3", "--epochs", 4, "--batch-size", 16]
    code, _, err = pnn_command("finetune", tiny_encoders["pnn"], *options)
    assert code == 0, err
    run = tmp_path / "run" / "sst2"
    result = read(run / "result.json")
    epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = {seed: [one["score"] for one in epochs if one["seed"] == seed] for seed in range(4)}
    assert [one["best_epoch"] for one in result["seeds"]] == [1 + of.index(max(of)) for of in scores.values()]
    assert [one["score"] for one in result["seeds"]] == [max(of) for of in scores.values()]
    assert all(of[-1] < max(of) for of in scores.values())
    best = max(scores, key=lambda seed: max(scores[seed]))
    assert max(scores[3]) < max(scores[best])  # so that keeping the last one shows
    assert result["checkpoint"] == {"seed": best, "epoch": result["seeds"][best]["best_epoch"]}
    classify = pipeline("text-classification", model=str(run / "checkpoints" / "best"))
    right = [(one["label"] == "0") == ("good" in text) for one, text in zip(classify(texts[140:]), texts[140:], strict=True)]
    assert sum(right) / len(right) == pytest.approx(max(scores[best]))


def test_the_same_command_gives_the_same_files(pnn_command, tiny_encoders, task_files, tmp_path):
    encoder = tmp_path / "encoder"
    shutil.copytree(tiny_encoders["pnn"], encoder)
    config = read(encoder / "config.json")
    (encoder / "config.json").write_text(json.dumps(config | {"dropout": 0.1}))
    for name in ("one", "two"):
        code, _, err = pnn_command(
            "finetune", encoder, "--task", "mrpc", "--data", task_files, "--output", tmp_path / name, "--seeds", 2, *QUICK
        )
        assert code == 0, err
    for file in ("result.json", "metrics.jsonl", "finetune.json", "predictions/MRPC.tsv", "checkpoints/best/model.safetensors"):
        assert (tmp_path / "one" / "mrpc" / file).read_bytes() == (tmp_path / "two" / "mrpc" / file).read_bytes()


def test_steps_are_a_dial(pnn_command, tiny_encoders, task_files, tmp_path):
    for steps in (1, 5):
        out = tmp_path / str(steps)
        options = ["--task", "cola,copa", "--data", task_files, "--output", out, "--num-steps", steps, *QUICK]
        code, _, err = pnn_command("finetune", tiny_encoders["pnn"], *options)
        assert code == 0, err
        result = read(out / "cola" / "result.json")
        assert len(result["by_step"]["matthews"]) == steps + 1
        assert result["settings"]["num_steps"] == steps
        model = AutoModelForSequenceClassification.from_pretrained(out / "cola" / "checkpoints" / "best")
        assert model.config.num_steps == steps
        choice = AutoModelForMultipleChoice.from_pretrained(out / "copa" / "checkpoints" / "best")
        assert choice.config.num_steps == steps
    says = ("--num-steps 3", "pnn_bert_baseline", "no refinement steps")
    fails(pnn_command, tiny_encoders["bert"], "--task", "cola", "--data", task_files, "--num-steps", 3, says=says)


def test_models_of_others(pnn_command, tiny_tokenizer, task_files, tmp_path):
    """BERT with token types, and a decoder whose tokenizer cannot pad."""
    size = {"vocab_size": len(tiny_tokenizer), "bos_token_id": 0, "eos_token_id": 0}
    bert = BertForMaskedLM(
        BertConfig(**size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, type_vocab_size=2)
    )
    gpt2 = GPT2LMHeadModel(GPT2Config(**size, n_embd=32, n_layer=1, n_head=2, n_positions=48))
    for name, model in (("bert", bert), ("gpt2", gpt2)):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
        options = ["--task", "rte", "--data", task_files, "--output", tmp_path / f"{name}-run", *QUICK]
        code, _, err = pnn_command("finetune", tmp_path / name, *options)
        assert code == 0, err
        result = read(tmp_path / f"{name}-run" / "rte" / "result.json")
        assert result["model"]["model_type"] == name
        assert "by_step" not in result
    from pnn.finetuning.classifiers import has_token_types
    from pnn.finetuning.encoding import collate, encode
    from pnn.finetuning.examples import read_local
    from pnn.finetuning.tasks import TASKS

    assert has_token_types(bert.config)
    assert not has_token_types(gpt2.config)
    examples = read_local(TASKS["rte"], task_files).train
    tokens = [token.ids for token in tiny_tokenizer.backend_tokenizer.encode_batch([one.texts[0] for one in examples])]
    batch = collate(
        encode(TASKS["rte"], examples, tiny_tokenizer, 48, True), torch.arange(3).numpy(), 0, 48, torch.device("cpu")
    )
    assert batch["input_ids"].shape[1] % 8 == 0
    types = batch["token_type_ids"][1][batch["attention_mask"][1] == 1].tolist()
    first = len(tiny_tokenizer(examples[1].texts[0][0])["input_ids"])  # with [CLS] and [SEP]
    assert types == [0] * first + [1] * (len(types) - first)
    assert 1 in types
    assert batch["input_ids"][1][batch["attention_mask"][1] == 1].tolist() == tokens[1]


def test_going_on_from_a_fine_tuned_model(pnn_command, tiny_encoders, task_files, tmp_path):
    """MNLI first, then RTE, as people do: the encoder stays, the head is new, with as many labels as the task has."""
    from pnn.finetuning.classifiers import load_classifier, read_config, read_tokenizer
    from pnn.finetuning.tasks import TASKS

    options = ["--data", task_files, *QUICK]
    run = tmp_path / "mnli"
    assert pnn_command("finetune", tiny_encoders["pnn"], "--task", "mnli", "--output", run, *options)[0] == 0
    code, _, err = pnn_command("finetune", run / "mnli", "--task", "rte,copa", "--output", tmp_path / "then", *options)
    assert code == 0, err
    tuned = run / "mnli" / "checkpoints" / "best"
    config = read_config(tuned, None)
    tokenizer, _ = read_tokenizer(tuned, config)
    held = AutoModelForSequenceClassification.from_pretrained(tuned).state_dict()
    for task in ("rte", "cb"):  # two labels, and three as MNLI has
        one, same, other = (load_classifier(tuned, config, TASKS[task], tokenizer, seed).state_dict() for seed in (0, 0, 1))
        assert one["classifier.weight"].shape == (len(TASKS[task].labels), 32)
        assert torch.equal(one["classifier.weight"], same["classifier.weight"])
        assert not torch.equal(one["classifier.weight"], other["classifier.weight"])
        assert all(torch.equal(value, one[name]) for name, value in held.items() if name.startswith("encoder."))
    assert not torch.equal(one["classifier.weight"], held["classifier.weight"])


@pytest.mark.parametrize("kind", ["pnn", "bert", "hf"])
def test_models_with_heads_removed(pnn_command, tiny_encoders, tiny_tokenizer, task_files, tmp_path, kind):
    encoder = tiny_encoders.get(kind, tmp_path / "hf")
    if kind == "hf":
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        BertForMaskedLM(BertConfig(vocab_size=len(tiny_tokenizer), **size)).save_pretrained(encoder)
        tiny_tokenizer.save_pretrained(encoder)
    smaller, run = tmp_path / "smaller", tmp_path / "run"
    assert pnn_command("plasticity", "prune", encoder, "--by", "magnitude", "--ratio", "0.5", "--output", smaller)[0] == 0
    found = {}
    for task in ("cola", "copa"):
        code, _, err = pnn_command("finetune", smaller, "--task", task, "--data", task_files, "--output", run, *QUICK)
        assert code == 0, err
        found[task] = read(run / task / "result.json")
    whole = tmp_path / "whole"
    assert pnn_command("finetune", encoder, "--task", "cola", "--data", task_files, "--output", whole, *QUICK)[0] == 0
    assert found["cola"]["model"]["parameters"] < read(whole / "cola" / "result.json")["model"]["parameters"]
    if kind == "pnn":
        assert len(found["cola"]["score_by_step"]) == 4  # it is still known as a PNN
    tuned = AutoModelForSequenceClassification.from_pretrained(run / "cola" / "checkpoints" / "best")
    before = load(smaller)
    assert head_map(tuned) == head_map(before)
    assert tuned.config.label2id == {"0": 0, "1": 1}
    assert head_map(AutoModelForMultipleChoice.from_pretrained(run / "copa" / "checkpoints" / "best")) == head_map(before)
    # the weights it began with are the pruned model's: at a rate of almost nothing they stay
    code, _, err = pnn_command(
        "finetune", smaller, "--task", "rte", "--data", task_files, "--output", tmp_path / "still",
        "--epochs", 1, "--learning-rates", "1e-12",
    )  # fmt: skip
    assert code == 0, err
    still = AutoModelForSequenceClassification.from_pretrained(tmp_path / "still" / "rte" / "checkpoints" / "best")
    theirs = before.base_model.state_dict()
    for name, weight in still.base_model.state_dict().items():
        if "pooler" not in name:  # a masked model has none
            torch.testing.assert_close(weight, theirs[name])


def test_long_texts_are_cut_and_counted(tiny_tokenizer):
    from pnn.finetuning.encoding import encode
    from pnn.finetuning.examples import Example
    from pnn.finetuning.tasks import TASKS

    texts = [("the fox", "a hen"), ("the fox " * 40, "a hen sat"), ("the " * 30, "fox " * 30)]
    examples = [Example(i, (pair,), 0) for i, pair in enumerate(texts)]
    encoded = encode(TASKS["rte"], examples, tiny_tokenizer, 48, False)
    assert encoded.truncated == 2
    assert encoded.lengths.tolist() == [7, 48, 48]
    kept = tiny_tokenizer.decode(encoded.ids[1])
    assert kept.endswith("[SEP] a hen sat [SEP]")  # the longer half gives way
    the, fox = (tiny_tokenizer.convert_tokens_to_ids(word) for word in ("the", "fox"))
    assert abs(encoded.ids[2].count(the) - encoded.ids[2].count(fox)) <= 1
    copa = [Example(0, (("the fox", "a"), ("the fox", "hen " * 60)), 0)]
    assert encode(TASKS["copa"], copa, tiny_tokenizer, 48, False).truncated == 1  # an example, not a choice


def test_mistakes(pnn_command, tiny_encoders, task_files, tmp_path):
    run = tmp_path / "run"
    here = ["--data", task_files, "--output", run]
    pnn = tiny_encoders["pnn"]
    fails(pnn_command, pnn, "--task", "colla", *here, says=('no task "colla"', 'did you mean "cola"'))
    fails(pnn_command, pnn, "--task", "cola", "--learning-rates", "fast", *here, says=("--learning-rates fast", "2e-5"))
    fails(pnn_command, pnn, "--task", "cola", "--learning-rates", "0", *here, says=("--learning-rates", "above 0"))
    fails(pnn_command, pnn, "--task", "cola", "--num-steps", 0, *here, says=("--num-steps 0", "at least one"))
    fails(pnn_command, tmp_path / "nowhere", "--task", "cola", *here, says=("nowhere",))
    (tmp_path / "empty").mkdir()
    fails(pnn_command, pnn, "--task", "all", "--data", tmp_path / "empty", "--output", run, says=("no task's training set",))
    bad = tmp_path / "bad"
    shutil.copytree(task_files / "glue" / "CoLA", bad / "CoLA")
    (bad / "CoLA" / "dev.tsv").write_text("gj04\t2\t\tThe fox sat.\n")
    fails(pnn_command, pnn, "--task", "cola", "--data", bad, "--output", run, says=("line 1", "'2'", "CoLA has 0, 1"))
    shutil.copytree(task_files / "glue" / "RTE", bad / "RTE")  # the second task's file is bad: the first is not trained
    fails(pnn_command, pnn, "--task", "rte,cola", "--data", bad, "--output", run, *QUICK, says=("line 1", "CoLA has 0, 1"))
    assert not run.exists()
    assert pnn_command("finetune", pnn, "--task", "cola", *here, *QUICK)[0] == 0
    changed = [*QUICK, "--seeds", 2]
    fails(pnn_command, pnn, "--task", "cola", *here, *changed, says=("holds another fine-tuning", "settings"))
    fails(pnn_command, tiny_encoders["bert"], "--task", "rte", *here, *QUICK, says=("another model (pnn)", "--output"))
    weights = tmp_path / "weights"
    shutil.copytree(pnn, weights)
    config = read(weights / "config.json")
    (weights / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    here = ["--data", task_files, "--output", tmp_path / "other"]
    fails(pnn_command, weights, "--task", "rte", *here, says=("not those of the architecture",))
    from pnn.models import DDLConfig, DDLForCausalLM

    decoder = tmp_path / "decoder"
    DDLForCausalLM(DDLConfig(vocab_size=200, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(
        decoder
    )
    for file in pnn.glob("tokenizer*"):
        shutil.copy(file, decoder)
    fails(pnn_command, decoder, "--task", "copa", *here, says=("cannot load a multiple choice model",))
    assert not (tmp_path / "other").exists()
    assert pnn_command("finetune", decoder, "--task", "rte", *here, *QUICK)[0] == 0  # it has a head for sentences


def test_a_trial_with_a_limit_leaves_no_submission(pnn_command, tiny_encoders, task_files, tmp_path):
    options = ["--task", "rte", "--data", task_files, "--output", tmp_path / "run", "--limit", 5, *QUICK]
    assert pnn_command("finetune", tiny_encoders["pnn"], *options)[0] == 0
    assert read(tmp_path / "run" / "rte" / "result.json")["data"]["examples"] == {"train": 5, "dev": 5}
    assert not (tmp_path / "run" / "rte" / "predictions").exists()
    options = ["--task", "rte", "--data", task_files, "--output", tmp_path / "one", "--limit", 1, *QUICK]
    fails(pnn_command, tiny_encoders["pnn"], *options, says=("the dev set has one example or passage", "raise --limit"))


def test_a_group_leaves_out_what_has_no_training_set(pnn_command, tiny_encoders, task_files, tmp_path):
    shutil.copytree(task_files / "glue" / "RTE", tmp_path / "data" / "RTE")
    shutil.copytree(task_files / "glue" / "CoLA", tmp_path / "data" / "CoLA")
    (tmp_path / "data" / "CoLA" / "train.tsv").unlink()
    command = ["finetune", tiny_encoders["pnn"], "--task", "glue", "--data", tmp_path / "data", "--output", tmp_path / "run"]
    code, _, err = pnn_command(*command, *QUICK)
    assert code == 0
    assert "cola: left out" in err
    assert list(read(tmp_path / "run" / "results.json")["tasks"]) == ["rte"]


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "glue.tar.xz").exists(), reason=f"no glue.tar.xz in {DATA}")
def test_real_cola_from_a_quickstart_sized_encoder(pnn_command, prepared_folder, tmp_path):
    """Pretrained for a moment on CoLA's own sentences, fine-tuned on all of its training set: well under three minutes, and
    better than the majority, whose correlation is 0."""
    shutil.unpack_archive(DATA / "glue.tar.xz", tmp_path)
    lines = (tmp_path / "glue" / "CoLA" / "train.tsv").read_text().splitlines()
    (tmp_path / "text.txt").write_text("\n".join(line.split("\t")[3] for line in lines))
    settings = ["data.vocab_size=4000", "data.validation_sequences=200", "training.max_steps=150", "data.tokenizer=corpus"]
    settings += [f"data.train={tmp_path / 'text.txt'}", f"data.prepared={prepared_folder}", "training.tensorboard=false"]
    settings += ["model.num_steps=2"]
    words = [word for setting in settings for word in ("--set", setting)]
    assert pnn_command("train", "quickstart_pnn", "--output", tmp_path / "pnn", *words)[0] == 0
    start = time.monotonic()
    options = ["--data", tmp_path, "--output", tmp_path / "run", "--learning-rates", "2e-3", "--epochs", 3]
    code, _, err = pnn_command("finetune", tmp_path / "pnn", "--task", "cola", *options)
    assert code == 0, err
    assert time.monotonic() - start < 180
    result = read(tmp_path / "run" / "cola" / "result.json")
    assert result["data"]["examples"] == {"train": 8551, "dev": 1043, "CoLA": 1063}
    assert result["score"] > 0.04
    check(tmp_path / "run" / "cola" / "predictions" / "CoLA.tsv", 1063)


def test_every_epoch_has_all_examples_in_an_order_of_its_own():
    lengths = np.arange(40) % 7 + 1
    encoded = Encoded([[1]] * 40, None, 1, np.zeros(40), lengths, truncated=0, tokens=40, unknown=0)
    epochs = [np.concatenate(training_order(encoded, 4, seed=0, epoch=epoch)).tolist() for epoch in (0, 1)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1]
