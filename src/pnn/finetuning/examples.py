"""From files of the official form, or from the hub, to examples. Whatever is wrong with a file is said with its line and with
what the form should be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pnn.errors import UserError, first_line
from pnn.files import sha256
from pnn.finetuning.tasks import DIAGNOSTICS, Pair, Row, Task


@dataclass(frozen=True)
class Example:
    index: Any  # how a submission names it; of MultiRC (passage, question, answer)
    texts: tuple[Pair, ...]  # one, or one for each choice
    label: int | float | None  # None: not known, in a test set


@dataclass(frozen=True)
class TaskData:
    """`dev` and `tests` by name: MNLI has two dev sets; a test set's name is that of the submission's file."""

    task: Task
    train: list[Example]
    dev: dict[str, list[Example]]
    tests: dict[str, list[Example]]
    source: str
    checksums: dict[str, str]  # of local files
    broken_lines: int = 0  # left out of an official file that has such lines


def find_folder(task: Task, data: Path) -> Path | None:
    """The task's folder in the official download: `data` holds it, or holds the benchmark's folder, or is it."""
    candidates = [data / task.folder, data / task.benchmark.lower() / task.folder]
    if data.name == task.folder:
        candidates.append(data)
    for folder in candidates:
        # both benchmarks have an RTE: only the form of the files tells them apart
        if any((folder / file).exists() for file in (task.train, *task.dev.values())):
            return folder
    return None


def read_local(task: Task, data: Path) -> TaskData:
    if not data.is_dir():
        raise UserError(f"--data {data}: no such folder")
    folder = find_folder(task, data)
    expected = f"{task.folder}/{task.train} and {' and '.join(task.dev.values())}"
    if folder is None:
        raise UserError(f"--data {data}: no {expected}, the files of {task.folder} ({task.benchmark}), in it")
    train = folder / task.train
    if task.name == "wic" and not train.exists() and (folder / "train_text.jsonl").exists():
        train = folder / "train_text.jsonl"
    for path in (train, *(folder / file for file in task.dev.values())):
        if not path.exists():
            raise UserError(f"{path} is missing: {task.name} needs {expected}")
    reader = _Reader(task)
    tests = {name: folder / file for name, file in task.tests.items() if (folder / file).exists()}
    return TaskData(
        task,
        train=reader.labelled(train),
        dev={name: reader.labelled(folder / file) for name, file in task.dev.items()},
        tests={name: reader.examples(path, labelled=False) for name, path in tests.items()},
        source="local files of the official form",
        checksums={path.name: sha256(path) for path in (train, *(folder / f for f in task.dev.values()), *tests.values())},
        broken_lines=reader.broken,
    )


class _Reader:
    def __init__(self, task: Task):
        self.task = task
        self.broken = 0

    def labelled(self, path: Path) -> list[Example]:
        return self.examples(path, labelled=True)

    def examples(self, path: Path, labelled: bool) -> list[Example]:
        rows = self._tsv(path, labelled) if path.suffix == ".tsv" else self._jsonl(path)
        found = [self._example(path, line, row, number, labelled) for number, (line, row) in enumerate(rows)]
        if not found:
            raise UserError(f"{path} is empty: {self._form(labelled)}")
        return found

    def _form(self, labelled: bool) -> str:
        task = self.task
        if labelled and task.headerless:
            return f"a line of {task.folder} is {', '.join(task.headerless)}, with tabs between"
        left_out = ("idx",) if labelled and task.benchmark == "GLUE" else () if labelled else ("label",)
        columns = ", ".join(column for ours, column in task.columns.items() if ours not in left_out)
        return f"{task.folder} has the columns {columns}"

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not valid UTF-8 ({error})") from None
        for number, line in enumerate(text.split("\n"), 1):  # splitlines() would also split at marks inside a sentence
            if line.strip():
                yield number, line.rstrip("\r")

    def _tsv(self, path: Path, labelled: bool) -> Iterator[tuple[int, Row]]:
        """Quotes mean nothing in these files: they are in the sentences."""
        lines = self._lines(path)
        if labelled and self.task.headerless:
            header = list(self.task.headerless)
        else:
            header = next(lines, (0, ""))[1].split("\t")
        unneeded = ("label",) if not labelled else ("idx",)
        wanted = {ours: column for ours, column in self.task.columns.items() if ours not in unneeded}
        if path.name.startswith("diagnostic"):
            wanted["idx"] = "index"
        for column in wanted.values():
            if header != [""] and column not in header:
                raise UserError(f'{path}: no column "{column}"; {self._form(labelled)}')
        places = {ours: header.index(column) for ours, column in wanted.items() if column in header}
        for number, line in lines:
            fields = line.split("\t")
            if len(fields) < len(header):
                if not (labelled and self.task.broken_lines):  # a submission without an answer to a test's line is refused
                    raise UserError(f"{path}, line {number}: {len(fields)} columns, not {len(header)}; {self._form(labelled)}")
                self.broken += 1
                continue
            yield number, {ours: fields[place] for ours, place in places.items()}

    def _jsonl(self, path: Path) -> Iterator[tuple[int, Row]]:
        for number, line in self._lines(path):
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
                rows = [row] if self.task.flatten is None else self.task.flatten(row)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number} is not JSON ({error})") from None
            except KeyError as error:
                raise UserError(f"{path}, line {number}: no {error.args[0]!r}; {self._form(True)}") from None
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {error}; {self._form(True)}") from None
            except (TypeError, AttributeError):  # a text where a list or an object belongs, and the like
                raise UserError(f"{path}, line {number} is not built like {self.task.folder}'s; {self._form(True)}") from None
            for one in rows:
                yield number, one

    def _example(self, path: Path, line: int, row: Row, number: int, labelled: bool) -> Example:
        where = f"{path}, line {line}"
        needed = [ours for ours in self.task.columns if ours != "idx" and (labelled or ours != "label")]
        for ours in needed:
            if row.get(ours) is None:
                raise UserError(f'{where}: no "{self.task.columns[ours]}"; {self._form(labelled)}')
            if ours not in ("label", *self.task.numbers) and not isinstance(row[ours], str):
                raise UserError(f'{where}: "{self.task.columns[ours]}" is {row[ours]!r}, not a text')
        index = row.get("idx", number)
        if isinstance(index, str):
            if not index.isdigit():
                raise UserError(f'{where}: "{self.task.columns["idx"]}" is {index!r}, not a number')
            index = int(index)
        try:
            texts = self.task.texts(row)
            label = read_label(self.task, row["label"]) if labelled else None
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        return Example(index, texts, label)


def read_label(task: Task, value: Any) -> int | float:
    if task.regression:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0 <= number <= 5:
            raise ValueError(f"the score is {value!r}, not a number from 0 to 5")
        return number
    word = str(value).strip().lower()  # JSON's true and "true" alike
    if word not in task.labels:
        raise ValueError(f"the label is {value!r}; {task.folder} has {', '.join(task.labels)}")
    return task.labels.index(word)


def read_hub(task: Task) -> TaskData:
    """The hub's copy: the same rows with the same names; labels are numbers there."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{task.name} from the hub needs the package datasets (pip install datasets); or give local files with --data"
        ) from None
    repository, name = task.hub
    try:
        found = datasets.load_dataset(repository, name)
    except Exception as error:  # no network, no such name, a broken cache: many kinds
        raise UserError(
            f"cannot load {repository} {name} from the hub ({first_line(error)}): give local files with --data"
        ) from error
    splits = task.hub_splits()

    def examples(split: str, labelled: bool) -> list[Example]:
        return [_from_hub(task, row, found[split].features, labelled) for row in found[split]]

    tests = {one: examples(splits[one], False) for one in task.tests if one not in DIAGNOSTICS}
    for one in task.tests:
        if one in DIAGNOSTICS:
            try:
                diagnostic = datasets.load_dataset(repository, DIAGNOSTICS[one])["test"]
            except Exception:  # they may be absent, as local files may: training does not need them
                continue
            rows = [row if task.flatten is None else task.flatten(row)[0] for row in diagnostic]
            tests[one] = [_from_hub(task, row, diagnostic.features, labelled=False) for row in rows]
    return TaskData(
        task,
        train=examples("train", True),
        dev={one: examples(splits[one], True) for one in task.dev},
        tests=tests,
        source=f"{repository}, {name}, from the hub",
        checksums={},
    )


def _from_hub(task: Task, row: Row, features: Any, labelled: bool) -> Example:
    missing = [column for column in task.columns if column not in row]
    if missing:
        repository, name = task.hub
        raise UserError(f'{repository} {name}: no column "{missing[0]}" (it has {", ".join(row)})')
    label: int | float | None = None
    if labelled:
        value = row["label"]
        if not task.regression:
            word = features["label"].names[value].lower()
            value = word if word in task.labels else task.labels[value]  # names such as "acceptable" for 1
        label = read_label(task, value)
    index = row["idx"]
    if isinstance(index, dict):
        index = (index["paragraph"], index["question"], index["answer"])
    return Example(index, task.texts(row), label)
