"""A model with whatever head its checkpoint has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pnn import runs
from pnn.models.loading import load_as_named, longest_input, tokenizer_for
from pnn.models.registry import class_of


@dataclass(frozen=True)
class Exported:
    name: str
    checkpoint: Path | str
    run: Path | None  # the folder that knows how the model came about
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast

    @property
    def auto(self) -> Any:
        """The Auto class that loads it."""
        return class_of(self.model)


def open_for_export(run: str) -> Exported:
    checkpoint = runs.find_checkpoint(run)
    model = load_as_named(checkpoint)
    tokenizer = tokenizer_for(checkpoint, model.config, longest_input(model))
    folder = None
    if isinstance(checkpoint, Path):
        parent = checkpoint.resolve().parent.parent
        folder = parent if any((parent / file).exists() for file in ("config.yaml", "result.json", "cycle.json")) else None
    name = folder.name if folder is not None else Path(run).name
    if folder is not None and (folder / "finetune.json").exists():
        name = f"{runs.read_json(folder / 'finetune.json')['model']}-{folder.name}"
    return Exported(name, checkpoint, folder, model.eval(), tokenizer)
