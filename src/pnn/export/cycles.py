"""What a plasticity cycle's folder says of a model: what it started from, what was done to it and what was measured."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from pnn.errors import UserError
from pnn.numbers import per_cent
from pnn.results import CycleRecord
from pnn.runs import read_json, read_metrics

# What is measured in a round, in this order, and the word for it
MEASURED = {"measurement": "pruned", "growth": "grown", "final": "learned"}
SETTINGS = ("rounds", "prune", "grow", "prune_by", "grow_by", "learn_steps", "learning_rate", "batch_rows", "seed")
NEEDED = ("model", "source", *SETTINGS)


class Cycle:
    def __init__(self, folder: Path, checkpoint: Path):
        self.asked: dict[str, Any] = read_json(folder / "cycle.json")
        if not isinstance(self.asked, dict) or not all(key in self.asked for key in NEEDED):
            raise UserError(f"{folder / 'cycle.json'} does not say what a cycle was asked to do: it is damaged")
        self.model, self.source = public(self.asked["model"]), public(self.asked["source"]) or "a text without a name"
        self.records = _until(read_metrics(folder / "metrics.jsonl"), checkpoint.name)
        self.initial = next((one for one in self.records if one["phase"] == "initial"), None)
        self.measured = [one for one in self.records if one["phase"] in MEASURED]

    def what(self) -> str:
        text = f"Reorganised by a plasticity cycle that started from `{self.model}`"
        if self.initial is None or not self.measured:
            return text + "."
        counts = " → ".join(str(one["heads"]) for one in [self.initial, *self.measured] if one["phase"] != "final")
        return f"{text}: {counts} attention heads (before, then pruned and grown in each round)."

    def data(self) -> str:
        text = f"The cycle scored heads on `{self.source}` and learned from it."
        if self.initial is not None:
            text += f" Measured on {self.initial['rows']:,} held-out rows of at most {self.initial['row_tokens']:,} tokens."
        return f"{text} On what `{self.model}` was trained, the cycle does not say."

    def training(self) -> str:
        asked = self.asked
        done = len({one["cycle"] for one in self.measured if one["phase"] == "final"})
        rounds = f"{done} of {asked['rounds']}" if done < asked["rounds"] else str(done)
        grown = f"grew {asked['grow']:g} of the original number by {asked['grow_by']}" if asked["grow"] else "grew none"
        return (
            f"{rounds} round(s). Each pruned {asked['prune']:g} of the heads by {asked['prune_by']}, {grown} and learned for "
            f"{asked['learn_steps']:,} updates of {asked['batch_rows']:,} rows, at a learning rate of "
            f"{asked['learning_rate']:g} at first; seed {asked['seed']}."
        )

    def results(self, causal: bool) -> str:
        if self.initial is None:
            return "The cycle's folder has no measurements."
        what = "token" if causal else "masked token"
        lines = [f"Held-out text, perplexity by {what}:", "", "| | heads | parameters | perplexity | 95 % interval |"]
        lines += ["|---|---|---|---|---|", _row("before", self.initial)]
        lines += [_row(f"round {one['cycle']}, {MEASURED[one['phase']]}", one) for one in self.measured]
        if self.measured and self.measured[-1]["phase"] == "final":
            lines += ["", self._recovered()]
        return "\n".join(lines)

    def _recovered(self) -> str:
        final = self.measured[-1]
        pruned = next(one for one in reversed(self.measured) if one["phase"] == "measurement")
        assert self.initial is not None
        if pruned["loss"] <= self.initial["loss"]:
            return f"In round {final['cycle']} the pruned model was no worse than the one before the cycle."
        back = per_cent(final["recovery"], 0)
        return (
            f"In round {final['cycle']}, {back} of what the pruned model had lost against the one before the cycle came back."
        )

    def limits(self) -> list[str]:
        return [
            "Learning on this text improves any model, an unpruned one too: a perplexity that came back is no proof that "
            "nothing was lost.",
            "One seed: intervals speak of the held-out rows, not of the spread between seeds.",
        ]


def _until(records: list[CycleRecord], checkpoint: str) -> list[CycleRecord]:
    """The records that tell how this checkpoint came about; later ones are of other models."""
    named = re.fullmatch(r"round-(\d+)-(pruned|grown|learned)", checkpoint)
    if named is not None:
        round_, stage = int(named[1]), named[2]
    else:  # a copy of `last`: the newest finished round
        round_, stage = max((one["cycle"] for one in records if one["phase"] == "final"), default=0), "learned"
    words = list(MEASURED.values())
    later = [phase for phase, word in MEASURED.items() if words.index(word) > words.index(stage)]
    return [
        one for one in records if one.get("cycle", 0) < round_ or (one.get("cycle", 0) == round_ and one["phase"] not in later)
    ]


def _row(name: str, record: CycleRecord) -> str:
    interval = record.get("loss_interval")
    between = "not known" if interval is None else "–".join(f"{math.exp(min(end, 700.0)):,.2f}" for end in interval)
    heads = f"{record['heads']} of {record['original_heads']}"
    return f"| {name} | {heads} | {record['parameters']:,} | {record['perplexity']:,.2f} | {between} |"


def public(name: str) -> str:
    """Of a path on somebody's machine, the file's name."""
    return Path(name).name if name.startswith(("/", "~", ".")) else name
