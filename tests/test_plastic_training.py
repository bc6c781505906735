"""The arms of results/plastic_training cost what its README says, and its tables are those of its results."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from pnn.models.sections import model_config

FOLDER = Path(__file__).parents[1] / "results" / "plastic_training"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("arms", "collect"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("arms"), importlib.import_module("collect")
    for name in ("arms", "collect"):
        sys.modules.pop(name, None)


def test_arms_cost_what_the_full_model_costs(scripts):
    arms, _ = scripts
    cost = {"small": (4.0, 7.0), "full": (7.0, 9.0)}
    for name, arm in arms.ARMS.items():
        updates, shape = arms.updates_of(arm, 1000, cost), arm.shape
        if arm.budget == "updates":
            assert updates == (1000 if arm.of == "full" else arms.updates_of(arms.ARMS[arm.of], 1000, cost)), name
            continue
        at = ("flops", "seconds").index(arm.budget)
        small, full = cost["small"][at], cost["full"][at]
        spent, last = 0.0, shape.until * updates
        for step in range(updates):
            share = shape.start + (shape.end - shape.start) * min(shape.changes, step * shape.changes // last) / shape.changes
            spent += small + (full - small) * (share - 0.5) / 0.5
        assert spent == pytest.approx(1000 * full, rel=0.005), name
    assert {one for pairs in arms.PAIRS.values() for pair in pairs for one in pair} == {*arms.ARMS}


def test_every_model_is_one_that_the_config_takes(scripts):
    arms, _ = scripts
    for model in arms.MODELS:
        for size in arms.SIZES.values():
            assert model_config(arms.model_of(model, size)).vocab_size == size.vocab_size


@pytest.mark.parametrize("file", sorted(FOLDER.glob("result_*.json")), ids=lambda file: file.stem)
def test_tables_are_those_of_the_results(scripts, file):
    _, collect = scripts
    found = json.loads(file.read_text(encoding="utf-8"))
    assert collect.tables(found["arms"], found["differences"]) in (FOLDER / "README.md").read_text(encoding="utf-8")
