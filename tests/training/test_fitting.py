"""A model that does not fit is told with the largest shipped one that would."""

from __future__ import annotations

import pytest

from pnn import memory
from pnn.config import load_config
from pnn.errors import UserError
from pnn.models.sections import model_config
from pnn.training.fitting import check_update_fits


@pytest.mark.parametrize(
    ("name", "has", "said"),
    [
        (
            "pnn_1b",
            6e9,
            r"pnn_1b: out of memory.*at least 12\.\d GB.*but cpu has 6\.0 GB: pnn_350m would fit \(4\.\d GB\)",
        ),
        ("ddl_1b", 2e9, r"ddl_1b: out of memory.*: ddl_small\w* would fit"),
        ("pnn_causal_1b", 6e9, r"pnn_causal_1b: out of memory.*: pnn_causal_350m would fit"),
        ("gpt2_1b", 5e9, r"gpt2_1b: out of memory.*: gpt2_medium would fit"),
        ("pnn_1b", 1e5, r": take a smaller model or batch$"),
    ],
)
def test_what_would_fit_is_named(monkeypatch, name, has, said):
    monkeypatch.setattr(memory, "_total", lambda device: int(has))
    config = load_config(name)
    with pytest.raises(UserError, match=said):
        check_update_fits(config, model_config(config.model), 8192, "cpu")


def test_what_fits_is_not_mentioned(monkeypatch):
    monkeypatch.setattr(memory, "_total", lambda device: int(6e9))
    config = load_config("pnn_350m")
    check_update_fits(config, model_config(config.model), 8192, "cpu")
