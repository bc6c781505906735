"""Reading run folders: everything that the page says comes from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pnn import runs
from pnn.config import RunConfig
from pnn.errors import UserError
from pnn.figures.anatomy import KNOWN_TYPES, anatomy
from pnn.figures.results import Json, is_refiner, median_speed
from pnn.studies.registry import analysis_names


@dataclass(frozen=True)
class Run:
    name: str
    config: RunConfig
    model: Json | None  # the checkpoint's config.json; results may be passed on without their checkpoints
    environment: Json
    metrics: list[Json]
    evaluation: Json
    seconds: float | None  # of training, without evaluation and saving
    analyses: dict[str, Json] = field(default_factory=dict)  # analysis/<name>.json by name
    evidence: Json = field(default_factory=dict)  # experimental_results.json

    @property
    def is_refiner(self) -> bool:
        return is_refiner(self.evaluation)

    @property
    def is_decoder(self) -> bool:
        return "perplexity" in self.evaluation

    @property
    def updates(self) -> int:
        return int(self.metrics[-1]["step"])

    @property
    def tokens_per_second(self) -> float | None:
        return median_speed(self.metrics)

    @property
    def can_be_drawn(self) -> bool:
        return self.model is not None and self.model.get("model_type") in KNOWN_TYPES

    def describe(self) -> str:
        """In words: PNN, one refiner applied 4 times."""
        if self.is_decoder:
            return self._describe_decoder()
        steps = self.evaluation["num_steps"]
        family = {"pnn": "PNN", "pnn_bert_baseline": "BERT baseline"}.get(self.evaluation["model_type"])
        if self.can_be_drawn and self.model is not None:
            return f"{family}, {anatomy(self.model).describe()}"
        return f"{family or self.evaluation['model_type']}, {steps} {'steps' if self.is_refiner else 'layers'}"

    def _describe_decoder(self) -> str:
        """In words: delta residual, 4 channels, channel compressor, 12 layers."""
        model = self.model or {}
        if "residual" not in model:
            return str(self.evaluation["model_type"])
        channels = model["value_channels"]
        state = "a vector state" if channels == 1 else f"{channels} channels, {model['compressor']} compressor"
        return f"{model['residual'].replace('_', '-')} residual, {state}, {model['num_hidden_layers']} layers"


def load_runs(folders: Sequence[Path]) -> list[Run]:
    if not folders:
        raise UserError("a report needs at least one run folder")
    names = _names([folder.resolve() for folder in folders])
    return [_load(folder, name) for folder, name in zip(folders, names, strict=True)]


def _names(folders: list[Path]) -> list[str]:
    """The folders' own names; with those above them as far as it takes to tell them apart."""
    if len(set(folders)) < len(folders):
        raise UserError("the same run folder was given twice")
    parts, names = 1, [folder.name for folder in folders]
    while len(set(names)) < len(names):
        parts += 1
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
    return names


def _load(folder: Path, name: str) -> Run:
    config = runs.read_config(folder)
    if not (folder / "evaluation.json").exists():
        raise UserError(f"{folder} has no evaluation.json: let its training finish, or run `pnn evaluate {folder}`")
    evaluation = runs.read_json(folder / "evaluation.json")
    if not {"accuracy_by_step", "perplexity"} & evaluation.keys():
        raise UserError(f"{folder / 'evaluation.json'} holds no accuracy_by_step: run `pnn evaluate {folder}` again")
    metrics = _read_metrics(folder)
    return Run(
        name=name,
        config=config,
        model=_if_there(folder / "checkpoints" / "best" / "config.json"),
        environment=_if_there(folder / "environment.json") or {},
        metrics=metrics,
        evaluation=evaluation,
        seconds=next((row["seconds"] for row in reversed(metrics) if "seconds" in row), None),
        analyses={name: found for name in analysis_names() if (found := _if_there(folder / "analysis" / f"{name}.json"))},
        evidence=_if_there(folder / "experimental_results.json") or {},
    )


def _if_there(path: Path) -> dict[str, Any] | None:
    return runs.read_json(path) if path.exists() else None


def _read_metrics(folder: Path) -> list[Json]:
    rows: list[Json] = [*runs.read_metrics(folder / "metrics.jsonl")]
    if not rows:
        raise UserError(f"{folder} has no metrics (metrics.jsonl is missing or empty): there is no training to report on")
    return rows
