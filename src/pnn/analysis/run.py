"""From a run folder or checkpoint to results: load the model, choose its held-out text, analyse, write JSON.

A run folder keeps what is found (analysis/<name>.json, experimental_results.json). A bare checkpoint has no text of its own:
`data` says which, and the result is returned and not kept unless `out` names a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pnn import runs
from pnn.analysis.convergence import analyse_convergence
from pnn.analysis.evidence import EXPERIMENTS, chosen, perform, why_not
from pnn.analysis.evidence.subject import Subject
from pnn.analysis.gates import analyse_gates
from pnn.analysis.optimisation import analyse_optimisation
from pnn.analysis.trace import Text
from pnn.config import DataConfig, EvaluationConfig
from pnn.data.batches import special_tokens
from pnn.data.corpora import open_source
from pnn.data.shards import Progress, prepare, prepare_source
from pnn.data.tokenizers import fingerprint
from pnn.errors import UserError
from pnn.evaluation.reading import LoadedRun, load_run
from pnn.files import write_json
from pnn.models.base import MaskedLMBase
from pnn.runs import read_json

ANALYSES: dict[str, Callable[[MaskedLMBase, Text], dict[str, Any]]] = {
    "convergence": analyse_convergence,
    "gates": analyse_gates,
    "optimisation": analyse_optimisation,
}
SEQUENCES = 2188  # at most, unless asked otherwise: all of WikiText-103 valid


@dataclass(frozen=True)
class Opened:
    loaded: LoadedRun
    text: Text
    folder: Path | None  # where results are kept

    @property
    def about(self) -> dict[str, Any]:
        """What stands at the head of every result."""
        return {
            "checkpoint": Path(self.loaded.checkpoint).name,
            "model_type": self.loaded.model.config.model_type,
            "source": self.text.tokens.manifest["name"],
            "sequences": len(self.text),
            "mask_probability": self.text.mask_probability,
            "mask_seed": self.text.mask_seed,
        }


def open_run(
    run: str | Path,
    *,
    progress: Progress,
    data: str | None = None,
    sequences: int | None = None,
    batch_tokens: int | None = None,
    out: Path | None = None,
    device: str | None = None,
) -> Opened:
    loaded = load_run(run, device=device)
    folder = runs.run_of(loaded.checkpoint) if isinstance(loaded.checkpoint, Path) else None
    config = runs.read_config(folder) if folder is not None else None
    settings = config.evaluation if config is not None else EvaluationConfig()
    treatment = config.data if config is not None else DataConfig(max_length=loaded.model.config.max_position_embeddings)
    if data is not None:
        tokens = prepare_source(open_source(data, treatment, "validation"), loaded.tokenizer, treatment, progress)
        held_out = np.arange(len(tokens))
    elif config is not None:
        prepared = prepare(treatment, progress)
        if fingerprint(prepared.tokenizer) != fingerprint(loaded.tokenizer):
            raise UserError(f"{loaded.checkpoint}: its tokenizer is not the one that the run's config names: they do not match")
        tokens, held_out = prepared.validation, prepared.validation_sequences
    else:
        raise UserError(f"{run} is a checkpoint without a run folder: say what to analyse it on with --data")
    text = Text(
        tokens,
        held_out[: SEQUENCES if sequences is None else sequences],
        special_tokens(loaded.tokenizer),
        treatment.mask_probability,
        settings.mask_seed,
        batch_tokens or settings.batch_tokens,
    )
    if len(text) < 2:
        raise UserError("too little text to analyse: intervals need two sequences or more")
    keeps = folder is not None and Path(run).resolve() == folder and data is None
    return Opened(loaded, text, out or (folder if keeps else None))


def analyse(opened: Opened, name: str) -> dict[str, Any]:
    result = {**opened.about, **ANALYSES[name](opened.loaded.model, opened.text)}
    if opened.folder is not None:
        (opened.folder / "analysis").mkdir(parents=True, exist_ok=True)
        write_json(opened.folder / "analysis" / f"{name}.json", result)
    return result


def collect_evidence(opened: Opened, names: list[str] | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Experiments by name, or all. The file keeps those that were done before and is rewritten after each."""
    wanted, subject = chosen(names), Subject(opened.loaded.model, opened.text)
    for name in wanted if names and "all" not in names else []:
        reason = why_not(EXPERIMENTS[name], subject)
        if reason:
            raise UserError(f"--experiment {name}: {reason}")
    path = None if opened.folder is None else opened.folder / "experimental_results.json"
    results: dict[str, Any] = {"about": opened.about}
    if path is not None and path.exists():
        before = read_json(path)
        if before.get("about") == opened.about:  # the same model and text: what was found still holds
            results = before
    if opened.folder is not None:
        opened.folder.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        progress(name)
        results[EXPERIMENTS[name].key] = perform(name, subject)
        if path is not None:
            write_json(path, results)
    return results
