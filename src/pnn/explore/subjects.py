"""The models that the page is about. One that cannot be opened is told of on the page; the others work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from pnn.errors import UserError, first_line
from pnn.models.loading import Loaded, load_any
from pnn.models.registry import kind_of
from pnn.plasticity.architectures import architecture_of
from pnn.runs import short_names

DEFAULT = (("models/pnn-base",), ("runs/quickstart/pnn", "runs/quickstart/bert"))  # the first that is there


@dataclass(frozen=True, eq=False)
class Subject:
    name: str  # on the page
    loaded: Loaded[Any]
    lock: Lock = field(default_factory=Lock)  # one user's work at a time: two cores are no faster with ten

    @property
    def refines(self) -> bool:
        kind = kind_of(self.loaded.model)
        return kind.ours and kind.masked

    def knows(self, text: str) -> bool:
        """Whether its tokenizer has a token for everything in the text."""
        tokenizer = self.loaded.tokenizer
        return tokenizer.unk_token_id not in tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def reorganises(self) -> bool:
        try:
            architecture_of(self.loaded.model)
        except UserError:
            return False
        return True


def default_models(folder: Path) -> list[str]:
    for names in DEFAULT:
        if all((folder / name).exists() for name in names):
            return list(names)
    raise UserError("there is nothing to explore: name a model, or make two small ones with `pnn quickstart`")


def open_subjects(names: Sequence[str]) -> tuple[list[Subject], list[str]]:
    """Those that could be opened, and a sentence for each that could not."""
    if len(set(names)) < len(names):
        raise UserError("the same model was named twice")
    subjects, problems = [], []
    for name, path in zip(short_names(names), names, strict=True):
        try:
            loaded = load_any(path)
            subjects.append(Subject(name, loaded))
        except UserError as error:
            problems.append(str(error))
        except (RuntimeError, MemoryError) as error:  # a model that does not fit, say
            problems.append(f"{path}: cannot be opened ({first_line(error)})")
    if not subjects:
        raise UserError("; ".join(problems))
    return subjects, problems
