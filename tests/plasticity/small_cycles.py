"""Tiny models that read the embedded language, what a short cycle of them is, and how its records are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pnn.data import synthetic
from pnn.plasticity import CycleSettings
from pnn.plasticity.journal import Journal
from pnn.runs import read_metrics

SHORT = CycleSettings(learn_steps=12, learning_rate=3e-3, evaluate_every=4, batch_rows=4, score_rows=8)
LENGTH = 24


def language(count: int = 120) -> str:
    return "\n\n".join(synthetic.paragraphs(count, seed=0))


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def records_of(folder: Path) -> list[dict]:
    return read_metrics(folder / "metrics.jsonl")


@contextmanager
def stopped_at_update(number: int) -> Iterator[None]:
    """Learning is stopped before it records this update."""
    record = Journal.record

    def stop(self, phase, **values):
        if phase == "training" and values["step"] == number:
            raise InterruptedError
        record(self, phase, **values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "record", stop)
        with pytest.raises(InterruptedError):
            yield
