"""The eight tasks of the Deep Delta Learning paper, and their documents from local files where there is no hub.

lm-eval's own task definitions stay in charge of prompts and scoring. A local task is its definition (`include`), told to read
documents from a file; the file is ours to write, in the layout that the definition knows from the hub:

    task            file in the folder                        a line of it
    arc_challenge   arc_original/ARC-Challenge-Test.jsonl     question {stem, choices [{text, label}]}, answerKey
    arc_easy        arc_original/ARC-Easy-Test.jsonl          the same
    hellaswag       hellaswag_val.jsonl                       query, choices, gold
    openbookqa      openbook_qa.jsonl                         query, choices, gold
    piqa            piqa.jsonl                                query, choices, gold
    sciq            sciq_test.jsonl                           support, question, choices, gold
    social_iqa      social_iqa_val.jsonl                      query, choices, gold
    winogrande      winogrande.jsonl                          context_options, continuation, gold

`gold` is the right choice's number, from 0. Only the documents asked about are there, no training set: examples for few-shot
prompts are drawn from the same file. They are declared as the test split because only there does lm-eval leave out the document
that is being asked; from a validation split it may show a document as its own example.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from pnn.errors import UserError, did_you_mean

Document = dict[str, Any]
LETTERS = "ABCDEFGH"


def _gold(doc: Document, choices: list[str]) -> int:
    gold = doc["gold"]
    if not isinstance(gold, int) or not 0 <= gold < len(choices):
        raise ValueError(f"gold is {gold!r}, but there are {len(choices)} choices")
    return gold


def _lettered(doc: Document) -> Document:
    choices = doc["choices"]
    return {"choices": {"text": choices, "label": list(LETTERS[: len(choices)])}, "answerKey": LETTERS[_gold(doc, choices)]}


def _arc(doc: Document) -> Document:
    choices = doc["question"]["choices"]
    labels = [choice["label"] for choice in choices]
    if doc["answerKey"] not in labels:
        raise ValueError(f"answerKey is {doc['answerKey']!r}, but the labels are {', '.join(labels)}")
    return {
        "question": doc["question"]["stem"],
        "choices": {"text": [choice["text"] for choice in choices], "label": labels},
        "answerKey": doc["answerKey"],
    }


def _hellaswag(doc: Document) -> Document:
    """Where a caption is to be completed, the definition writes the sentence that has begun with a capital letter: it needs to
    know where that begins. An instruction's sentences are all complete."""
    activity, _, context = doc["query"].partition(": ")
    begun = None if context.endswith(".") else re.fullmatch(r"""(.*[.!?]["')]*) (.*)""", context, re.DOTALL)
    before, sentence = (context, "") if begun is None else begun.groups()
    label = str(_gold(doc, doc["choices"]))
    return {"activity_label": activity, "ctx_a": before, "ctx_b": sentence, "endings": doc["choices"], "label": label}


def _openbookqa(doc: Document) -> Document:
    return {"question_stem": doc["query"], **_lettered(doc)}


def _piqa(doc: Document) -> Document:
    first, second = doc["choices"]
    goal = doc["query"].removeprefix("Question: ").removesuffix("\n")
    return {"goal": goal, "sol1": first, "sol2": second, "label": _gold(doc, doc["choices"])}


def _sciq(doc: Document) -> Document:
    choices, gold = doc["choices"], _gold(doc, doc["choices"])
    first, second, third = choices[:gold] + choices[gold + 1 :]
    answers = {"distractor1": first, "distractor2": second, "distractor3": third, "correct_answer": choices[gold]}
    return {"question": doc["question"], "support": doc["support"], **answers}


def _social_iqa(doc: Document) -> Document:
    """The definition puts a space between context and question, so any space may be taken for it."""
    context, _, question = doc["query"].partition(" ")
    first, second, third = doc["choices"]
    answers = {"answerA": first, "answerB": second, "answerC": third}
    return {"context": context, "question": question, **answers, "label": str(_gold(doc, doc["choices"]) + 1)}


def _winogrande(doc: Document) -> Document:
    first, second = options = doc["context_options"]
    shared = sum(1 for _ in takewhile(lambda letters: letters[0] == letters[1], zip(first, second, strict=False)))
    start = first[:shared]
    if "_" in start:
        raise ValueError("an underscore stands for the gap and cannot stand before it")
    answers = {"option1": first[shared:], "option2": second[shared:]}
    return {"sentence": f"{start}_ {doc['continuation']}", **answers, "answer": str(_gold(doc, options) + 1)}


@dataclass(frozen=True)
class Task:
    """`metric` is the one in tables. `definition` lies in lm-eval's folder of tasks, `file` in the folder of local ones."""

    metric: str
    definition: str
    file: str
    layout: Callable[[Document], Document]


TASKS = {
    "arc_challenge": Task("acc_norm", "arc/arc_challenge.yaml", "arc_original/ARC-Challenge-Test.jsonl", _arc),
    "arc_easy": Task("acc_norm", "arc/arc_easy.yaml", "arc_original/ARC-Easy-Test.jsonl", _arc),
    "hellaswag": Task("acc_norm", "hellaswag/hellaswag.yaml", "hellaswag_val.jsonl", _hellaswag),
    "openbookqa": Task("acc_norm", "openbookqa/openbookqa.yaml", "openbook_qa.jsonl", _openbookqa),
    "piqa": Task("acc_norm", "piqa/piqa.yaml", "piqa.jsonl", _piqa),
    "sciq": Task("acc_norm", "sciq/sciq.yaml", "sciq_test.jsonl", _sciq),
    "social_iqa": Task("acc", "siqa/siqa.yaml", "social_iqa_val.jsonl", _social_iqa),
    "winogrande": Task("acc", "winogrande/default.yaml", "winogrande.jsonl", _winogrande),
}


def check_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in TASKS:
            raise UserError(f"--task: no task {name!r}{did_you_mean(name, ['all', *TASKS])}")


def read_documents(folder: Path, name: str, num_fewshot: int) -> list[Document]:
    """A task's documents in the hub's layout; there must be more than the examples that a prompt shows."""
    path = folder / TASKS[name].file
    if not folder.is_dir():
        raise UserError(f"--task-files {folder}: no such folder")
    if not path.is_file():
        raise UserError(f"--task-files {folder}: no {TASKS[name].file}, which {name} needs")
    documents = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # what else counts as a line's end may stand inside a text
    except UnicodeDecodeError:
        raise UserError(f"{path} is not valid UTF-8") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            documents.append(TASKS[name].layout(json.loads(line)))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: line {number} is not JSON ({error})") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{path}: line {number} is not a document of {name} ({reason})") from None
    if len(documents) <= num_fewshot:
        raise UserError(f"{path} holds {len(documents)} documents: too few for {name} with {num_fewshot} examples in a prompt")
    return documents


def write_tasks(folder: Path, definitions: Path, names: Iterable[str], num_fewshot: int, target: Path) -> None:
    """Fill `target` with what lm-eval reads (its `--include_path` too): the documents of `folder` and, for each task, its own
    definition in `definitions`, told to read them."""
    for name in names:
        documents = target / f"{name}.jsonl"
        rows = (json.dumps(document, ensure_ascii=False) for document in read_documents(folder, name, num_fewshot))
        documents.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        task = {
            "include": str(definitions / TASKS[name].definition),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(documents)}, "cache_dir": str(target / "cache")},
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
            "fewshot_split": "test",
        }
        (target / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
