"""A cycle's folder: who may write it, what has been done, and how to go on after a kill.

    runs/<name>/  cycle.json (what was asked for)  environment.json  metrics.jsonl  state.json  summary.json
                  checkpoints/round-1-learned/  checkpoints/last → the newest finished round      figures/

A phase ends with its model on disk, its record in metrics.jsonl and then, as the last thing, state.json: whatever a kill leaves
behind after that is thrown away and done again. The next phase works on the model as it was read back, so a resumed cycle
computes on the same bits as one that was never stopped.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn.errors import UserError
from pnn.files import hold, is_taken, make_folder, point, remove_leftovers, room_on_disk, write_json, write_text
from pnn.plasticity.models import load, save
from pnn.runs import read_json, read_metrics
from pnn.training.tracking import environment

Record = dict[str, Any]
STATE = {"phases": int, "records": int, "model": str | None, "finished": str | None}  # of state.json
NAMES_ONLY = ("model", "source")  # may differ on resuming: what they stand for is compared


def check_free(folder: Path, resume: bool | None = None) -> bool:
    """Whether the folder holds anything, which it may only where a cycle is resumed (None: where nothing can be resumed)."""
    used = is_taken(folder)
    if used and not resume:
        go_on = "" if resume is None else ", or --resume to go on with it"
        raise UserError(f"{folder} exists already: choose another --output{go_on}")
    return used


def check_same(folder: Path, before: Record, asked: Record, kind: str) -> None:
    """A cycle or a study is resumed with the settings, the model and the text that it was begun with."""
    for key, now in asked.items():
        if before.get(key) != now and key not in NAMES_ONLY:
            what = f"{key} was {before.get(key)!r} and is now {now!r}"
            what = {"weights": "the model is another", "text": "the text is another"}.get(key, what)
            raise UserError(f"cannot resume {folder}: {what} (a resumed {kind} must be the same {kind})")


class Journal:
    def __init__(self, folder: Path, kind: str = "cycle"):
        self.folder, self.kind = folder, kind
        self.checkpoints = folder / "checkpoints"
        self.done = 0  # phases finished
        self.kept: str | None = None  # folder of the newest model, none before the first pruning
        self.finished: str | None = None  # that of the newest finished round
        self.records: list[Record] = []

    def start(self, asked: Record, resume: bool, defaults: Record) -> None:
        """Claim a new folder, or read where a stopped cycle was. `defaults`: settings that there were not yet when it was begun
        had these."""
        held, state = self.folder / f"{self.kind}.json", self.folder / "state.json"
        check_free(self.folder, resume)
        make_folder(self.folder)
        hold(self.folder)
        remove_leftovers(self.folder)
        if check_free(self.folder, resume):  # again: another process may have been faster
            if not held.exists():
                raise UserError(
                    f"cannot resume {self.folder}: it holds files but no {held.name}, so it is not a {self.kind}'s folder"
                )
            check_same(self.folder, defaults | read_json(held), asked, self.kind)
            if state.exists():
                self._restore(read_json(state))
        else:
            write_json(held, asked)  # first: by it a folder is known
        if not (self.folder / "environment.json").exists():
            write_json(self.folder / "environment.json", environment(asked["seed"], 1))
        write_text(self.folder / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in self.records))

    def _restore(self, state: Any) -> None:
        if not isinstance(state, dict) or not all(isinstance(state.get(key), kind) for key, kind in STATE.items()):
            raise UserError(f"cannot resume {self.folder}: state.json does not say how far the {self.kind} came")
        self.done, self.kept, self.finished = state["phases"], state["model"], state["finished"]
        self.records = read_metrics(self.folder / "metrics.jsonl")[: state["records"]]
        if len(self.records) < state["records"]:
            raise UserError(f"cannot resume {self.folder}: metrics.jsonl has lost records")
        self._tidy()

    def record(self, phase: str, **values: Any) -> None:
        record = {"phase": phase, **values}
        path = self.folder / "metrics.jsonl"
        with room_on_disk(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        self.records.append(record)

    def newest(self, phase: str) -> Record:
        return next(record for record in reversed(self.records) if record["phase"] == phase)

    def keep(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None) -> PreTrainedModel:
        """Write a phase's model; returns what can be read back."""
        path = self.checkpoints / name
        if path.exists():  # of a phase that was killed before it could say that it was done
            shutil.rmtree(path)
        save(model, path, tokenizer)
        self.kept = name
        return self.read_model().to(model.device)

    def read_model(self) -> PreTrainedModel:
        return load(self.checkpoints / str(self.kept))

    def finish_phase(self, ends_round: bool) -> None:
        with open(self.folder / "metrics.jsonl", "rb") as file:
            os.fsync(file.fileno())  # state.json must not outlive a crash that its records do not
        self.done += 1
        self.finished = self.kept if ends_round else self.finished
        state = {"phases": self.done, "records": len(self.records), "model": self.kept, "finished": self.finished}
        write_json(self.folder / "state.json", state)
        self._tidy()

    def _tidy(self) -> None:
        """Only the newest model and the newest finished round's are kept."""
        if self.finished is not None:
            point(self.checkpoints / "last", self.checkpoints / self.finished)
        for path in self.checkpoints.glob("round-*"):
            if path.name not in (self.kept, self.finished):
                shutil.rmtree(path)
