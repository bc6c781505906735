"""Bad input: one clear sentence, exit code 2, nothing half-written."""

import json
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pnn.cli.tables import print_sweep


def fails(pnn_command, *arguments, says: tuple[str, ...]) -> str:
    code, _, err = pnn_command(*arguments)
    assert code == 2, err
    lines = [line for line in err.splitlines() if line.startswith("pnn: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    for text in says:
        assert text in lines[0], lines[0]
    return lines[0]


def test_a_missing_corpus(pnn_command, tiny_config, tmp_path):
    config = tiny_config(data={"train": str(tmp_path / "nowhere.txt")})
    fails(pnn_command, "train", config, "--output", tmp_path / "run", says=("nowhere.txt",))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"too short\n" * 50, "empty"),
        (b"word " * 2_100_000, "10,500,000 characters"),
        (b"a line that is long enough to pass\n\xff\xfe is not a letter at all\n", "line 2 is not valid UTF-8"),
    ],
)
def test_a_corpus_that_cannot_be_read(pnn_command, tiny_config, tmp_path, content, says):
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    prepared = tmp_path / "prepared"
    config = tiny_config(data={"train": str(text), "prepared": str(prepared)})
    fails(pnn_command, "train", config, "--output", tmp_path / "run", says=("text.txt", says))
    assert not (tmp_path / "run").exists()
    assert not prepared.exists() or not any(prepared.iterdir())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training": {"learning_rat": 1e-3}}, ('"training.learning_rat"', 'did you mean "learning_rate"')),
        ({"model": {"hiden_size": 64}}, ('"model.hiden_size"', 'did you mean "hidden_size"')),
        ({"trainin": {}}, ('"trainin"', 'did you mean "training"')),
        ({"training": {"batch_size": "many"}}, ("training.batch_size", "a whole number", "'many'")),
        ({"model": {"hidden_size": 3.5}}, ("model.hidden_size", "a whole number", "3.5")),
        ({"model": {"hidden_size": 0}}, ("model.hidden_size", "above zero", "0")),
        ({"model": {"num_attention_heads": -2}}, ("model.num_attention_heads", "above zero", "-2")),
        ({"model": {"num_attention_heads": 5}}, ("num_attention_heads=5", "hidden_size=32")),
        ({"model": {"type": "brt"}}, ("model.type", "'brt'", 'did you mean "bert"')),
        ({"model": {"gate": "open"}}, ("gate='open'", "query_key")),
        ({"model": {"schedule": [0, 2], "num_steps": 2}}, ("schedule=[0, 2]",)),
        ({"data": {"mask_probability": 1.5}}, ("data.mask_probability", "1.5")),
        ({"data": {"masking": "brt"}}, ("data.masking", "bert")),
        ({"data": {"train": "wikitxt-103"}}, ("wikitxt-103", 'did you mean "wikitext-103"')),
        ({"data": {"tokenizer": "no/such/tokenizer.json"}}, ("no/such/tokenizer.json",)),
        ({"data": {"validation_sequences": 4000}}, ("400 sequences", "4,000")),
        ({"model": {"vocab_size": 10}}, ("model.vocab_size", "10", "tokenizer")),
        ({"model": {"max_position_embeddings": 8}}, ("model.max_position_embeddings", "8", "64")),
        ({"training": {"batch_size": 7}}, ("training.batch_size", "7", "16")),
        ({"training": {"precision": "fp16"}}, ("fp16", "GPU")),
        ({"training": {"device": "cuda"}}, ("cuda", "no GPU")),
    ],
)
def test_a_mistake_in_a_config(pnn_command, tiny_config, tmp_path, changes, says):
    if torch.cuda.is_available() and "GPU" in "".join(says):
        pytest.skip("this machine has a GPU")
    fails(pnn_command, "train", tiny_config(**changes), "--output", tmp_path / "run", says=says)
    assert not (tmp_path / "run").exists()


def test_an_unknown_config_name_and_a_bad_setting(pnn_command, tmp_path):
    fails(pnn_command, "train", "paper_reproductoin", says=('did you mean "paper_reproduction"',))
    fails(pnn_command, "train", "quickstart_pnn", "--set", "training.seed", says=("training.seed", "section.key=value"))
    fails(pnn_command, "train", "quickstart_pnn", "--set", "training.sed=1", says=('did you mean "seed"',))


