"""What still needs a GPU, in the order in which it is wanted, one run at a time.

python results/to_measure.py                                      # what is left, with its minutes on one H200
python results/to_measure.py RUNS TOKENS WIKITEXT --minutes 26    # do what fits into 26 minutes, in this order
python results/to_measure.py RUNS TOKENS WIKITEXT --only '(b)'    # only what has this in its name

For a GPU that is lent for half an hour. An item starts only if it will end in time, and after each of them RUNS/home.tar.gz
holds all files but weights. TOKENS and WIKITEXT are folders of token shards (better_than_bert/README.md). An item is done if
what it leaves is in RUNS or was collected here. Minutes of a training are tokens over the measured speed, others are
estimates. Not listed, because they read other text: causal_pnn, downstream, plastic_training, shrink, widths.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pnn.runs import read_json

HERE = Path(__file__).resolve().parent
BERT = HERE / "better_than_bert"
EPOCH = 78.7e6  # tokens
AROUND = 0.5  # minutes of a training beside its updates, if another computes while it starts and evaluates
RATES = {"pnn_gateless": ("1e-3", "4e-3"), "bert12": ("5e-4",), "pnn_paper": ("1e-3", "2e-3", "4e-3")}
SEEDS = {"pnn_rewrite": 5, "bert12": 3, "bert4": 5, "pnn_gateless": 3, "pnn_paper": 1}
LARGEST = 4 << 20  # bytes of a file that goes home


@dataclass(frozen=True)
class Item:
    question: str  # a folder of results/
    name: str
    minutes: float
    command: str  # with {runs}, {tokens} and {wikitext}
    leaves: str  # a file in RUNS/question
    kept: str  # a file in results/question, once that is collected

    def done(self, runs: Path | None) -> bool:
        return (HERE / self.question / self.kept).exists() or (
            runs is not None and (runs / self.question / self.leaves).exists()
        )


def items() -> Iterator[Item]:
    for model, rates in RATES.items():
        part = f"rates_{model}" + ("_rotary" if model == "bert12" else "")
        for rate in rates:
            yield training("rates", model, f"{part}/learning_rate={rate}", 0, 1, {"learning_rate": rate})
    for seed in range(max(SEEDS.values())):  # in turns: what is half done compares already
        for model, seeds in SEEDS.items():
            if seed < seeds:
                yield training("(a)", model, f"a/{model}", seed, 3)
    for model in ("bert4", "bert12"):
        yield training("(b)", model, f"b/{model}", 0, 10)
    halting = f"bash {HERE}/halting/real_text/run.sh gpu {{tokens}} {{wikitext}} {{runs}}/halting/real_text"
    yield Item("halting/real_text", "halting on real text", 12.0, halting, "home.tar.gz", "result.json")
    hybrids = f"env TOKENS={{tokens}} bash {HERE}/hybrids/run.sh look {{runs}}/hybrids"
    yield Item("hybrids", "a look at hybrids", 13.0, hybrids, "look/sweep.json", "measured/look/sweep.json")


def training(stage: str, model: str, arm: str, seed: int, epochs: int, more: dict[str, str] | None = None) -> Item:
    """One run of the comparison with BERT."""
    rows = read_json(BERT / "measured" / "speeds.json")["rows"]
    speed = next(row for row in rows if (row["what"], row["config"]) == ("train", model))["tokens_per_second"]["median"]
    settings = {f"training.{key}": value for key, value in {"epochs": epochs, "seed": seed, **(more or {})}.items()}
    settings |= {"data.train": "{tokens}", "evaluation.sets.wikitext_tokens.source": "{wikitext}"}
    folder = f"{arm}/seed-{seed}"
    return Item(
        "better_than_bert",
        f"{stage} {model}, seed {seed}" + "".join(f", {key} {value}" for key, value in (more or {}).items()),
        epochs * EPOCH / speed / 60 + AROUND,
        f"{sys.executable} -m pnn train {BERT}/configs/{model}.yaml --output {{runs}}/better_than_bert/{folder} --resume "
        + " ".join(f"--set {key}={value}" for key, value in settings.items()),
        f"{folder}/evaluation.json",
        f"measured/{folder}/evaluation.json",
    )


def take_home(runs: Path) -> None:
    """All files of RUNS that are no weights, as one."""
    files = sorted(path for path in runs.rglob("*") if path.is_file() and path.stat().st_size <= LARGEST)
    with tarfile.open(runs / "home.tar.gz.new", "w:gz") as home:
        for path in files:
            if "checkpoints" not in path.parts and not path.name.startswith("home.tar.gz"):
                home.add(path, path.relative_to(runs))
    (runs / "home.tar.gz.new").replace(runs / "home.tar.gz")


def work(left: list[Item], runs: Path, places: dict[str, str], minutes: float, at_a_time: int) -> list[Item]:
    """Do what fits. Several at a time share the device: together they take as long as one after the other, but it computes
    while one of them starts. Returns what failed."""
    end = time.monotonic() + 60 * minutes
    busy_until = time.monotonic()  # the device, with all that was started
    running: dict[subprocess.Popen[bytes], Item] = {}
    failed: list[Item] = []
    waiting = list(left)
    try:
        while running or waiting:
            for process in [one for one in running if one.poll() is not None]:
                item = running.pop(process)
                if process.returncode:
                    failed.append(item)
                print(f"{'failed' if process.returncode else 'done'}: {item.name}", flush=True)
                take_home(runs)
            busy_until = max(busy_until, time.monotonic()) if running else time.monotonic()
            fitting = [item for item in waiting if busy_until + 60 * item.minutes <= end]
            if not running and not fitting:
                break
            if fitting and len(running) < at_a_time:
                item = fitting[0]
                waiting.remove(item)
                busy_until += 60 * item.minutes
                print(f"started: {item.name}, about {item.minutes:.1f} minutes", flush=True)
                (runs / item.question).mkdir(parents=True, exist_ok=True)
                with open(runs / item.question / "log.txt", "ab") as log:
                    command = [part.format(runs=runs, **places) for part in shlex.split(item.command)]
                    running[subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)] = item
            elif time.monotonic() > end:
                break
            time.sleep(0.2)
    finally:
        for process, item in running.items():
            process.terminate()
            process.wait()
            print(f"stopped: {item.name}", flush=True)
        take_home(runs)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("tokens", nargs="?")
    parser.add_argument("wikitext", nargs="?")
    parser.add_argument("--minutes", type=float, default=26.0)
    parser.add_argument("--only", default="", help="part of the names")
    parser.add_argument("--at-a-time", type=int, default=2)
    asked = parser.parse_args()
    left = [item for item in items() if asked.only in item.name and not item.done(asked.runs)]
    if asked.wikitext is None:
        for item in left:
            print(f"{item.minutes:5.1f}  {item.name}")
        print(f"{sum(item.minutes for item in left):5.1f}  minutes in all")
        return
    asked.runs.mkdir(parents=True, exist_ok=True)
    places = {"tokens": asked.tokens, "wikitext": asked.wikitext}
    failed = work(left, asked.runs.resolve(), places, asked.minutes, asked.at_a_time)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
