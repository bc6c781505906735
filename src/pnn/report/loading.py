"""Reading run folders: everything that the page says comes from here."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pnn import runs
from pnn.config import RunConfig
from pnn.data.run_tokens import recorded
from pnn.data.tally import Tally
from pnn.errors import UserError
from pnn.figures.anatomy import anatomy
from pnn.kinds import Kind, of_result
from pnn.results import CausalEvaluation, Evaluation, Json, MaskedEvaluation, Refining, SequenceTotals, median_speed
from pnn.studies.registry import analysis_names

BY_STEP = ("accuracy_by_step", "accuracy_by_step_interval", "loss_by_step")
E = TypeVar("E", MaskedEvaluation, CausalEvaluation)


@dataclass(frozen=True)
class Run(Generic[E]):
    name: str
    config: RunConfig
    model: Json | None  # the checkpoint's config.json; results may be passed on without their checkpoints
    environment: Json
    metrics: list[Json]
    evaluation: E
    seconds: float | None  # of training, without evaluation and saving
    by_sequence: SequenceTotals | None = None  # of this evaluation; runs evaluated by older versions have none
    analyses: dict[str, Json] = field(default_factory=dict)  # analysis/<name>.json by name
    evidence: Json = field(default_factory=dict)  # experimental_results.json
    tokens: Json = field(default_factory=dict)  # tokens.json; runs of earlier versions have none
    refining: Refining | None = None  # of one held-out text; likewise

    @property
    def kind(self) -> Kind:
        return of_result(self.evaluation)

    @property
    def is_refiner(self) -> bool:
        return self.kind.has_steps

    def trained_to_be_read(self, step: int) -> bool:
        """Whether a loss was taken after this step: after the last always, and of a PNN where its step has weight."""
        last, weights = self.evaluation.get("num_steps"), self.config.model.get("step_weights")
        return step == last or (self.is_refiner and step > 0 and (weights is None or weights[step - 1] > 0))

    @property
    def is_decoder(self) -> bool:
        return self.kind.causal

    @property
    def updates(self) -> int:
        return int(self.metrics[-1]["step"])

    @property
    def tokens_per_second(self) -> float | None:
        return median_speed(self.metrics)

    @property
    def can_be_drawn(self) -> bool:
        return self.model is not None and (kind := of_result(self.model)).ours and kind.masked

    def text_left_out(self) -> list[str]:
        """What of its text did not become tokens, as far as that was counted. A tail is held out of the same text."""
        counted = {entry["folder"]: (name, entry) for name, entry in self.tokens.items() if entry["text"] is not None}
        said = []
        for name, entry in counted.values():
            sentence = Tally(**entry["text"]).sentence(entry["recipe"]["max_length"]) or "no line was filtered or cut"
            said.append(f"The {'' if len(counted) == 1 else name + ' '}text: {sentence}.")
        return said

    @property
    def evaluated_model(self) -> Json | None:
        """With as many steps as were evaluated: `pnn calibrate` may have chosen fewer since."""
        if self.model is None or "num_steps" not in self.model:
            return self.model
        return {**self.model, "num_steps": self.evaluation.get("num_steps", self.model["num_steps"])}

    def describe(self) -> str:
        """In words: PNN, one refiner applied 4 times."""
        if self.is_decoder:
            return self._describe_decoder()
        if self.can_be_drawn and self.evaluated_model is not None:
            return f"{self.kind.family}, {anatomy(self.evaluated_model).describe()}"
        return f"{self.kind.family}, {self.evaluation.get('num_steps')} {self.kind.unit}s"

    def _describe_decoder(self) -> str:
        """In words: delta residual, 4 channels, channel compressor, 12 layers."""
        model = self.model or {}
        if self.evaluated_model is not None and self.kind.has_steps:
            return f"{self.kind.family}, {anatomy(self.evaluated_model).describe()}"
        if "residual" not in model:
            return self.kind.family
        channels = model["value_channels"]
        state = "a vector state" if channels == 1 else f"{channels} channels, {model['compressor']} compressor"
        layers = f"{model['num_hidden_layers']} layers" + (f" × {rounds}" if (rounds := model.get("num_rounds", 1)) > 1 else "")
        return f"{model['residual'].replace('_', '-')} residual, {state}, {layers}"


MaskedRun = Run[MaskedEvaluation]
DecoderRun = Run[CausalEvaluation]


def load_runs(folders: Sequence[Path]) -> list[Run[Any]]:
    if not folders:
        raise UserError("a report needs at least one run folder")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("the same run folder was given twice")
    names = runs.short_names([folder.resolve() for folder in folders])
    return [_load(folder, name) for folder, name in zip(folders, names, strict=True)]


def _load(folder: Path, name: str) -> Run[Any]:
    config = runs.read_config(folder)
    evaluate = f"`pnn evaluate {shlex.quote(str(folder))}`"
    if not (folder / "evaluation.json").exists():
        raise UserError(f"{folder} has no evaluation.json: let its training finish, or run {evaluate}")
    again = f"run {evaluate} again"
    evaluation = runs.read_json(folder / "evaluation.json")
    needed = "perplexity" if config.kind.causal else "accuracy_by_step"
    if isinstance(evaluation, dict) and needed not in evaluation:
        raise UserError(f"{folder / 'evaluation.json'} holds no {needed}: {again}")
    runs.read_result(folder / "evaluation.json", CausalEvaluation if config.kind.causal else MaskedEvaluation, again)
    if not config.kind.causal and len({len(evaluation[key]) for key in BY_STEP}) > 1:
        raise UserError(f"{folder / 'evaluation.json'} is damaged (its steps are not equally many): {again}")
    metrics = _read_metrics(folder)
    return Run(
        name=name,
        config=config,
        model=_if_there(folder / "checkpoints" / "best" / "config.json"),
        environment=_if_there(folder / "environment.json", dict[str, Any], "remove it to go on without") or {},
        metrics=metrics,
        evaluation=evaluation,
        seconds=next((row["seconds"] for row in reversed(metrics) if "seconds" in row), None),
        analyses={name: found for name in analysis_names() if (found := _if_there(folder / "analysis" / f"{name}.json"))},
        by_sequence=_totals(folder, evaluation, again),
        evidence=_if_there(folder / "experimental_results.json") or {},
        tokens=recorded(folder),
        refining=_if_there(folder / runs.REFINING, Refining, again),
    )


def _totals(folder: Path, evaluation: Evaluation, again: str) -> SequenceTotals | None:
    """The sequences' totals, if they are those of this evaluation."""
    totals: SequenceTotals | None = (_if_there(folder / runs.BY_SEQUENCE, dict[str, SequenceTotals], again) or {}).get(
        "validation"
    )
    if totals is None or sum(totals["targets"]) != evaluation["targets"]:
        return None
    right = sum(totals["correct"]) / evaluation["targets"]
    return totals if abs(right - evaluation["accuracy"]) < 1e-9 else None


def _if_there(path: Path, kind: Any = Any, again: str = "") -> Any:
    return runs.read_result(path, kind, again) if path.exists() else None


def _read_metrics(folder: Path) -> list[Json]:
    rows: list[Json] = [*runs.read_metrics(folder / "metrics.jsonl", ["step"])]
    if not rows:
        raise UserError(f"{folder} has no metrics (metrics.jsonl is missing or empty): there is no training to report on")
    return rows
