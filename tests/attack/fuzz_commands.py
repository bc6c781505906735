"""Command lines: every command with odd values for every option, options of others, too many words and too few.

A line that is good by chance would do its work, which for some commands takes minutes: those always get a word that is wrong.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from counting import Tally
from fuzz import draws, inside, judge, leftovers
from fuzz_folders import TEXT, made_once

WORDS = [
    "",
    " ",
    "-",
    "--",
    "-1",
    "0",
    "1",
    "3",
    "0.5",
    "1e-3",
    "nan",
    "inf",
    "1,2",
    "x",
    "a=b",
    "a.b=c",
    "=",
    "é\u202e",
    "a" * 300,
]
WORDS += [
    "../x",
    "/dev/null",
    "/",
    ".",
    "run",
    "text.txt",
    "tiny.yaml",
    "empty",
    "decoder",
    "run/checkpoints/last",
    "--help",
    "\\",
]
WORDS += [
    "[1",
    "{",
    "%s",
    "*",
    "~",
    "$HOME",
    "\x07",
    TEXT,
    "99999999999999999999",
    "--resume",
    "-h",
    "cola",
    "gradient",
    "tail",
]
LONG = {
    "quickstart",
    "shrink",
    "bench",
    "explore",
    "sweep",
    "finetune",
    "evidence",
    "study",
    "cycle",
    "doctor",
}  # minutes where all is well
WRONG = ["--no-such-option", "--seed=x=", "--output"]


def commands() -> list[tuple[list[str], Any]]:
    """Every command with its words and what click knows of it."""
    import typer.main
    from fuzz import call

    from pnn.cli import app

    call("--version")  # registers them
    found = []

    def walk(command: Any, words: list[str]) -> None:
        for name, one in getattr(command, "commands", {}).items():
            walk(one, [*words, name])
        if words and not hasattr(command, "commands"):
            found.append((words, command))

    walk(typer.main.get_command(app), [])
    return sorted(found, key=lambda one: one[0])


def line(words: list[str], command: Any, draw: random.Random) -> list[str]:
    out = list(words)
    needed = [one for one in command.params if one.param_type_name == "argument"]
    options = [name for one in command.params if one.param_type_name == "option" for name in one.opts]
    for argument in needed:
        if draw.random() < 0.9:
            out += [
                draw.choice([*WORDS, "run", "tiny.yaml"]) for _ in range(draw.choice((1, 1, 2)) if argument.nargs != 1 else 1)
            ]
    for _ in range(draw.randrange(4)):
        out.append(draw.choice([*options, *options, *WORDS]))
        if draw.random() < 0.8:
            out.append(draw.choice(WORDS))
    if draw.random() < 0.1:
        draw.shuffle(out)
    if any(word in LONG for word in words):
        out.append(draw.choice(WRONG))
    return out


def command_lines(stage: Path, folder: Path, seed: int, first: int, count: int) -> Tally:
    tally, made = Tally(), made_once(stage)
    known = commands()
    with inside(folder):
        for draw in draws("command lines", seed, first, count):
            _clean(made)
            words = line(*draw.choice(known), draw)
            if words[:1] == ["train"] and "tiny.yaml" not in words:
                words.append("--no-such-option")  # a shipped config, perhaps
            judge(tally, "command line", words)
            if found := leftovers(Path()):
                tally.count("left", f"{found[:3]}: {words}")
    return tally


def _clean(made: Path) -> None:
    """The same folder for every case."""
    kept = {"run", "text.txt", "tiny.yaml", "decoder", "empty", "prepared"}
    for path in Path().iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name in ("text.txt", "tiny.yaml", "decoder", "prepared"):
        if not Path(name).exists():
            Path(name).symlink_to(made / name)
    if not Path("run").exists():
        shutil.copytree(made / "run", "run", symlinks=True)
    Path("empty").mkdir(exist_ok=True)
