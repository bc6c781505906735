"""All attacks in one record: `python tests/attack/run.py`, which `make attack` calls. One line for each attack, and a JSON with
the counts: the same seed gives the same ones. A record can be made in parts (`--only`), which add to what the file holds."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import full_disk
import fuzz_commands
import fuzz_configs
import fuzz_folders
import pages
import stage
from counting import WRONG, Tally, line, total
from kills import Storm
from processes import adopt_orphans
from together import together

HERE = Path(__file__).resolve().parent
RECORD = HERE.parents[1] / "results" / "attack" / "result.json"
# (fuzzer, cases in the whole record, cases in the slice, cases of one process)
FUZZERS: dict[str, tuple[Callable[..., Tally], int, int, int]] = {
    "configs": (fuzz_configs.configs, 3000, 40, 250),
    "corpora": (fuzz_configs.corpora, 1500, 40, 500),
    "shards": (fuzz_folders.shards, 1500, 60, 500),
    "checkpoints": (fuzz_folders.checkpoints, 1500, 60, 500),
    "run folders": (fuzz_folders.run_folders, 500, 15, 125),
    "model folders": (fuzz_folders.model_folders, 500, 15, 125),
    "command lines": (fuzz_commands.command_lines, 2000, 60, 500),
    "pages": (pages.pages, 400, 15, 200),
}
# command → kills in the record and in the slice, sizes of a full disk, two at one folder
STORMS = {
    "train": (300, 6, (60, 4), (20, 1)),
    "prepare": (250, 6, (40, 4), (20, 1)),
    "cycle": (100, 0, (20, 0), (6, 0)),
    "study": (120, 0, (10, 0), (4, 0)),
    "finetune": (200, 3, (30, 0), (8, 0)),
    "sweep": (60, 0, (10, 0), (0, 0)),
    "calibrate": (60, 3, (10, 0), (4, 0)),
    "shrink": (60, 0, (10, 0), (4, 0)),
    "quickstart": (24, 0, (6, 0), (0, 0)),
}
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
QUIET |= {"PYTHONDONTWRITEBYTECODE": "1"}  # a cache that is written is a write, and not always there
CHAINS = 60  # kills of one process
Part = tuple[str, Callable[[Path, Path], Tally]]


def parts(seed: int, whole: bool) -> list[Part]:
    """What can be done by processes side by side, with the names of the lines that they count for."""
    found: list[Part] = []
    for name, (attack, most, few, at_once) in FUZZERS.items():
        count = most if whole else few
        for first in range(0, count, at_once):
            found.append((name, _fuzzer(attack, seed, first, min(at_once, count - first))))
    for attacked in stage.COMMANDS:
        most, few, sizes, times = STORMS[attacked.name]
        kills, disks, pairs = (most, sizes[0], times[0]) if whole else (few, sizes[1], times[1])
        step = max(1, -(-kills // CHAINS))
        for first in range(step if kills else 0):
            found.append((f"kill {attacked.name}", _storm(attacked, seed, first, step, -(-kills // step))))
        if disks:
            found.append((f"disk {attacked.name}", _disk(attacked, disks)))
        if pairs:
            found.append((f"two {attacked.name}", _two(attacked, seed, pairs)))
    return found


def _fuzzer(attack: Callable[..., Tally], seed: int, first: int, count: int) -> Callable[[Path, Path], Tally]:
    return lambda place, folder: attack(place, folder, seed, first, count)


def _storm(attacked: Any, seed: int, first: int, step: int, kills: int) -> Callable[[Path, Path], Tally]:
    return lambda place, folder: Storm(attacked, place, folder, seed).storm(first, step, kills)


def _disk(attacked: Any, count: int) -> Callable[[Path, Path], Tally]:
    def attack(place: Path, folder: Path) -> Tally:
        if not full_disk.allowed(folder / "may"):
            return Tally(wrong=["left out: this machine lets nobody mount a small disk"])
        return full_disk.FullDisk(attacked, place, folder).attack(count)

    return attack


def _two(attacked: Any, seed: int, count: int) -> Callable[[Path, Path], Tally]:
    return lambda place, folder: together(attacked, place, folder, seed, count)


def run(todo: list[Part], jobs: int, root: Path, done: Callable[[str, Tally], None]) -> dict[str, Tally]:
    """Every part in a process of its own, so many at a time. One that ends without a count has crashed: a traceback. `done` is
    told of each attack that is whole."""
    place, found = root / "stage", {name: Tally() for name, _ in todo}
    left = {name: sum(name == one for one, _ in todo) for name in found}
    waiting = [(number, name, attack) for number, (name, attack) in enumerate(todo)]
    running: dict[int, tuple[str, Path]] = {}
    while waiting or running:
        if waiting and len(running) < jobs:
            number, name, attack = waiting.pop(0)
            folder = root / f"part-{number}"
            folder.mkdir()
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _part(attack, place, folder)
            running[pid] = name, folder
            continue
        pid, _ = os.waitpid(-1, 0)
        if pid not in running:  # an orphan of a killed command
            continue
        name, folder = running.pop(pid)
        counted = folder / "tally.json"
        if counted.exists():
            found[name].add(Tally(**json.loads(counted.read_text())))
        else:
            said = (folder / "said.txt").read_text(errors="replace")
            found[name].count("tracebacks", f"the attack itself ended: {said[-1500:]}")
        shutil.rmtree(folder, ignore_errors=True)
        left[name] -= 1
        if not left[name]:
            done(name, found[name])
            print(line(name, found[name]), flush=True)
            for example in found[name].wrong:
                print("   ", example.replace("\n", "\n    "), flush=True)
    return found


def _part(attack: Callable[[Path, Path], Tally], place: Path, folder: Path) -> None:
    """The process of one part: it never returns."""
    try:
        file = os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        adopt_orphans()
        tally = attack(place, folder / "work")
        (folder / "tally.json").write_text(json.dumps(tally.as_json()))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(0)


def record(path: Path, name: str, tally: Tally, seed: int) -> None:
    """Add one attack. Counts of the others stay as they are, if their seed was the same."""
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = before.get("attacks", {}) if before.get("seed") == seed else {}
    attacks = kept | {name: tally.as_json()}
    everything = total(Tally(**one) for one in attacks.values()).as_json()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip() or None
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {"seed": seed, "commit": commit, "total": everything, "attacks": attacks}
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slice", action="store_true", help="a little of each attack, and no record")
    parser.add_argument("--only", help="attacks by their names, with commas: 'configs,kill train'")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RECORD)
    asked = parser.parse_args()
    todo = parts(asked.seed, whole=not asked.slice)
    if asked.only:
        todo = [(name, attack) for name, attack in todo if name in asked.only.split(",")]
    started = time.monotonic()
    os.environ |= QUIET  # before torch is loaded
    stage.import_all()
    stage.quick()
    memory = Path("/dev/shm")  # so that a write takes no time
    with tempfile.TemporaryDirectory(prefix="attack-", dir=memory if os.access(memory, os.W_OK) else None) as folder:
        root = Path(folder)
        stage.build(root / "stage")
        keep = (
            (lambda name, tally: None) if asked.slice else (lambda name, tally: record(asked.output, name, tally, asked.seed))
        )
        found = run(todo, asked.jobs, root, keep)
    everything = total(found.values())
    print(line("all", everything), f"in {time.monotonic() - started:.0f} s", flush=True)
    if any(getattr(everything, kind) for kind in WRONG):
        sys.exit(1)


if __name__ == "__main__":
    main()
