"""Folders that were damaged: prepared text, checkpoints, run folders, and models from elsewhere.

A flipped bit in a file that has a checksum must be refused. Where there is none, anything but a sentence or a result is wrong.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml
from counting import Tally
from damage import flip, spoil_file
from fuzz import draws, inside, judge, leftovers
from stage import TINY, fresh

TEXT = "the monk is [MASK] in avon ."


def made_once(stage: Path) -> Path:
    """A finished run and its prepared text, an exported model and a reorganised one, beside the stage's inputs."""
    made = stage.parent / "made"
    if not made.exists():
        partial = fresh(stage, stage.parent / f"made-{os.getpid():010}")
        with inside(partial):
            Path("tiny.yaml").unlink()
            Path("tiny.yaml").write_text(yaml.safe_dump({**TINY, "name": "tiny"}))
            for words in (
                ("train", "tiny.yaml", "--output", "run"),
                ("export", "run", "--output", "exported"),
                ("plasticity", "prune", "decoder", "--output", "pruned", "--by", "magnitude"),
            ):
                assert judge(Tally(), "made", words) == "accepted", words
        try:
            partial.rename(made)
        except OSError:  # another process has made it
            shutil.rmtree(partial)
    return made


def _copied(made: Path, *names: str) -> None:
    for name in names:
        if Path(name).exists():
            shutil.rmtree(name)
        shutil.copytree(made / name, name, symlinks=True)


def _files(folder: Path, leave_out: tuple[str, ...] = ()) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in leave_out and path.stat().st_size)


Attack = Callable[[random.Random, Tally], None]


def _each(name: str, attack: Attack, made: Path, folder: Path, seed: int, first: int, count: int) -> Tally:
    tally = Tally()
    with inside(folder):
        for one in ("text.txt", "tiny.yaml", "decoder", "encoder"):
            if not Path(one).exists():
                Path(one).symlink_to(made / one)
        for draw in draws(name, seed, first, count):
            attack(draw, tally)
            if found := leftovers(Path()):
                tally.count("left", f"{name}: {found[:3]}")
    return tally


# With checksums -------------------------------------------------------------------------------------------------------


def shards(stage: Path, folder: Path, seed: int, first: int, count: int) -> Tally:
    """`pnn data info` of prepared text."""
    made = made_once(stage)

    def attack(draw: random.Random, tally: Tally) -> None:
        _copied(made, "prepared")
        (inner,) = Path("prepared").iterdir()
        checked = draw.random() < 0.5
        if checked:
            file = draw.choice(sorted(inner.glob("*.bin")))
            file.write_bytes(flip(file.read_bytes(), draw))
            how = f"{file.name} flipped"
        else:
            how = spoil_file(draw.choice(_files(inner)), draw)
        if judge(tally, how, ["data", "info", inner]) == "accepted" and checked:
            tally.count("differences", f"{how} was not noticed")

    return _each("shards", attack, made, folder, seed, first, count)


def checkpoints(stage: Path, folder: Path, seed: int, first: int, count: int) -> Tally:
    """One flipped bit in any file of a checkpoint that has checksums: it is resumed from, filled in with, or exported."""
    made = made_once(stage)
    commands: list[list[object]] = [
        ["train", "tiny.yaml", "--output", "run", "--resume"],
        ["fill", "run/checkpoints/last", TEXT],
        ["generate", "pruned", "the monk"],
        ["evaluate", "run"],
        ["export", "run", "--output", "again"],
    ]

    def attack(draw: random.Random, tally: Tally) -> None:
        _copied(made, "run", "pruned")
        words = draw.choice(commands)
        resumes = "--resume" in words
        best = Path("run/checkpoints/best").resolve() if words[0] in ("evaluate", "export") else None
        target = Path("pruned") if words[0] == "generate" else best or Path("run/checkpoints/last").resolve()
        state = () if resumes else ("optimizer.safetensors", "trainer_state.json")  # which only --resume reads
        file = draw.choice(_files(target, leave_out=state))
        raw = flip(file.read_bytes(), draw)
        same = file.name == "checksums.json" and _means(raw, state) == _means(file.read_bytes(), state)
        file.write_bytes(raw)
        if judge(tally, f"{file.name} flipped", words) == "accepted" and not same:
            tally.count("differences", f"{file} flipped was not noticed by {words[0]}")
        shutil.rmtree("again", ignore_errors=True)

    return _each("checkpoints", attack, made, folder, seed, first, count)


def _means(listing: bytes, state: tuple[str, ...]) -> object:
    """What a list of checksums says about files that are read; a letter of another case in JSON's white space says nothing."""
    try:
        return {name: digest for name, digest in json.loads(listing).items() if name not in state}
    except (ValueError, AttributeError):
        return None


# Without --------------------------------------------------------------------------------------------------------------


def run_folders(stage: Path, folder: Path, seed: int, first: int, count: int) -> Tally:
    """What a run writes about itself, damaged, and the commands that read it."""
    made = made_once(stage)
    names = [
        "config.yaml",
        "environment.json",
        "tokens.json",
        "metrics.jsonl",
        "evaluation.json",
        "evaluation_by_sequence.json",
    ]
    commands: list[list[object]] = [
        ["report", "run", "--output", "report.html"],
        ["compare", "run", "other", "--output", "compared"],
        ["evaluate", "run"],
        ["export", "run", "--output", "again"],
        ["train", "tiny.yaml", "--output", "run", "--resume"],
        ["fill", "run", TEXT],
    ]

    def attack(draw: random.Random, tally: Tally) -> None:
        _copied(made, "run")
        if not Path("other").exists():
            shutil.copytree(made / "run", "other", symlinks=True)
        how = spoil_file(Path("run") / draw.choice([*names, "refining.json"]), draw)
        judge(tally, how, draw.choice(commands))
        for name in ("again", "compared"):
            shutil.rmtree(name, ignore_errors=True)

    return _each("run folders", attack, made, folder, seed, first, count)


def model_folders(stage: Path, folder: Path, seed: int, first: int, count: int) -> Tally:
    """Models without checksums: exported, reorganised, a decoder of transformers, a checkpoint with its training's state."""
    made = made_once(stage)
    uses: dict[str, list[list[object]]] = {
        "exported": [["fill", "exported", TEXT], ["evaluate", "exported", "--data", "text.txt"]],
        "pruned": [
            ["generate", "pruned", "the monk", "--max-new-tokens", 3],
            ["plasticity", "score", "pruned", "--by", "magnitude"],
        ],
        "run": [["train", "tiny.yaml", "--output", "run", "--resume"], ["fill", "run", TEXT]],
    }

    def attack(draw: random.Random, tally: Tally) -> None:
        name = draw.choice(sorted(uses))
        _copied(made, name)
        target = Path("run/checkpoints/last").resolve() if name == "run" else Path(name)
        (target / "checksums.json").unlink(missing_ok=True)
        endings = (".json", ".safetensors")
        how = spoil_file(draw.choice([path for path in _files(target) if path.suffix in endings]), draw)
        judge(tally, f"{name}: {how}", draw.choice(uses[name]))

    return _each("model folders", attack, made, folder, seed, first, count)
