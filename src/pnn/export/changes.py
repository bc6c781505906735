"""What plasticity.json says of a model whose heads were pruned or grown by a command, without a whole cycle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pnn.errors import UserError
from pnn.export.cycles import public
from pnn.plasticity.models import HISTORY
from pnn.runs import read_json


class Changes:
    def __init__(self, checkpoint: Path):
        file = checkpoint / HISTORY
        held = read_json(file)
        try:
            self.source, self.done = public(held["source"]), [_said(change) for change in held["changes"]]
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{file} does not say what was done to the model: it is damaged") from None

    def what(self) -> str:
        return f"Made from `{self.source}`: {'; then '.join(self.done)}."

    def data(self) -> str:
        return f"On what `{self.source}` was trained, this checkpoint does not say."

    def training(self) -> str:
        return "None after heads were pruned or grown."

    def results(self, causal: bool) -> str:
        return "Not measured since."

    def limits(self) -> list[str]:
        return ["How well it does since heads were pruned or grown was not measured."]


def _said(change: dict[str, Any]) -> str:
    if "pruned" in change:
        text = f"{len(change['pruned'])} of {change['heads_before']} attention heads pruned"
    else:
        text = f"{len(change['grown'])} attention heads grown beside {change['heads_before']}"
    on = "" if change["data"] is None else f" on `{public(change['data'])}`"
    return f"{text}, chosen by {change['by'].replace('_', ' ')}{on}"
