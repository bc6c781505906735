"""The models that the page is about. One that cannot be opened is told of on the page; the others work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from pnn.errors import UserError, first_line
from pnn.models.ddl import DDLForCausalLM
from pnn.models.loading import Loaded, load_any
from pnn.models.registry import kind_of
from pnn.plasticity.architectures import architecture_of
from pnn.runs import find_checkpoint, short_names

# the first of these that is there
DEFAULT = (("models/pnn-base",), ("runs/quickstart/pnn", "runs/quickstart/rewrite", "runs/quickstart/bert"))
computing = Lock()  # one user's work at a time: many at once would be no faster, and seeds would mean nothing


@dataclass(frozen=True, eq=False)
class Subject:
    name: str  # on the page
    loaded: Loaded[Any]

    @property
    def refines(self) -> bool:
        kind = kind_of(self.loaded.model)
        return kind.ours and kind.masked

    @property
    def has_steps(self) -> bool:
        return kind_of(self.loaded.model).has_steps

    def knows(self, text: str) -> bool:
        """Whether its tokenizer has a token for everything in the text."""
        tokenizer = self.loaded.tokenizer
        return tokenizer.unk_token_id not in tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def rewrites(self) -> bool:
        model = self.loaded.model
        known = isinstance(model, DDLForCausalLM) and model.config.num_rounds == 1
        return known and model.config.residual != "additive"

    @property
    def reorganises(self) -> bool:
        try:
            architecture_of(self.loaded.model)
        except UserError:
            return False
        return True


def default_models(folder: Path) -> list[str]:
    for names in DEFAULT:
        if found := [name for name in names if _is_there(folder / name)]:
            return found
    raise UserError("there is nothing to explore: name a model, or make small ones with `pnn quickstart`")


def _is_there(model: Path) -> bool:
    try:
        return model.exists() and bool(find_checkpoint(model))
    except UserError:
        return False


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
    return subjects, problems
