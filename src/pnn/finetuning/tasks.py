"""The nine tasks of GLUE and seven of SuperGLUE: what their files hold and how a row becomes text for an encoder.

A row of any origin is first brought into one form, a dictionary with the hub's column names. Then

    most tasks   a sentence, or a pair (a, b) that the tokenizer frames as [CLS] a [SEP] b [SEP]
    BoolQ        (question, passage)
    MultiRC      (passage, question and answer): every answer is a yes-no question of its own
    COPA         (premise and what is asked, choice), a pair for each of the two choices; the higher score wins
    WiC          ("word : sentence1", sentence2): the word is named, because not every form of the task says where it stands
    WSC          one text with marks around the two words or phrases: "* the cup * fell because # it # was slippery"

An output's number is the place of its label in `Task.labels`. A task without labels is a regression.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from string import punctuation
from typing import Any

from pnn.errors import UserError, did_you_mean

Row = dict[str, Any]
Pair = tuple[str, str | None]
GLUE, SUPERGLUE = "GLUE", "SuperGLUE"


@dataclass(frozen=True)
class Task:
    name: str
    benchmark: str
    folder: str  # of the official download
    columns: dict[str, str]  # our name (the hub's) → the file's
    texts: Callable[[Row], tuple[Pair, ...]]  # one pair, or one for each choice
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    train: str = "train.tsv"
    dev: dict[str, str] = field(default_factory=lambda: {"dev": "dev.tsv"})
    tests: dict[str, str] = field(default_factory=dict)  # name of the submission's file → the file that is predicted
    flatten: Callable[[Row], list[Row]] | None = None  # from a line of JSON to rows
    headerless: tuple[str, ...] = ()  # columns of training and dev files that have no header
    broken_lines: bool = False  # the official training and dev files have lines that everybody leaves out
    written: tuple[str, ...] = ()  # labels as a submission writes them, where files write them differently
    numbers: tuple[str, ...] = ()  # columns that are no texts
    choices: int = 0  # candidates that are scored against each other; 0: none, a label is predicted

    @property
    def regression(self) -> bool:
        return not self.labels

    @property
    def hub(self) -> tuple[str, str]:
        if self.benchmark == GLUE:
            return "nyu-mll/glue", self.name
        return "aps/super_glue", self.name.removeprefix("superglue_")

    def hub_splits(self) -> dict[str, str]:
        """Name of a dev set or of a submission's file → the hub's split."""
        if self.name == "mnli":
            named = {"matched": "matched", "mismatched": "mismatched", "MNLI-m": "matched", "MNLI-mm": "mismatched"}
            return {name: f"{'validation' if name in self.dev else 'test'}_{which}" for name, which in named.items()}
        return {"dev": "validation", self.folder: "test"}


def _single(column: str) -> Callable[[Row], tuple[Pair, ...]]:
    return lambda row: ((row[column], None),)


def _pair(first: str, second: str) -> Callable[[Row], tuple[Pair, ...]]:
    return lambda row: ((row[first], row[second]),)


def _copa(row: Row) -> tuple[Pair, ...]:
    asked = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
    if row["question"] not in asked:
        raise ValueError(f'question is {row["question"]!r}, but COPA asks for "cause" or "effect"')
    premise = f"{row['premise']} {asked[row['question']]}"
    return (premise, row["choice1"]), (premise, row["choice2"])


def _wic(row: Row) -> tuple[Pair, ...]:
    return ((f"{row['word']} : {row['sentence1']}", row["sentence2"]),)


def _wsc(row: Row) -> tuple[Pair, ...]:
    words = row["text"].split()
    spans = []
    for number, mark in ((1, "*"), (2, "#")):
        index, span = row[f"span{number}_index"], row[f"span{number}_text"].split()
        if not isinstance(index, int) or not 0 <= index < len(words):
            raise ValueError(f"span{number}_index is {index!r}, but the text has {len(words)} words")
        start = _find_span(words, span, index)
        spans.append((start, start + len(span), mark))
    for start, end, mark in sorted(spans, reverse=True):  # from the back: places before it stay as they are
        words[start:end] = [mark, *words[start:end], mark]
    return ((" ".join(words), None),)


def _find_span(words: list[str], span: list[str], index: int) -> int:
    """Where the span stands: some of the official files' indices miss it by one word."""

    def bare(some: list[str]) -> list[str]:
        return [word.strip(punctuation).lower() for word in some]

    for start in (index, index + 1, index - 1):
        if start >= 0 and bare(words[start : start + len(span)]) == bare(span):
            return start
    return index


def _flatten_wsc(row: Row) -> list[Row]:
    return [{**row, **row["target"]}]


def _flatten_wic(row: Row) -> list[Row]:
    """Also "Word: w. Sentence 1: … Sentence 2: …", a form in which the training set goes around."""
    if "word" in row or "text" not in row:
        return [row]
    parts = re.fullmatch(r"Word: (.*?)\. Sentence 1: (.*) Sentence 2: (.*)", row["text"])
    if parts is None:
        raise ValueError('a text is not of the form "Word: … Sentence 1: … Sentence 2: …"')
    word, first, second = parts.groups()
    return [{**row, "word": word, "sentence1": first, "sentence2": second, "label": ("false", "true")[int(row["label"])]}]


def _flatten_multirc(row: Row) -> list[Row]:
    passage = row["passage"]
    return [
        {
            "paragraph": passage["text"],
            "question": question["question"],
            "answer": answer["text"],
            "idx": (row["idx"], question["idx"], answer["idx"]),
            **({"label": answer["label"]} if "label" in answer else {}),
        }
        for question in passage["questions"]
        for answer in question["answers"]
    ]


