"""What still needs a GPU, in the order in which it is wanted, one run at a time.

python results/to_measure.py                            # what is left, with its minutes on one H200
python results/to_measure.py RUNS DATA --minutes 26     # do what fits into 26 minutes, in this order
python results/to_measure.py RUNS DATA --only '(b)'     # only what has this in its name

For a GPU that is lent for half an hour. An item starts only if it will end in time and if DATA has what it reads:

    tokens/, wikitext/       token shards of Wikipedia and of WikiText-103 valid (better_than_bert/README.md)
    glue/, superglue/        the official files
    text/part-04.txt.xz      Wikipedia as text; SmolLM2-135M/: a model

After each item RUNS/home.tar.gz holds all files but weights. An item is done if what it leaves is in RUNS or was collected.
Some items follow from others: what is chosen on the held-out tail is trained longer, in the same call. Minutes of a training
are tokens over the measured speed; the others are estimates. Not listed, because they are sweeps of more than half an hour:
causal_pnn, plastic_training, and three seeds of the best hybrids.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pnn.runs import read_json

HERE = Path(__file__).resolve().parent
BERT = HERE / "better_than_bert"
EPOCH = 78.7e6  # tokens
AROUND = 0.5  # minutes of a training beside its updates, if another computes while it starts and evaluates
RATES = {"pnn_gateless": ("1e-3", "4e-3"), "bert12": ("5e-4",), "pnn_paper": ("1e-3", "2e-3", "4e-3")}
SEEDS = {"pnn_rewrite": 5, "bert12": 3, "bert4": 5, "pnn_gateless": 3, "pnn_paper": 1}
CANDIDATES = ("pnn_seven", "pnn_thrice", "pnn_eight")  # for the second form of better_than_bert
SEEDS_OF_SECOND = (5, 3)  # with its gates, and without
WORK = {"pnn_seven": 0.79, "pnn_thrice": 0.99, "pnn_eight": 0.88}  # FLOPs of BERT-12's, where no speed is measured
GRACE = 20.0  # seconds that a process has to end when the time is up
LARGEST = 4 << 20  # bytes of a file that goes home


@dataclass(frozen=True)
class Item:
    name: str
    minutes: float
    command: str  # with {runs} and {data}
    leaves: str  # a file in RUNS
    kept: str  # a file in results/, once that is collected
    needs: tuple[str, ...]  # in DATA
    after: str = "."  # what must be in RUNS: weights that another item made
    model: str = ""  # that it trains

    def done(self, runs: Path | None) -> bool:
        return (HERE / self.kept).exists() or (runs is not None and (runs / self.leaves).exists())

    def can_start(self, runs: Path, data: Path) -> bool:
        return (runs / self.after).exists() and all((data / name).exists() for name in self.needs)


def items(runs: Path | None) -> Iterator[Item]:
    """All of them, as far as they are known by now."""
    for model, rate in [*((model, "2e-3") for model in (*CANDIDATES, "pnn_seven_gateless")), ("pnn_seven", "1e-3")]:
        yield one_epoch(model, rate)
    best = best_of([one_epoch(model, "2e-3") for model in CANDIDATES], runs, wanted=2)
    longer = [training("(a)", model, f"a/{model}", 0, 3) for model in best]
    yield from longer
    second = best_of(longer, runs, wanted=1) if longer else []
    # in turns: what is half done compares already. First the models that the question is about, whose rates are known
    wanted = dict(SEEDS)
    for form in second:
        wanted = dict(zip((form, f"{form}_gateless"), SEEDS_OF_SECOND, strict=True)) | wanted
    turns = [(seed, model) for seed in range(max(wanted.values())) for model, seeds in wanted.items() if seed < seeds]
    late = ("pnn_gateless", "pnn_paper", *(("pnn_rewrite",) if second else ()))
    first = [(seed, model) for seed, model in turns if seed < 3 and model not in late]
    for seed, model in first:
        yield training("(a)", model, f"a/{model}", seed, 3)
    for form in second:
        yield training("(b)", form, f"b/{form}", 0, 10)
    for model, rates in RATES.items():
        part = f"rates_{model}" + ("_rotary" if model == "bert12" else "")
        for rate in rates:
            yield training("rates", model, f"{part}/learning_rate={rate}", 0, 1, {"learning_rate": rate})
    for seed, model in turns:
        if (seed, model) not in first:
            yield training("(a)", model, f"a/{model}", seed, 3)
    tuning = f"bash {HERE}/downstream/run.sh {{data}} {{runs}}/better_than_bert"
    for model in ("pnn_rewrite", "bert4", "bert12"):
        if model != "pnn_rewrite":
            yield training("(b)", model, f"b/{model}", 0, 10)
        leaves, kept = f"better_than_bert/{model}.tuned", f"downstream/measured/{model}-glue/sst2/result.json"
        weights = "." if model == "pnn_rewrite" else f"better_than_bert/b/{model}/seed-0/evaluation.json"
        yield Item(f"downstream, {model}", 4.0, f"{tuning} {model}", leaves, kept, ("glue", "superglue"), weights)
    yield from shrink()
    hybrids = f"env TOKENS={{data}}/tokens bash {HERE}/hybrids/run.sh look {{runs}}/hybrids"
    yield Item("a look at hybrids", 13.0, hybrids, "hybrids/look/sweep.json", "hybrids/measured/wikipedia.json", ("tokens",))
    widths = f"bash {HERE}/widths/run.sh {{data}}/tokens {{runs}}/widths"  # twenty runs of half an epoch, ten at width 256
    yield Item("widths", 17.0, widths, "widths/muon_w768_plain/sweep.json", "widths/result.json", ("tokens",))


def shrink() -> Iterator[Item]:
    """Of SmolLM2: looks at how to learn, a fifth fewer parameters, then the curve, one seed, and without the teacher."""
    command = f"{sys.executable} {HERE}/shrink/run.py {{data}}/SmolLM2-135M {{data}}/text/part-04.txt.xz {{runs}}/shrink"
    command += " --score-rows 256 --adapt 300"
    too, not_too = "--kinds token head neuron", "--kinds head neuron"
    arms = [
        ("control", "--shares"),
        ("less-20-tokens-logits", f"--shares 0.2 {too}"),
        ("less-20-logits", f"--shares 0.2 {not_too}"),
    ]
    wanted = [(name, asked, seed) for seed in range(3) for name, asked in arms]
    wanted += [(f"less-{share}-tokens-logits", f"--shares {share / 100:g} {too}", 0) for share in (10, 30, 40, 50)]
    wanted += [("less-20-tokens-none", f"--shares 0.2 --teachers none {too}", 0)]
    left = [
        (f"{name}-{seed}", 2.5, f"{asked} --seeds {seed} --updates 769 --rate 6e-4")  # 25M tokens of learning each
        for name, asked, seed in wanted
    ]
    # would more and smaller updates make more of the same tokens? Looks at 6.3M of them, by rows per update and rate
    looks = [
        (
            f"less-20-tokens-logits-0-look-{rows}-{rate}",
            1.5,
            f"--shares 0.2 {too} --seeds 0 --look {rows}-{rate} --batch {rows} --updates {192 * 64 // rows} --rate {rate}",
        )
        for rows, rate in ((64, "6e-4"), (16, "6e-4"), (16, "3e-4"))
    ]
    after = "."
    for name, minutes, asked in [*looks, *left]:
        kept = f"shrink/measured/smollm2_135m/{name}.json"
        about = (f"shrink/measured/{name}.json", kept, ("SmolLM2-135M", "text"), after)
        yield Item(f"shrink, {name}", minutes, f"{command} {asked}", *about)
        if not (HERE / kept).exists():
            after = "shrink/measured/adapted.json"  # which the first that is left makes


def one_epoch(model: str, rate: str) -> Item:
    arm = f"rates_{model}/learning_rate={rate}"
    return training("rates", model, arm, 0, 1, {"learning_rate": rate})


def best_of(candidates: list[Item], runs: Path | None, wanted: int) -> list[str]:
    """The models that are right most often on the held-out tail. None before all are known."""
    tails = {}
    for item in candidates:
        files = [HERE / item.kept, *([] if runs is None else [runs / item.leaves])]
        found = [read_json(file)["accuracy"] for file in files if file.exists()]
        if not found:
            return []
        tails[item.model] = found[0]
    return sorted(tails, key=lambda model: -tails[model])[:wanted]


def training(stage: str, model: str, arm: str, seed: int, epochs: int, more: dict[str, str] | None = None) -> Item:
    """One run of the comparison with BERT."""
    rows = read_json(BERT / "measured" / "speeds.json")["rows"]
    speeds = {row["config"]: row["tokens_per_second"]["median"] for row in rows if row["what"] == "train"}
    speed = speeds.get(model) or speeds["bert12"] / WORK[model.removesuffix("_gateless")]
    settings: dict[str, object] = {
        f"training.{key}": value for key, value in {"epochs": epochs, "seed": seed, **(more or {})}.items()
    }
    folder = f"{arm}/seed-{seed}"
    return Item(
        f"{stage} {model}, seed {seed}" + "".join(f", {key} {value}" for key, value in (more or {}).items()),
        epochs * EPOCH / speed / 60 + AROUND,
        train(BERT / "configs" / f"{model}.yaml", f"better_than_bert/{folder}", settings),
        f"better_than_bert/{folder}/evaluation.json",
        f"better_than_bert/measured/{folder}/evaluation.json",
        ("tokens", "wikitext"),
        model=model,
    )


def train(config: Path, folder: str, settings: dict[str, object]) -> str:
    settings = settings | {"data.train": "{data}/tokens", "evaluation.sets.wikitext_tokens.source": "{data}/wikitext"}
    sets = " ".join(f"--set {key}={value}" for key, value in settings.items())
    return f"{sys.executable} -m pnn train {config} --output {{runs}}/{folder} --resume {sets}"


def take_home(runs: Path) -> None:
    """All files of RUNS that are no weights, as one."""
    files = sorted(path for path in runs.rglob("*") if path.is_file() and path.stat().st_size <= LARGEST)
    with tarfile.open(runs / "home.tar.gz.new", "w:gz") as home:
        for path in files:
            if "checkpoints" not in path.parts and not path.name.startswith("home.tar.gz"):
                with contextlib.suppress(FileNotFoundError):  # a run that goes on replaces its files
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
                print(f"{'failed' if process.returncode else 'done'}: {item.name}", flush=True)
                take_home(runs)
                waiting = [one for one in known() if one.name not in begun]
            busy_until = max(busy_until, time.monotonic()) if running else time.monotonic()
            fitting = [item for item in waiting if busy_until + 60 * item.minutes <= end and item.can_start(runs, data)]
            if not running and not fitting:
                break
            if fitting and len(running) < at_a_time:
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
    parser.add_argument("--only", default="", help="part of the names")
    parser.add_argument("--at-a-time", type=int, default=2)
    asked = parser.parse_args()

    def left() -> list[Item]:
        found = {item.name: item for item in items(asked.runs)}  # one that is asked for twice is done once
        return [item for item in found.values() if asked.only in item.name and not item.done(asked.runs)]

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
