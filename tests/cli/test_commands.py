"""The commands as people type them, and the promises of the README."""

import importlib
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pnn.evaluation.reading import smaller_batches

ROOT = Path(__file__).parents[2]
BOX = ROOT / "models" / "pnn-base"


def test_a_command_that_is_suggested_can_be_pasted(pnn_command, tiny_config, tmp_path):
    run = tmp_path / "my first run; it's mine"
    model = {"type": "ddl", "num_hidden_layers": 1}
    for name, changes, next_words in (
        ("fill", {}, ["pnn", "fill", str(run / "fill")]),
        ("generate", {"model": model}, ["pnn", "generate", str(run / "generate")]),
    ):
        folder = run / name
        code, out, err = pnn_command("train", tiny_config(**changes), "--output", folder, "--max-steps", 1)
        assert code == 0, err
        first, second = out.splitlines()[-1].partition(". Next: ")[2].split(", or ")
        assert shlex.split(first) == ["pnn", "report", str(folder)]
        *words, text = shlex.split(second)
        assert words == next_words
        assert text[0].isalpha() if name == "generate" else text == "… [MASK] …"
        (folder / "evaluation.json").unlink()
        code, _, err = pnn_command("report", folder)
        assert code == 2
        assert shlex.split(err.split("`")[1]) == ["pnn", "evaluate", str(folder)]


def test_a_command_for_smaller_batches_names_all_models():
    said = smaller_batches("compare", "my run", Path("runs/b"), tokens=64)
    assert shlex.split(said.partition(": ")[2])[:6] == ["pnn", "compare", "my run", "runs/b", "--batch-tokens", "32"]


def test_train_then_report_then_look_at_the_data(pnn_command, undrawn, tiny_config, tmp_path):
    run = tmp_path / "run"
    code, out, err = pnn_command("train", tiny_config(), "--output", run, "--max-steps", 6, "--num-steps", 2, "--seed", 3)
    assert code == 0, err
    assert "accuracy after each refinement step" in out
    assert out.splitlines()[-1] == f'The run is in {run}. Next: pnn report {run}, or pnn fill {run} "… [MASK] …"'
    assert "num_steps: 2" in (run / "config.yaml").read_text()
    code, out, err = pnn_command("report", run)
    assert code == 0, err
    assert Path(out.strip()) == run / "report.html"
    assert "<html" in (run / "report.html").read_text()
    code, out, err = pnn_command("data", "prepare", tiny_config())
    assert code == 0, err
    folder = out.splitlines()[0].rpartition(" ")[2]
    code, out, err = pnn_command("data", "info", folder)
    assert code == 0, err
    assert "400 sequences" in out
    assert "checksums match" in out


def test_resuming_nothing_says_so_and_starts(pnn_command, tiny_config, tmp_path):
    words = ("train", tiny_config(), "--output", tmp_path / "run", "--max-steps", 3)
    code, _, err = pnn_command(*words, "--resume")
    assert code == 0, err
    assert f"nothing to resume in {tmp_path / 'run'}: starting from the beginning" in err
    code, _, err = pnn_command(*words, "--resume")  # finished: there is a checkpoint
    assert code == 0, err
    assert "nothing to resume" not in err


def test_very_many_steps_are_noted_before_training(pnn_command, tiny_config, tmp_path):
    code, _, err = pnn_command(
        "train", tiny_config(data={"train": "no.txt"}), "--num-steps", 1000, "--output", tmp_path / "run"
    )
    assert code == 2
    assert "model.num_steps is 1,000: every update computes 1,000 steps" in err


def little_text(tmp_path: Path) -> list[str]:
    prepared = f"data.prepared={tmp_path / 'prepared'}"
    settings = ["data.synthetic_paragraphs=500", "data.validation_sequences=60", prepared]
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.slow
def test_quickstart_makes_its_runs_and_the_page_and_keeps_what_is_done(pnn_command, forked_jobs, undrawn, tmp_path):
    """The real command at its real configs, cut to a few updates on little text."""
    folder = tmp_path / "quickstart"
    command = ["quickstart", "--output", folder, *little_text(tmp_path), "--set", "training.max_steps=4"]
    code, out, err = pnn_command(*command)
    assert code == 0, err
    assert "report.html" in out
    page = (folder / "report.html").read_text()
    for model in ("one refiner applied 4 times", "one rewrite refiner applied 4 times", "4 distinct layers"):
        assert model in page
    finished = (folder / "pnn" / "evaluation.json").stat().st_mtime_ns
    shutil.rmtree(folder / "rewrite")  # as a quickstart of an earlier version left it
    assert pnn_command(*command)[0] == 0
    assert (folder / "pnn" / "evaluation.json").stat().st_mtime_ns == finished  # not trained again
    assert (folder / "rewrite" / "evaluation.json").exists()
    code, _, err = pnn_command(*command, "--set", "training.max_steps=5")
    assert code == 2  # the finished runs are not what is asked for now
    assert "training.max_steps was 4 and is now 5" in err


@pytest.mark.slow
def test_quickstart_names_the_model_whose_config_is_wrong(pnn_command, forked_jobs, tmp_path):
    """The second process fails at once, while the first still trains."""
    words = (*little_text(tmp_path), "--set", "model.num_steps=3")
    code, _, err = pnn_command("quickstart", "--output", tmp_path / "quickstart", *words)
    assert code == 2
    assert "training bert failed" in err
    assert "model.num_steps" in err


