"""How much can a fine-tuned classifier leave out? `pnn calibrate RUN` for the folder of a fine-tuned task.

As for masked models (`evaluation/choosing`), with the task's dev examples: one half of them chooses, the other says what it
costs. What is read is the first token of each text. Halting by confidence stops a text as soon as the classifier is sure of it,
all of its tokens at once: the batch becomes smaller from step to step.

Dev has chosen the epoch already, by the last step's score: where the two differ, that favours all steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from pnn import runs
from pnn.data.shards import Progress, quietly
from pnn.errors import UserError
from pnn.evaluation.choosing import Asked, Batch, check_can_be_calibrated, choose, folder_of, store
from pnn.finetuning import classifiers
from pnn.finetuning.encoding import Encoded, by_length, encode, packed
from pnn.finetuning.examples import read_hub, read_local
from pnn.finetuning.tasks import TASKS
from pnn.models.loading import load_as_named, read_config
from pnn.models.precision import predicts_in
from pnn.runs import read_json

USERS = "pipelines, from_pretrained, finetune and export"


def asked_of(model: PreTrainedModel) -> Asked:
    few, helps = "there are too few dev examples to calibrate on", "a higher --lose takes fewer"
    return Asked("dev examples", "all but the first token", few, helps, model.config.num_labels)


def batches_of(sets: list[Encoded], batch_size: int) -> list[Batch]:
    """All examples, sorted by length within their set. What is counted is an example, or a passage with all its questions."""
    found, before = [], 0
    for encoded in sets:
        units = np.arange(len(encoded)) if encoded.units is None else encoded.units
        for chosen in by_length(encoded, batch_size):
            batch = packed(encoded, chosen)
            labels = torch.from_numpy(encoded.labels[chosen]).long()
            found.append(Batch(batch, batch.cu_seqlens[:-1].long(), labels, before + units[chosen]))
        before += int(units.max()) + 1
    return found


def calibrate(
    model: PreTrainedModel,
    sets: list[Encoded],
    lose: float,
    *,
    batch_size: int = 32,
    precision: torch.dtype = torch.float32,
    progress: Progress = quietly,
) -> dict[str, Any]:
    """The fastest setting of a classifier that loses at most `lose` of accuracy (0.003: 0.3 points), and what it costs. The
    model stays as it is: `found["changes"]` are the keys of its config to set."""
    check_can_be_calibrated(model.config, lose)
    return choose(model, batches_of(sets, batch_size), lose, asked_of(model), precision, progress)


def is_fine_tuned(run: str | Path) -> bool:
    """Whether RUN is the folder of a fine-tuned task, or its checkpoint."""
    found = runs.find_checkpoint(run)
    return isinstance(found, Path) and _home(found).exists()


def _home(folder: Path) -> Path:
    return folder.resolve().parent.parent / "finetune.json"


def calibrate_run(
    run: str | Path,
    lose: float,
    *,
    progress: Progress,
    data: str | None = None,
    batch_tokens: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Calibrate a fine-tuned task's checkpoint on the dev examples of its files, or of those in `data`, and store the setting
    in its config.json."""
    folder = folder_of(run)
    check_can_be_calibrated(read_config(folder), lose)
    before = read_json(_home(folder))
    task = TASKS[before["task"]]
    if task.regression or task.choices:
        what = "a number" if task.regression else "one of several texts"
        raise UserError(f"{task.name}: calibrate is for classifiers, and this model predicts {what}")
    files = data or before.get("files")
    if files is None and before["data"]["checksums"]:  # fine-tuned before the folder was kept
        raise UserError(f"{run} does not say where the files of {task.name} are: name their folder with --data")
    examples = read_hub(task) if files is None else read_local(task, Path(files))
    model = load_as_named(folder)
    tokenizer, longest = classifiers.read_tokenizer(folder, model.config)
    sets = [encode(task, one, tokenizer, longest, token_types=False) for one in examples.dev.values()]
    batch_size = before["settings"]["batch_size"]
    if batch_tokens is not None:
        batch_size = max(1, batch_tokens // max(int(one.lengths.max()) for one in sets))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model.float().to(device)
    found = calibrate(model, sets, lose, batch_size=batch_size, precision=predicts_in(device), progress=progress)
    store(folder, found["changes"])
    return {"checkpoint": str(folder), "source": f"{task.name}, dev", "users": USERS, **found}
