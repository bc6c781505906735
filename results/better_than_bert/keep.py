"""What is kept of finished runs: their small files, without the places where one machine has its data, and what each of the
long ones got right in every sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comparison import TEXT, TOTALS, Run, finished

from pnn.errors import UserError
from pnn.files import write_json, write_text
from pnn.results import texts_of
from pnn.runs import BY_SEQUENCE, check_commit, read_json

FILES = ("config.yaml", "environment.json", "metrics.jsonl", "evaluation.json", "tokens.json")


def copy_in(runs: Path, measured: Path) -> None:
    totals = read_json(measured / TOTALS) if (measured / TOTALS).exists() else {"targets": None, "correct": {}}
    found = finished(runs)
    for run in found:  # all of them, before anything is written
        check_commit(run.folder)
        if run.stage in ("a", "b", "box"):
            add_totals(totals, run)
    for run in found:
        target = measured / run.key
        target.mkdir(parents=True, exist_ok=True)
        data, sets = run.config.data, run.config.evaluation.sets
        places = {data.train: "TOKENS", sets[TEXT].source: "WIKITEXT", data.prepared: "prepared"}
        places |= {one["source"]: f"DATA/{Path(one['source']).name}" for one in texts_of(run.evaluation).values()}
        for name in FILES:
            text = (run.folder / name).read_text(encoding="utf-8")
            if name == "tokens.json":  # the folder's name is enough
                text = json.dumps({key: one | {"folder": Path(one["folder"]).name} for key, one in json.loads(text).items()})
            for place, word in sorted(places.items(), reverse=True, key=lambda one: len(one[0])):  # one may begin another
                text = text.replace(place, word) if "/" in place else text
            write_text(target / name, text)
    if totals["correct"]:
        write_text(measured / TOTALS, json.dumps(totals, separators=(",", ":")) + "\n")
    for name in ("speeds.json", "box.json"):  # of `pnn bench`, and of `pnn evaluate models/pnn-base --data WIKITEXT --json`
        if (runs / name).exists():
            write_json(measured / name, read_json(runs / name))


def add_totals(totals: dict[str, Any], run: Run) -> None:
    """Only what was got right: the losses would be most of the file."""
    found, accuracy = read_json(run.folder / BY_SEQUENCE)[TEXT], run.evaluation["sets"][TEXT]["accuracy"]
    if abs(sum(found["correct"]) / sum(found["targets"]) - accuracy) > 1e-9:
        raise UserError(f"{run.folder / BY_SEQUENCE} is not of the evaluation beside it: `pnn evaluate` makes both")
    if totals["targets"] is None:
        totals["targets"] = found["targets"]
    if totals["targets"] != found["targets"]:
        raise UserError(f"{run.folder} was asked for other masked tokens than the runs before it: they do not compare")
    totals["correct"][run.key] = found["correct"]
