"""Predictions as the benchmarks' servers take them.

    GLUE        CoLA.tsv …: a header `index<tab>prediction`, then a line an example; label words for MNLI, QNLI and RTE,
                0 or 1 for the others, for STS-B a number from 0 to 5
    SuperGLUE   BoolQ.jsonl …: {"idx": 0, "label": "true"} a line; COPA's labels are numbers, MultiRC's lines are passages:
                {"idx": 0, "passage": {"questions": [{"idx": 0, "answers": [{"idx": 0, "label": 1}, …]}, …]}}

A submission is a zip of such files without folders: `zip -j submission.zip runs/NAME/*/predictions/*.tsv`. The servers want
a file for every task and diagnostic set. SuperGLUE's wants one for ReCoRD too, which is none of the tasks here: it has to come
from elsewhere, say from the sample submission.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pnn.files import make_folder, write_text
from pnn.finetuning.examples import Example
from pnn.finetuning.tasks import GLUE, Task


def write_submission(folder: Path, name: str, task: Task, examples: list[Example], predictions: Sequence[float]) -> Path:
    """`name` is the server's: MNLI-m, AX, …"""
    labels = [label_of(task, prediction) for prediction in predictions]
    make_folder(folder)
    if task.benchmark == GLUE:
        lines = ["index\tprediction"]
        lines += [f"{example.index}\t{label}" for example, label in zip(examples, labels, strict=True)]
        path = folder / f"{name}.tsv"
    else:
        path = folder / f"{name}.jsonl"
        if task.name == "multirc":
            lines = [json.dumps(passage) for passage in _passages(examples, labels)]
        else:
            rows = zip(examples, labels, strict=True)
            lines = [json.dumps({"idx": example.index, "label": label}) for example, label in rows]
    write_text(path, "\n".join(lines) + "\n")
    return path


def label_of(task: Task, prediction: float) -> str | int:
    if task.regression:
        return f"{min(max(prediction, 0.0), 5.0):.3f}"
    if task.benchmark != GLUE and task.labels == ("0", "1"):
        return int(prediction)
    return (task.written or task.labels)[int(prediction)]


def _passages(examples: list[Example], labels: list[Any]) -> list[dict[str, Any]]:
    nested: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for example, label in zip(examples, labels, strict=True):
        passage, question, answer = example.index
        nested.setdefault(passage, {}).setdefault(question, []).append({"idx": answer, "label": label})
    return [
        {
            "idx": passage,
            "passage": {"questions": [{"idx": number, "answers": answers} for number, answers in questions.items()]},
        }
        for passage, questions in nested.items()
    ]
