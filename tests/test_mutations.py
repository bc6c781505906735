"""The list of mutations is one that `make mutants` can run, and its record is of this list. It runs none of them."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNNER = runpy.run_path(str(ROOT / "tests" / "mutations" / "run.py"))
MUTATIONS = RUNNER["mutations"]()


def test_there_are_enough_and_each_is_another():
    assert len(MUTATIONS) >= 60
    assert len({mutation["breaks"] for mutation in MUTATIONS}) == len(MUTATIONS)
    assert {mutation["file"].partition("/")[0] for mutation in MUTATIONS} >= {
        *("nn", "data", "training", "evaluation", "plasticity", "stats.py"),
    }


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation["breaks"])
def test_it_still_applies_and_its_tests_exist(mutation):
    changed = RUNNER["mutated"](mutation)  # its text is there exactly once
    ast.parse(changed)
    assert mutation["new"] != mutation["old"]
    for named in mutation["tests"]:
        file, _, test = named.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), named


def test_words_that_no_mutation_has_are_an_error():
    with pytest.raises(SystemExit, match="no mutation has neither-this or nor-that"):
        RUNNER["main"](["neither-this", "nor-that"])


def test_a_text_that_is_gone_is_an_error():
    with pytest.raises(ValueError, match="has its text 0 times"):
        RUNNER["mutated"]({**MUTATIONS[0], "old": "this is nowhere"})


def test_the_record_is_of_this_list_and_nothing_survived_without_a_reason():
    record = json.loads(RUNNER["RECORD"].read_text(encoding="utf-8"))
    found = {entry["breaks"]: entry for entry in record["mutations"]}
    assert list(found) == [mutation["breaks"] for mutation in MUTATIONS]  # else: make mutants
    for mutation in MUTATIONS:
        entry = found[mutation["breaks"]]
        assert entry["file"] == mutation["file"]
        if "survives" in mutation:
            assert entry["outcome"] == "explained"
        else:
            assert entry["outcome"] == "killed"
            assert any(entry["killed_by"].startswith(named) for named in mutation["tests"])
    assert record["counts"]["SURVIVED"] == 0
    assert record["counts"]["mutations"] == len(MUTATIONS)
