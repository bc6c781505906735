"""Does what still needs a GPU (wanted.py), in the order in which it is wanted, one run at a time.

python results/to_measure.py                            # what is left, with its minutes on one H200
python results/to_measure.py RUNS DATA --minutes 26     # do what fits into 26 minutes, in this order
python results/to_measure.py RUNS DATA --only '(b)'     # only what has this in its name; give it again for a next choice

For a GPU that is lent for half an hour. An item starts only if it will end in time and if DATA has what it reads:

    tokens/, wikitext/       token shards of Wikipedia and of WikiText-103 valid (better_than_bert/README.md)
    glue/, superglue/        the official files
    text/part-0[0-4].txt.xz  Wikipedia as text (part-04 alone is enough for SmolLM2); gpt2/tokenizer.json
    SmolLM2-135M/            a model (plasticity_study/convert.py)
    packages/torch_pruning/  `pip install --target packages --no-deps torch-pruning`

After each item RUNS/home.tar.gz holds all files but weights. An item is done if what it leaves is in RUNS or was collected; one
that failed is not tried again in these RUNS.
Some items follow from others: what is chosen on held-out text is trained longer, in the same call.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from wanted import FAILED, Item, items

GRACE = 20.0  # seconds that a process has to end when the time is up
LARGEST = 4 << 20  # bytes of a file that goes home


def take_home(runs: Path) -> None:
    """All files of RUNS that are no weights, as one."""
    with tarfile.open(runs / "home.tar.gz.new", "w:gz") as home:
        for folder, inside, files in os.walk(runs):
            inside[:] = sorted(name for name in inside if name != "checkpoints")
            for path in (Path(folder) / name for name in sorted(files) if not name.startswith("home.tar.gz")):
                with contextlib.suppress(FileNotFoundError):  # a run that goes on replaces its files
                    if path.stat().st_size <= LARGEST:
                        home.add(path, path.relative_to(runs))
    (runs / "home.tar.gz.new").replace(runs / "home.tar.gz")


def work(known: Callable[[], list[Item]], runs: Path, data: Path, minutes: float, at_a_time: int) -> list[Item]:
    """Do what fits of what is left by now. Several at a time share the device: together they take as long as one after the
    other, but it computes while one of them starts. Returns what failed."""
    end = time.monotonic() + 60 * minutes
    busy_until = time.monotonic()  # the device, with all that was started
    running: dict[subprocess.Popen[bytes], Item] = {}
    failed: list[Item] = []
    waiting, begun = list(known()), set()
    try:
        while running or waiting:
            for process in [one for one in running if one.poll() is not None]:
                item = running.pop(process)
                if process.returncode:
                    failed.append(item)
                    mark = runs / (item.leaves + FAILED)
                    mark.parent.mkdir(parents=True, exist_ok=True)
                    mark.write_text(f"exit code {process.returncode}\n")
                print(f"{'failed' if process.returncode else 'done'}: {item.name}", flush=True)
                take_home(runs)
                waiting = [one for one in known() if one.name not in begun]
            busy_until = max(busy_until, time.monotonic()) if running else time.monotonic()
            fitting = [item for item in waiting if busy_until + 60 * item.minutes <= end and item.can_start(runs, data)]
            if not running and not fitting:
                break
            by_itself = any(item.alone for item in [*fitting[:1], *running.values()])
            if fitting and len(running) < (1 if by_itself else at_a_time):
                item = fitting[0]
                waiting.remove(item)
                begun.add(item.name)
                busy_until += 60 * item.minutes
                print(f"started: {item.name}, about {item.minutes:.1f} minutes", flush=True)
                with open(runs / "log.txt", "ab") as log:
                    command = [part.format(runs=runs, data=data) for part in shlex.split(item.command)]
                    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                    running[process] = item
            elif time.monotonic() > end:
                break
            time.sleep(0.2)
    finally:
        for process, item in running.items():
            stop(process)
            print(f"stopped: {item.name}", flush=True)
        take_home(runs)
    return failed


def stop(process: subprocess.Popen[bytes], grace: float = GRACE) -> None:
    """With all that it started: a shell that is told to stop ends at once, while its trainings still save their state."""
    end = time.monotonic() + grace
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < end:
            process.poll()  # or its own remains would count as alive
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--minutes", type=float, default=26.0)
    parser.add_argument("--only", action="append", help="part of the names; several are done in their order")
    parser.add_argument("--at-a-time", type=int, default=2)
    asked = parser.parse_args()

    def left() -> list[Item]:
        found = {item.name: item for item in items(asked.runs)}  # one that is asked for twice is done once
        undone = [item for item in found.values() if not item.done(asked.runs)]
        chosen = [item for part in asked.only or [""] for item in undone if part in item.name]
        followed = ([*(one for one in undone if one.leaves == item.after), item] for item in chosen)  # which is done too
        return list(dict.fromkeys(item for some in followed for item in some))

    if asked.data is None:
        for item in left():
            print(f"{item.minutes:5.1f}  {item.name}")
        print(f"{sum(item.minutes for item in left()):5.1f}  minutes in all, and what follows from them")
        return
    asked.runs.mkdir(parents=True, exist_ok=True)
    failed = work(left, asked.runs.resolve(), asked.data.resolve(), asked.minutes, asked.at_a_time)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