@pytest.mark.slow
def test_quickstart_leaves_a_folder_with_other_files_alone(pnn_command, tmp_path):
    (tmp_path / "quickstart" / "pnn").mkdir(parents=True)
    (tmp_path / "quickstart" / "pnn" / "somebody's notes.txt").write_text("not a run")
    code, _, err = pnn_command("quickstart", "--output", tmp_path / "quickstart", *little_text(tmp_path))
    assert code == 2
    assert "already holds" in err
    assert [p.name for p in (tmp_path / "quickstart").iterdir()] == ["pnn"]  # nothing was started
    assert [p.name for p in (tmp_path / "quickstart" / "pnn").iterdir()] == ["somebody's notes.txt"]


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.S))
    table = re.findall(r"`(pnn [a-z][^`]*)`", text)
    lines = [line.partition("#")[0].strip() for line in blocks.splitlines()]
    return [line for line in [*lines, *table] if re.match(r"(accelerate launch .*)?pnn ", line)]


def test_every_command_of_the_readmes_blocks_is_seen():
    """Also those that another program starts, whatever its options; and no block hides in another language than bash."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.S | re.M)
    hidden = [name for name, block in blocks if name != "bash" and re.search(r"^(accelerate launch|pnn) ", block, re.M)]
    assert not hidden
    seen = readme_commands()
    for name, block in blocks:
        for line in block.splitlines() if name == "bash" else []:
            if re.search(r"^accelerate launch|\bpnn [a-z]+ ", line.partition("#")[0]):
                assert line.partition("#")[0].strip() in seen
    assert any("--config_file" in line for line in seen)


@pytest.mark.parametrize("command", dict.fromkeys(readme_commands()))
def test_the_readmes_commands_exist_with_these_options_and_configs(command):
    """Each `pnn …` line of the README goes through the real parser, and a config with its settings through the real loader."""
    from typer.main import get_command

    import pnn.cli
    from pnn.cli import app
    from pnn.config import load_config

    for module in pkgutil.iter_modules(pnn.cli.__path__):
        importlib.import_module(f"pnn.cli.{module.name}")  # each registers its commands
    launcher, _, ours = command.rpartition("pnn ") if command.startswith("accelerate") else ("", "", command[4:])
    for file in re.findall(r"--config_file (\S+)", launcher):
        assert (ROOT / file).exists()
    words = shlex.split(ours)
    if "COMMAND" in words:
        return
    found = get_command(app)
    while hasattr(found, "commands"):  # a group's own commands too
        name, *words = words
        found = found.commands[name]
    parsed = found.make_context(name, words)
    if name == "train":
        load_config(parsed.params["config"], parsed.params["settings"])


@pytest.mark.skipif(not BOX.exists(), reason="models/pnn-base is not in this checkout")
def test_the_readmes_python_runs(tmp_path):
    """In order, on the model in the box and on a tiny one in place of the tiny decoder's run."""
    import pnn

    size = {"vocab_size": 80, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    pnn.DDLForCausalLM(pnn.DDLConfig(**size)).save_pretrained(tmp_path / "decoder")
    places = {
        "models/pnn-base": BOX,
        "runs/ddl_tiny/checkpoints/best": tmp_path / "decoder",
        "runs/smaller": tmp_path / "smaller",
    }
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S))
    for written, here in places.items():
        assert written in code
        code = code.replace(written, str(here))
    names: dict = {}
    exec(code, names)
    assert len(names["out"].states) == 5
    assert names["rewriting"].num_steps == 8
    assert type(names["model"]) is pnn.DDLForCausalLM
    assert len(pnn.plasticity.heads(names["smaller"])) == 3


def test_the_readme_is_read_at_once():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_help_lists_commands_as_a_newcomer_meets_them(pnn_command):
    from pnn.cli import ORDER

    code, out, _ = pnn_command("--help")
    assert code == 0
    assert tuple(re.findall(r"^  (\w+)  ", out, re.MULTILINE)) == ORDER
    assert ORDER[:2] == ("quickstart", "train")


def test_an_example_stands_in_a_line_of_its_own(pnn_command):
    for command in ("train", "bench"):
        _, out, _ = pnn_command(command, "--help")
        assert re.search(r"\n\n  (Several GPUs|How the cost grows)", out), out


@pytest.mark.skipif(sys.platform != "linux", reason="the OpenMP of GCC")
@pytest.mark.parametrize("own", [None, "77"])
def test_threads_that_wait_leave_the_core_to_others(own):
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | ({} if own is None else {"GOMP_SPINCOUNT": own})
    # up to torch, which is all that reads it: the rest takes five seconds
    code = "import sys\nsys.modules['transformers'] = None\ntry:\n    import pnn\nexcept ImportError:\n    import torch"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{own or 10000}'" in done.stderr


@pytest.mark.slow
def test_every_module_imports_without_optional_packages():
    """Nothing optional is imported at import time: hub access, parquet and the test tools are blocked here."""
    code = """
import sys, pkgutil, importlib
optional = ("datasets", "pyarrow", "pytest", "hypothesis", "lm_eval", "sklearn", "wandb", "triton", "onnx", "onnxruntime")
for name in (*optional, "gradio", "fastapi", "uvicorn"):
    sys.modules[name] = None
import pnn
for module in pkgutil.walk_packages(pnn.__path__, "pnn."):
    if not module.name.endswith("__main__") and not module.name.startswith("pnn.kernels."):  # those are Triton
        importlib.import_module(module.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
