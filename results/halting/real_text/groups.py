"""Which tokens stop when, where a criterion decides (`measure.py groups`): the same groups as the oracle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kept import FIXED, TEXT, Way, left_by_ways, packed

from pnn.analysis.halting_groups import Groups, Tokens, WordKinds
from pnn.analysis.totals import Totals
from pnn.analysis.trace import read
from pnn.bench.timing import machine
from pnn.data.batches import special_tokens
from pnn.evaluation.choosing import Batch, steps_taken
from pnn.evaluation.passes import states_at, to_device
from pnn.files import write_json
from pnn.results import Json
from pnn.studies.analyses.halting import LOSE

TOKENS = 20480  # the first of WikiText: a few minutes on two cores


@torch.no_grad()
def measure_groups(model: Path, home: Path) -> None:
    subject, described, sample = left_by_ways(model, home)
    vocabulary, chosen = subject.model.config.vocab_size, fewest_flops(described)
    ids, positions, labels = (sample[f"{TEXT}/{key}"] for key in ("ids", "positions", "labels"))
    frequency = ids.scatter(0, positions, labels).bincount(minlength=vocabulary)
    batches = list(packed(sample, TEXT, min(TOKENS, len(ids)), 2048))
    with subject.computing():
        with subject.take(Way.of_json(described[0])):
            tokens = [tokens_of(subject.model, batch) for batch in batches]
        steps = {}
        for row in chosen:
            with subject.take(Way.of_json(row)):
                steps[row["name"]] = [torch.from_numpy(steps_taken(subject.model, batch)) for batch in batches]
    words = WordKinds.of_tokenizer(subject.tokenizer, vocabulary)
    groups = Groups.of(tokens, special_tokens(subject.tokenizer).never_masked, frequency, words)
    totals = Totals(1 + int(tokens[-1].sequence[-1]))
    for number, some in enumerate(tokens):
        taken_here = {name: every[number] for name, every in steps.items()}
        groups.add(totals, some, taken_here, described[0]["changes"]["num_steps"])
    told = [{key: row[key] for key in ("name", "family", "seed")} | groups.told(totals, row["name"]) for row in chosen]
    counts = {"tokens": sum(len(some.words) for some in tokens), "targets": sum(len(some.loss) for some in tokens)}
    write_json(home / "groups.json", counts | {"ways": told} | machine())


def fewest_flops(described: list[Json]) -> list[Json]:
    """Of each criterion, and of each seed's units, what loses little enough on the tail. There may be none."""
    found: dict[Any, Json] = {}
    for row in sorted(described, key=lambda row: float(row["flops_share"])):
        if row["family"] not in FIXED and row["lost_on_tail"] <= LOSE:
            found.setdefault((row["family"], row["seed"]), row)
    return list(found.values())


def tokens_of(model: Any, batch: Batch) -> Tokens:
    """With what the model, as it is, makes of the masked ones."""
    ids, at = batch.packed.input_ids, batch.positions
    found = read(model, states_at(model, batch.packed, at)[-1], to_device(batch.labels, model.device))
    every = torch.ones_like(ids, dtype=torch.bool)
    targets = torch.zeros_like(every).index_fill_(0, at, True)
    return Tokens(ids.scatter(0, at, batch.labels), every, targets, batch.packed.keys, found.correct.cpu(), found.loss.cpu())
