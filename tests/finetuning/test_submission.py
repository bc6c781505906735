"""Submission files keep the benchmarks' rules."""

import pytest
from submission_rules import GLUE_LABELS, SUPERGLUE_LABELS, check

from pnn.finetuning.examples import read_local
from pnn.finetuning.submission import write_submission
from pnn.finetuning.tasks import TASKS


def all_names() -> set[str]:
    return {f"{name}.tsv" if task.benchmark == "GLUE" else f"{name}.jsonl" for task in TASKS.values() for name in task.tests}


def test_every_file_of_both_benchmarks_has_a_rule():
    assert all_names() == {*GLUE_LABELS, *SUPERGLUE_LABELS}


@pytest.mark.parametrize("name", TASKS)
def test_files_keep_the_rules(name, task_files, tmp_path):
    task = TASKS[name]
    for test, examples in read_local(task, task_files).tests.items():
        if task.regression:
            predictions = [-3.0, 7.0, 2.5, 0.0, 5.0, 1 / 3, 4.99999]
        else:
            predictions = [float(i % len(task.labels)) for i in range(len(examples))]
        path = write_submission(tmp_path, test, task, examples, predictions)
        check(path, len(examples))


def test_what_is_predicted_is_what_is_written(task_files, tmp_path):
    """A rule about the form would not see labels in the wrong order."""

    def lines(task, predictions):
        examples = read_local(TASKS[task], task_files).tests[TASKS[task].folder]
        text = write_submission(
            tmp_path, TASKS[task].folder, TASKS[task], examples[: len(predictions)], predictions
        ).read_text()
        return text.splitlines()

    assert lines("rte", [0, 1]) == ["index\tprediction", "0\tentailment", "1\tnot_entailment"]
    assert lines("stsb", [5.2, 1.23456]) == ["index\tprediction", "0\t5.000", "1\t1.235"]
    assert lines("boolq", [0, 1]) == ['{"idx": 0, "label": "false"}', '{"idx": 1, "label": "true"}']
    assert lines("copa", [1]) == ['{"idx": 0, "label": 1}']
    assert lines("wsc", [1]) == ['{"idx": 0, "label": "True"}']
    first = '{"idx": 0, "passage": {"questions": [{"idx": 0, "answers": [{"idx": 0, "label": 1}, {"idx": 1, "label": 0}]}, '
    assert lines("multirc", [1, 0, 1])[0] == first + '{"idx": 1, "answers": [{"idx": 5, "label": 1}]}]}}'
