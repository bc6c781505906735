"""Changes the source in ways that matter, one at a time, and runs the tests that cover the place: one of them has to fail.

    python tests/mutations/run.py               all of mutations.toml, anew into results/mutations/result.json  (`make mutants`)
    python tests/mutations/run.py loop.py β     those whose file or words contain one of these; the rest of the record stays

First the named tests run on the source as it is: they must pass. Then each mutation gets a copy of src in a temporary folder
and a process of its own, forked from one that has imported the heavy libraries and nothing of ours. A mutation is *killed* by
the first test that fails; it *survives* if none does. A survivor without an explanation is an error, as is a text that is no
longer found exactly once, a test that does not exist and a process that does not end.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = ROOT / "results" / "mutations" / "result.json"
SECONDS = 300  # that the tests of one mutation may take
WORKERS = min(4, os.cpu_count() or 1)
LIBRARIES = ("datasets", "hypothesis", "matplotlib.pyplot", "torch._dynamo", "transformers.trainer", "transformers.pipelines")

Mutation = dict[str, Any]


def mutations() -> list[Mutation]:
    return tomllib.loads((HERE / "mutations.toml").read_text(encoding="utf-8"))["mutation"]


def mutated(mutation: Mutation) -> str:
    """The whole file as the mutation has it."""
    text = (ROOT / "src" / "pnn" / mutation["file"]).read_text(encoding="utf-8")
    found = text.count(mutation["old"])
    if found != 1:
        raise ValueError(f"{mutation['breaks']!r}: {mutation['file']} has its text {found} times: {mutation['old']!r}")
    return text.replace(mutation["old"], mutation["new"])


class Watch:
    """A plugin of pytest: the first test that failed and what it said, and whether it was the copy that was tested."""

    def __init__(self, source: Path):
        self.source, self.failed, self.said = source, None, None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed, self.said = report.nodeid, str(crash.message if crash else report.longrepr).splitlines()[0][:160]

    def pytest_sessionfinish(self) -> None:
        module = sys.modules.get("pnn")
        if module is not None and not Path(str(module.__file__)).is_relative_to(self.source):
            raise RuntimeError(f"{module.__file__} was tested, not the copy")


def import_libraries() -> None:
    """What tests spend most of their start on, once for all forks. The environment is that of tests/conftest.py."""
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    for name in LIBRARIES:
        importlib.import_module(name)


def start(folder: Path, tests: list[str], mutation: Mutation | None) -> int:
    """Fork a process that runs these tests on a copy of the source in this folder and leaves answer.json there."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "_commit.json"))
    if mutation is not None:
        (folder / "src" / "pnn" / mutation["file"]).write_text(mutated(mutation), encoding="utf-8")
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        signal.alarm(SECONDS)
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path.insert(0, str(folder / "src"))
        os.environ |= {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        os.chdir(ROOT)
        watch = Watch(folder / "src")
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}"]
        code = int(pytest.main([*options, *tests], plugins=[watch]))
        (folder / "answer.json").write_text(json.dumps({"code": code, "failed": watch.failed, "said": watch.said}))
    finally:
        sys.stdout.flush()
        os._exit(code)


def answer(folder: Path) -> dict[str, Any]:
    """What a finished process found: pytest's exit code 0 is "all passed", 1 "one failed", all others are errors."""
    file = folder / "answer.json"
    found = json.loads(file.read_text()) if file.exists() else {"code": None}
    if found["code"] not in (0, 1) or (found["code"] == 1 and found["failed"] is None):
        said = (folder / "output.txt").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the tests could not run, or did not end in {SECONDS} seconds:\n{said}")
    return found


def run(chosen: list[Mutation], place: Path) -> list[dict[str, Any]]:
    """An entry of the record for each mutation, several at a time."""
    entries: dict[int, dict[str, Any]] = {}
    running: dict[int, tuple[int, float]] = {}
    waiting = list(range(len(chosen)))
    while waiting or running:
        while waiting and len(running) < WORKERS:
            index = waiting.pop(0)
            (folder := place / str(index)).mkdir()
            running[start(folder, chosen[index]["tests"], chosen[index])] = index, time.perf_counter()
        pid, _ = os.wait()
        index, began = running.pop(pid)
        mutation, found = chosen[index], answer(place / str(index))
        outcome = "killed" if found["failed"] else "explained" if "survives" in mutation else "SURVIVED"
        seconds = round(time.perf_counter() - began, 1)
        why = found["failed"] or mutation.get("survives", "")
        print(f"{outcome:9} {seconds:6.1f} s  {mutation['breaks']}  {why}", flush=True)
        entries[index] = {
            "breaks": mutation["breaks"],
            "file": mutation["file"],
            "outcome": outcome,
            "killed_by": found["failed"],
            "said": found["said"],
            **({"why": mutation["survives"]} if outcome == "explained" else {}),
        }
        shutil.rmtree(place / str(index))
    return [entries[index] for index in range(len(chosen))]


def main(words: list[str]) -> None:
    listed = mutations()
    for mutation in listed:
        mutated(mutation)
    chosen = [m for m in listed if not words or any(word in m["file"] or word in m["breaks"] for word in words)]
    if not chosen:  # without names pytest would run everything
        sys.exit(f"no mutation has {' or '.join(words)} in its file or words")
    tests = sorted({test for mutation in chosen for test in mutation["tests"]})
    import_libraries()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "as it is").mkdir()
        os.waitpid(start(place / "as it is", tests, None), 0)
        if (found := answer(place / "as it is"))["failed"]:
            sys.exit(f"{found['failed']} fails on the source as it is: {found['said']}")
        print(f"{len(tests)} tests and files pass on the source as it is; {len(chosen)} mutations", flush=True)
        entries = run(chosen, place)
    before = json.loads(RECORD.read_text(encoding="utf-8"))["mutations"] if words and RECORD.exists() else []
    known = {entry["breaks"]: entry for entry in before + entries}
    entries = [known[mutation["breaks"]] for mutation in listed if mutation["breaks"] in known]
    counts = {kind: sum(entry["outcome"] == kind for entry in entries) for kind in ("killed", "explained", "SURVIVED")}
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": "make mutants", "counts": {"mutations": len(entries), **counts}, "mutations": entries}
    RECORD.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(", ".join(f"{count} {kind}" for kind, count in record["counts"].items()))
    sys.exit(1 if counts["SURVIVED"] else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
