"""A model in a folder, and the list of what people do with it. A habit is a function that uses a model and checks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from pnn.data import synthetic

LINES = list(synthetic.paragraphs(8, seed=0))
TEXT = " ".join(LINES[0].split()[:6])


def is_decoder(name: str) -> bool:
    return "DDL" in name or "causal" in name


@dataclass
class Subject:
    """A model in a folder, with its tokenizer."""

    name: str
    folder: Path

    @property
    def causal(self) -> bool:
        return is_decoder(self.name)

    @property
    def reorganised(self) -> bool:
        return self.name.startswith("reorganised")

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Two texts, the shorter one padded."""
        return dict(self.tokenizer([TEXT, TEXT[: TEXT.index(" ")]], padding=True, return_tensors="pt"))

    def load(self, auto: Any = None, **options: Any) -> Any:
        return (auto or (AutoModelForCausalLM if self.causal else AutoModelForMaskedLM)).from_pretrained(self.folder, **options)

    def labels(self) -> torch.Tensor:
        inputs = self.inputs
        return torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], -100)


WORKS = "works"


@dataclass
class Habit:
    does: Callable[[Subject], None]
    encoders: str | None  # WORKS, what the refusal says, or None where nobody would try
    decoders: str | None


HABITS: dict[str, Habit] = {}


def habit(name: str, encoders: str | None = WORKS, decoders: str | None = WORKS) -> Callable[..., Any]:
    def add(does: Callable[[Subject], None]) -> Callable[[Subject], None]:
        HABITS[name] = Habit(does, encoders, decoders)
        return does

    return add


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-5)