def _multirc(row: Row) -> tuple[Pair, ...]:
    return ((row["paragraph"], f"{row['question']} {row['answer']}"),)


def _columns(*same: str, **other: str) -> dict[str, str]:
    return {name: name for name in same} | {"label": "label", "idx": "index"} | other


def _glue(name: str, folder: str, columns: dict[str, str], labels: tuple[str, ...], *metrics: str, **more: Any) -> Task:
    texts = [column for column in columns if column not in ("label", "idx")]
    arrange = _single(*texts) if len(texts) == 1 else _pair(*texts)
    return Task(name, GLUE, folder, columns, arrange, labels, metrics, **({"tests": {folder: "test.tsv"}} | more))


def _superglue(
    name: str,
    folder: str,
    columns: str,
    texts: Callable[[Row], tuple[Pair, ...]],
    labels: tuple[str, ...],
    *metrics: str,
    **more: Any,
) -> Task:
    files = {"train": "train.jsonl", "dev": {"dev": "val.jsonl"}, "tests": {folder: "test.jsonl"}}
    named = {column: column for column in (*columns.split(), "label", "idx")}
    return Task(name, SUPERGLUE, folder, named, texts, labels, metrics, **(files | more))


BINARY = ("0", "1")
NO_YES = ("false", "true")
ENTAILMENT = ("entailment", "not_entailment")
MNLI = ("entailment", "neutral", "contradiction")
_SENTENCES = _columns("sentence1", "sentence2")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _glue("cola", "CoLA", _columns("sentence"), BINARY, "matthews", headerless=("source", "label", "mark", "sentence")),
        _glue("sst2", "SST-2", _columns("sentence"), BINARY, "accuracy"),
        _glue(
            "mrpc",
            "MRPC",
            _columns(sentence1="#1 String", sentence2="#2 String", label="Quality"),
            BINARY,
            "accuracy",
            "f1",
        ),
        _glue("stsb", "STS-B", _columns("sentence1", "sentence2", label="score"), (), "pearson", "spearman"),
        _glue(
            "qqp",
            "QQP",
            _columns("question1", "question2", label="is_duplicate", idx="id"),
            BINARY,
            "accuracy",
            "f1",
            broken_lines=True,  # some questions have line breaks in them
        ),
        _glue(
            "mnli",
            "MNLI",
            _columns(premise="sentence1", hypothesis="sentence2", label="gold_label"),
            MNLI,
            "accuracy",
            dev={"matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"},
            tests={"MNLI-m": "test_matched.tsv", "MNLI-mm": "test_mismatched.tsv", "AX": "../diagnostic/diagnostic.tsv"},
        ),
        _glue("qnli", "QNLI", _columns("question", "sentence"), ENTAILMENT, "accuracy"),
        _glue("rte", "RTE", _SENTENCES, ENTAILMENT, "accuracy"),
        _glue("wnli", "WNLI", _SENTENCES, BINARY, "accuracy"),
        _superglue("boolq", "BoolQ", "passage question", _pair("question", "passage"), NO_YES, "accuracy"),
        _superglue(
            "cb",
            "CB",
            "premise hypothesis",
            _pair("premise", "hypothesis"),
            ("entailment", "contradiction", "neutral"),
            "accuracy",
            "macro_f1",
        ),
        _superglue("copa", "COPA", "premise choice1 choice2 question", _copa, BINARY, "accuracy", choices=2),
        _superglue("wic", "WiC", "word sentence1 sentence2", _wic, NO_YES, "accuracy", flatten=_flatten_wic),
        _superglue(
            "wsc",
            "WSC",
            "text span1_text span1_index span2_text span2_index",
            _wsc,
            NO_YES,
            "accuracy",
            flatten=_flatten_wsc,
            written=("False", "True"),
            numbers=("span1_index", "span2_index"),
        ),
        _superglue(
            "superglue_rte",
            "RTE",
            "premise hypothesis",
            _pair("premise", "hypothesis"),
            ENTAILMENT,
            "accuracy",
            tests={"RTE": "test.jsonl", "AX-g": "../AX-g/AX-g.jsonl", "AX-b": "../AX-b/AX-b.jsonl"},
            flatten=lambda row: (
                [{"premise": row["sentence1"], "hypothesis": row["sentence2"], **row}] if "sentence1" in row else [row]
            ),  # AX-b's names
        ),
        _superglue("multirc", "MultiRC", "paragraph question answer", _multirc, BINARY, "f1a", "em", flatten=_flatten_multirc),
    )
}
DIAGNOSTICS = {"AX": "ax", "AX-b": "axb", "AX-g": "axg"}  # predicted by another task's model; to the hub's name
GROUPS = {
    "all": list(TASKS),
    "glue": [name for name, task in TASKS.items() if task.benchmark == GLUE],
    "superglue": [name for name, task in TASKS.items() if task.benchmark == SUPERGLUE],
}


def parse_tasks(names: str) -> tuple[list[str], bool]:
    """Task names with commas, or a group; and whether it was a group, of which absent tasks are left out."""
    wanted = [name.strip().lower().replace("-", "") for name in names.split(",") if name.strip()]
    if len(wanted) == 1 and wanted[0] in GROUPS:
        return GROUPS[wanted[0]], True
    for name in wanted:
        if name not in TASKS:
            raise UserError(f'--task: no task "{name}"{did_you_mean(name, [*TASKS, *GROUPS])}')
    if not wanted:
        raise UserError(f"--task: name tasks separated by commas, or all (known: {', '.join(TASKS)})")
    return list(dict.fromkeys(wanted)), False