def test_a_run_folder_that_holds_another_run(pnn_command, tiny_config, trained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    fails(pnn_command, "train", tiny_config(), "--output", run, says=("already holds", "--resume"))
    fails(pnn_command, "train", tiny_config(), "--output", tiny_config(), says=("is a file", "--output names a folder"))
    changed = tiny_config(training={"max_steps": 20, "learning_rate": 1e-3})
    fails(pnn_command, "train", changed, "--output", run, "--resume", says=("training.learning_rate", "0.002", "0.001"))
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_resuming_on_text_that_has_changed(pnn_command, tiny_config, tmp_path):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    lines = [f"the {word} fox sat on the {word} mat and slept" for word in ("old", "red", "sly", "fat", "shy", "wet") * 40]
    text.write_text("\n".join(lines))
    config = tiny_config(data={"train": str(text), "vocab_size": 60}, training={"max_steps": 8, "save_every": 4})
    assert pnn_command("train", config, "--output", run)[0] == 0
    text.write_text("\n".join([*lines, "the dry fox sat on the dry mat and slept"]))
    fails(pnn_command, "train", config, "--output", run, "--resume", says=("cannot resume", "text or tokenizer"))


def test_resuming_in_a_folder_that_is_no_run(pnn_command, tiny_config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    fails(pnn_command, "train", tiny_config(), "--output", tmp_path / "run", "--resume", says=("not a run folder",))
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_flags_that_contradict_or_make_no_sense(pnn_command, tiny_config, trained_run, tmp_path):
    config = tiny_config()
    fails(pnn_command, "train", config, "--epochs", 1, "--max-steps", 3, says=("--epochs", "--max-steps"))
    fails(pnn_command, "train", config, "--seed", -1, "--output", tmp_path / "run", says=("training.seed", "-1"))
    fails(pnn_command, "evaluate", trained_run, "--num-steps", -1, says=("--num-steps -1",))
    fails(
        pnn_command, "train", tiny_config(data={"validation_sequences": 1}), "--output", tmp_path / "run", says=("at least 2",)
    )
    assert not (tmp_path / "run").exists()


def damage(folder: Path, kind: str, file: str = "model.safetensors") -> None:
    weights = folder / file
    if kind == "missing":
        weights.unlink()
        return
    raw = bytearray(weights.read_bytes())
    if kind == "flipped byte":
        raw[len(raw) // 2] ^= 1
    elif kind == "cut short":
        raw = raw[: len(raw) // 2]
    weights.write_bytes(raw)


@pytest.mark.parametrize("with_checksums", [True, False])
@pytest.mark.parametrize("kind", ["flipped byte", "cut short", "missing"])
def test_a_damaged_checkpoint(pnn_command, trained_run, tiny_config, tmp_path, kind, with_checksums):
    if kind == "flipped byte" and not with_checksums:
        pytest.skip("without checksums one flipped byte cannot be told from a weight")
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    (run / "evaluation.json").unlink()
    best = (run / "checkpoints" / "best").resolve()
    damage(best, kind)
    if not with_checksums:
        (best / "checksums.json").unlink()
    fails(pnn_command, "evaluate", run, says=(best.name,))
    assert not (run / "evaluation.json").exists()
    last = (run / "checkpoints" / "last").resolve()
    if last == best:
        resumed = tiny_config(name="tiny", training={"max_steps": 20})
        fails(pnn_command, "train", resumed, "--output", run, "--resume", says=("model.safetensors",))


@pytest.mark.parametrize("file", ["optimizer.safetensors", "trainer_state.json"])
@pytest.mark.parametrize("kind", ["flipped byte", "missing"])
def test_only_a_resume_reads_the_state_of_training(pnn_command, trained_run, tiny_config, tmp_path, file, kind):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    for folder in {(run / "checkpoints" / name).resolve() for name in ("best", "last")}:
        damage(folder, kind, file)
    code, _, err = pnn_command("fill", run, "the [MASK] sleeps .")
    assert code == 0, err
    resumed = tiny_config(name="tiny", training={"max_steps": 20})
    fails(pnn_command, "train", resumed, "--output", run, "--resume", says=(file,))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_every_file_that_is_loaded_is_compared_with_its_checksum(pnn_command, trained_run, tmp_path, file):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    damage((run / "checkpoints" / "best").resolve(), "flipped byte", file)
    fails(pnn_command, "fill", run, "the [MASK] sleeps .", says=(file, "does not match its checksum"))


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"{", b"[]", b"7", b"{}", b'{"step": "ten"}', {"step": None}, {"text": []}, {"best_loss": "low"}],
)
def test_a_state_of_training_that_says_nothing(pnn_command, trained_run, tiny_config, tmp_path, content):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    last = (run / "checkpoints" / "last").resolve()
    (last / "checksums.json").unlink()
    state = last / "trainer_state.json"
    if isinstance(content, dict):  # one thing is wrong
        content = json.dumps(json.loads(state.read_text()) | content).encode()
    state.write_bytes(content)
    resumed = tiny_config(name="tiny", training={"max_steps": 20})
    wrong = "no longer what it was trained on" if b'"text": []' in content else "trainer_state.json"
    fails(pnn_command, "train", resumed, "--output", run, "--resume", says=(wrong,))


def test_weights_that_are_not_numbers(pnn_command, trained_run, tiny_config, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    for folder in {(run / "checkpoints" / name).resolve() for name in ("best", "last")}:
        (folder / "checksums.json").unlink()
        weights = load_file(folder / "model.safetensors")
        next(iter(weights.values())).view(-1)[0] = float("nan")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    fails(pnn_command, "evaluate", run, says=("not finite",))
    resumed = tiny_config(name="tiny", training={"max_steps": 20})
    fails(pnn_command, "train", resumed, "--output", run, "--resume", says=("not finite",))


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"hardware": 3, "versions": {}}', '{"hardware": {"gpus": []}, "versions": {}}']
)
def test_an_environment_that_says_too_little(pnn_command, trained_run, tiny_config, tmp_path, monkeypatch, content):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    (run / "environment.json").write_text(content)
    fails(pnn_command, "export", run, "--output", tmp_path / "out", says=("environment.json", "remove it"))
    assert not (tmp_path / "out").exists()
    monkeypatch.delenv("OMP_NUM_THREADS")  # then a run is gone on with in as many threads as it had
    resumed = tiny_config(name="tiny", training={"max_steps": 20})
    fails(pnn_command, "train", resumed, "--output", run, "--resume", says=("environment.json",))


def test_a_checkpoint_of_another_architecture(pnn_command, trained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    best = (run / "checkpoints" / "best").resolve()
    (best / "checksums.json").unlink()
    config = json.loads((best / "config.json").read_text())
    other = {"architectures": ["BertBaselineForMaskedLM"], "model_type": "pnn_bert_baseline", "num_hidden_layers": 2}
    (best / "config.json").write_text(json.dumps(config | other))
    fails(pnn_command, "evaluate", run, says=("weights are not those",))
    (best / "config.json").write_text(json.dumps(config | {"model_type": "gpt17"}))
    fails(pnn_command, "evaluate", run, says=("gpt17",))


def test_a_tokenizer_that_does_not_match(pnn_command, trained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, symlinks=True)
    best = (run / "checkpoints" / "best").resolve()
    (best / "checksums.json").unlink()
    tokenizer = json.loads((best / "tokenizer.json").read_text())
    swapped = {"fox": tokenizer["model"]["vocab"]["otter"], "otter": tokenizer["model"]["vocab"]["fox"]}
    tokenizer["model"]["vocab"] |= swapped
    (best / "tokenizer.json").write_text(json.dumps(tokenizer))
    fails(pnn_command, "evaluate", run, says=("tokenizer", "config names"))
    tokenizer["model"]["vocab"] |= {f"more{i}": 1000 + i for i in range(50)}
    (best / "tokenizer.json").write_text(json.dumps(tokenizer))
    fails(pnn_command, "evaluate", run, says=("tokenizer has", "the model"))


class Trap:
    """Unpickling this writes a file: the proof that somebody's code was run."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_no_pickle_is_ever_loaded(pnn_command, trained_run, tmp_path):
    given = tmp_path / "given"
    shutil.copytree((trained_run / "checkpoints" / "best").resolve(), given)
    (given / "model.safetensors").unlink()
    (given / "checksums.json").unlink()
    sprung = tmp_path / "sprung"
    for name in ("pytorch_model.bin", "optimizer.bin", "random_states_0.pkl"):
        (given / name).write_bytes(pickle.dumps(Trap(sprung)))
    fails(pnn_command, "evaluate", given, "--data", "synthetic", says=("given",))
    assert not sprung.exists()
    pickle.loads((given / "pytorch_model.bin").read_bytes())
    assert sprung.exists()  # the trap does work


@pytest.fixture
def small_disk(tmp_path):
    """A real one of so many kilobytes: a file system in memory, where it may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(kilobytes: int) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
        if subprocess.run(words, capture_output=True).returncode:
            pytest.skip("mounting a file system needs root")
        return disk

    yield mount
    subprocess.run(["umount", str(disk)], capture_output=True)


def test_a_full_disk(pnn_command, tiny_config, small_disk):
    disk = small_disk(400)
    config = tiny_config(training={"save_every": 1, "evaluate_every": 40, "keep_checkpoints": 40})
    fails(pnn_command, "train", config, "--output", disk / "run", says=("no space left", "checkpoint", "--resume"))
    checkpoints = disk / "run" / "checkpoints"
    assert not list(checkpoints.glob(".*"))  # nothing half-written
    from pnn.runs import verify_checkpoint

    verify_checkpoint((checkpoints / "last").resolve())  # the one before is whole


@pytest.mark.parametrize("kilobytes", [8, 44])  # for the tokens, for the tokenizer
def test_a_disk_that_is_full_while_text_is_prepared(pnn_command, tiny_config, small_disk, kilobytes):
    prepared = small_disk(kilobytes) / "prepared"
    config = tiny_config(data={"synthetic_paragraphs": 900, "prepared": str(prepared)})
    fails(pnn_command, "data", "prepare", config, says=("no space left", str(prepared), "make room"))
    assert not list(prepared.iterdir())


@pytest.mark.parametrize("kilobytes", [4, 8, 100, 150])
def test_a_disk_that_is_full_in_the_middle_of_a_cycle(pnn_command, trained_run, small_disk, kilobytes):
    """At its first files, at its records, at its models."""
    disk = small_disk(kilobytes)
    options = ("--data", "synthetic", "--prune", 0.5, "--learn-steps", 2, "--batch-size", 2, "--max-length", 16)
    fails(pnn_command, "plasticity", "cycle", trained_run, "--output", disk / "run", *options, says=("no space left", "run"))
    assert not list(disk.rglob(".*"))


def test_a_place_where_no_folder_can_be_made(pnn_command, trained_run, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    wanted = tmp_path / "file" / "out"
    line = fails(pnn_command, "export", trained_run, "--output", wanted, says=(f"cannot make the folder {wanted}",))
    assert "partial" not in line
    assert "Errno" not in line
    if Path("/proc/self").exists():  # a folder that takes no other
        line = fails(pnn_command, "export", trained_run, "--output", "/proc/x", says=("cannot make the folder /proc/x",))
        assert "partial" not in line


def test_every_command_says_so_where_no_folder_can_be_made(pnn_command, trained_run, tiny_config, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    out = tmp_path / "file" / "out"
    cycle = ("--data", "synthetic", "--prune", 0.5, "--learn-steps", 1, "--batch-size", 2, "--max-length", 16)
    for command in (
        ("train", tiny_config(), "--output", out),
        ("sweep", tiny_config(), "--output", out),
        ("plasticity", "cycle", trained_run, *cycle, "--output", out),
    ):
        line = fails(pnn_command, *command, says=(f"cannot make the folder {out}", "choose a place where folders can be made"))
        assert "Errno" not in line
    fails(pnn_command, "report", trained_run, "--output", out / "page.html", says=(f"cannot make the folder {out}",))


def test_standard_output_that_is_closed(pnn_command, trained_run, monkeypatch):
    """As the shell closes it, with `>&-`."""
    monkeypatch.setattr("sys.stdout", None)
    code, _, err = pnn_command("fill", trained_run, "the [MASK] sleeps .")
    assert (code, err) == (0, "")


def test_no_run_and_no_checkpoint(pnn_command, tmp_path):
    fails(pnn_command, "evaluate", tmp_path / "nothing", says=("nothing",))
    (tmp_path / "empty").mkdir()
    fails(pnn_command, "evaluate", tmp_path / "empty", says=("holds no checkpoint",))
    (tmp_path / "empty" / "weights.bin").write_bytes(b"")
    fails(pnn_command, "evaluate", tmp_path / "empty" / "weights.bin", says=("is a file: give the folder",))
    (tmp_path / "both" / "pnn" / "checkpoints").mkdir(parents=True)
    fails(pnn_command, "evaluate", tmp_path / "both", says=("did you mean", str(tmp_path / "both" / "pnn")))
    fails(pnn_command, "report", tmp_path / "empty", says=("config.yaml",))
    fails(pnn_command, "data", "info", tmp_path / "empty", says=("no prepared text",))


def test_brackets_in_names_are_shown_as_they_are(capsys):
    arm = {"name": "kinds=[head]", "seeds": [0], "parameters": 8, "texts": {}}
    text = {"measure": "loss", "value": 1.0, "interval": [0.9, 1.1], "by_seed": [1.0], "against_first": None}
    print_sweep({"arms": [arm | {"texts": {"[/a]": text}}], "failed": {}, "seeds": 1})
    shown = capsys.readouterr().out
    assert "kinds=[head]" in shown
    assert "[/a]" in shown


def test_a_checkpoint_that_was_copied_as_a_link(pnn_command, trained_run, tmp_path):
    """As `cp -r run/checkpoints/best model` does."""
    (tmp_path / "model").symlink_to((trained_run / "checkpoints" / "best").readlink())
    fails(pnn_command, "evaluate", tmp_path / "model", says=("model links to step-", "cp -rL"))


def test_a_folder_that_may_be_on_the_hub(pnn_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fails(
        pnn_command,
        "fill",
        "models/pnn-base",
        "a [MASK] .",
        says=("no such folder here, and no model came",),
    )
