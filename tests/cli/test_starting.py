"""What the command line says of itself, at once: help, versions, typos, renamed flags, completion, configs, the doctor."""

import os
import re
import signal
import subprocess
import sys
from functools import partial

import pytest
from typer.main import get_command

HEAVY = ("torch", "transformers", "numpy", "accelerate", "tokenizers", "matplotlib")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--help"], 0, "quickstart"),
        (["--version"], 0, "pnn 0."),
        (["train", "--help"], 0, "Example: pnn train"),
        (["plasticity", "cycle", "--help"], 0, "Example: pnn plasticity cycle"),
        (["trian"], 2, "Did you mean 'train'?"),
        (["train", "--bach-size", "3"], 2, "--batch-size"),
        (["train", "quikstart_pnn"], 2, 'did you mean "quickstart_pnn"'),
        (["train", "quickstart_pnn", "--set", "training.sed=1"], 2, 'did you mean "seed"'),
        (["bench", "quickstart_pn"], 2, 'did you mean "quickstart_pnn"'),
        (["data", "prepare", "quickstart_pnn", "--set", "data.filtr=none"], 2, 'did you mean "filter"'),
    ],
)
def test_help_and_typos_load_nothing_heavy(words, code, says):
    """In a real process, which tells every module that it imports."""
    command = [sys.executable, "-X", "importtime", "-m", "pnn", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr[-2000:]
    assert says in done.stdout + done.stderr
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "pnn.cli" in imported
    assert not imported.intersection(HEAVY)


@pytest.mark.parametrize("module", ["typer", "yaml"])
def test_ctrl_c_while_python_still_imports(tmp_path, module):
    """Pressed by a module of that name, found before the real one."""
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pnn", "configs"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where tests run in the background, deaf to it
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, preexec_fn=heard)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_script_that_imports_pnn_gets_its_names_and_the_auto_classes(tmp_path):
    """Also one whose arguments look like the command's. The Auto classes know reorganised models of others too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from pnn import plasticity

    size = {"vocab_size": 50, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    llama = LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=3))
    plasticity.save(plasticity.prune(llama, [(0, 1)]), tmp_path / "smaller")
    script = tmp_path / "mine.py"
    script.write_text(
        "import pnn, sys, transformers\n"
        "print(pnn.PNNConfig.model_type, transformers.AutoConfig.for_model('ddl').model_type)\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[-1])\n"
        "print(*[len(row) for row in model.config.head_map])"
    )
    command = [sys.executable, script, "-m", "pnn", tmp_path / "smaller"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["pnn", "ddl", "2", "3"], done.stderr


def commands(pnn_command) -> dict[tuple[str, ...], object]:
    """Every command by its words, groups' own ones too."""
    from pnn.cli import app

    pnn_command("--version")  # which registers them
    found, open_ = {}, [((), get_command(app))]
    while open_:
        words, command = open_.pop()
        if hasattr(command, "commands"):
            open_ += [((*words, name), one) for name, one in command.commands.items()]
        else:
            found[words] = command
    return found


def test_every_command_has_an_example_in_its_help(pnn_command):
    known = commands(pnn_command)
    assert ("plasticity", "study") in known
    for words, command in known.items():
        assert f"Example: pnn {' '.join(words)}" in command.help, words


def flags(command) -> set[str]:
    return {flag for parameter in command.params for flag in parameter.opts}


def test_renamed_flags_are_gone_and_their_new_names_there(pnn_command):
    from pnn.cli import RENAMED

    for first, names in RENAMED.items():
        concerned = [flags(command) for words, command in commands(pnn_command).items() if words[0] == first]
        assert concerned
        for old, new in names.items():
            assert not any(old in one for one in concerned), old
            assert any(new in one for one in concerned), new


def test_one_thing_has_one_name_everywhere(pnn_command):
    for words, command in commands(pnn_command).items():
        assert not flags(command) & {"--out", "--steps", "--run", "--length", "--batch-rows", "--tasks"}, words


def test_a_renamed_flag_works_with_a_note(pnn_command, trained_run, tmp_path):
    for form in (("--out", tmp_path / "a.json"), (f"--out={tmp_path / 'b.json'}",)):
        code, _, err = pnn_command("compare", trained_run, *form)
        assert code == 2
        assert "pnn: note: --out is called --output now" in err
        assert "at least two runs" in err  # the flag was understood
    _, _, err = pnn_command("fill", trained_run, "--", "--out [MASK]")
    assert "is called" not in err


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("pnn tr", "train"),
        ("pnn train paper_", "paper_reproduction"),
        ("pnn bench quickstart_pnn bert", "bert_baseline"),
        ("pnn train --num-st", "--num-steps"),
    ],
)
def test_completion_knows_commands_options_and_configs(typed, expected, tmp_path):
    (tmp_path / "pnn").write_text("from pnn.cli import main\nmain()\n")  # as pip writes it
    asked = {"_PNN_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run([sys.executable, tmp_path / "pnn"], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.split() == [expected], done.stderr


def test_configs_are_listed_with_their_parameters(pnn_command):
    from pnn.config import shipped_configs

    code, out, _ = pnn_command("configs")
    assert code == 0
    rows = [re.fullmatch(r"(\w+) +([\d,]+)  (.+)", line) for line in out.splitlines()]
    assert [row[1] for row in rows] == list(shipped_configs())
    told = {row[1]: row[2] for row in rows}
    assert (told["pnn_wikitext103"], told["bert_baseline"]) == ("53,704,251", "132,066,618")
    for path, row in zip(shipped_configs().values(), rows, strict=True):
        written = re.search(r"([\d,]{6,}) parameters", path.read_text())
        assert written is None or written[1] == row[2]
        assert "parameters" not in row[3]


def test_the_doctor_is_content_here_and_names_what_is_broken(pnn_command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = pnn_command("doctor")
    assert code == 0, out + err
    for part in ("Python", "torch 2.", "cores", "Training computes in", "quickstart_rewrite", "GB free", "Prepared text: none"):
        assert part in out
    monkeypatch.setattr(
        "pnn.doctor.importlib.metadata.requires", lambda _: ["torch>=99", "no-such-package>=1", "x; extra == 'y'"]
    )
    code, out, _ = pnn_command("doctor")
    assert code == 1
    assert re.search(r"^BROKEN: torch is 2\S+, which does not fit: pip install 'torch>=99' mends it", out, re.MULTILINE)
    assert "BROKEN: no-such-package is missing: pip install 'no-such-package>=1'" in out


def test_the_doctor_names_whose_pnn_this_is(pnn_command, monkeypatch, tmp_path):
    """Another project has the name on PyPI: installed beside ours it would overwrite our files."""
    folder = tmp_path / "pnn-0.0.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pnn\nVersion: 0.0.5\n")
    (folder / "top_level.txt").write_text("pnn\n")
    monkeypatch.chdir(tmp_path)
    assert "is the package of plastic-neural-networks" in pnn_command("doctor")[1]
    monkeypatch.syspath_prepend(tmp_path)
    code, out, _ = pnn_command("doctor")
    assert code == 1
    assert "BROKEN: The distribution pnn also has a package `pnn`: pip uninstall pnn" in " ".join(out.split())
