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
import torch
from numpy.typing import NDArray
from torch import Tensor

from pnn import runs
from pnn.analysis.convergence import analyse_convergence
from pnn.analysis.evidence import EXPERIMENTS, chosen, perform, why_not
from pnn.analysis.evidence.subject import Subject
from pnn.analysis.gates import analyse_gates
from pnn.analysis.optimisation import analyse_optimisation
from pnn.analysis.rewrites import analyse_rewrites
from pnn.analysis.trace import Text
from pnn.config import DataConfig, EvaluationConfig
from pnn.data.batches import special_tokens
from pnn.data.corpora import open_source
from pnn.data.shards import Progress, TokenSet, prepare, prepare_source
from pnn.data.tokenizers import fingerprint
from pnn.errors import UserError
from pnn.evaluation.reading import Loaded, LoadedRun, load_any, load_run, text_of_a_bare_checkpoint
from pnn.files import write_json
from pnn.memory import give_back_freed_memory
from pnn.models.base import MaskedLMBase
from pnn.models.ddl import DDLForCausalLM
from pnn.runs import read_json

ANALYSES: dict[str, Callable[[MaskedLMBase, Text], dict[str, Any]]] = {
    "convergence": analyse_convergence,
    "gates": analyse_gates,
    "optimisation": analyse_optimisation,
}
DECODER_ANALYSES: dict[str, Callable[[DDLForCausalLM, Tensor, Any, int], dict[str, Any]]] = {"rewrites": analyse_rewrites}
SEQUENCES = 2188  # at most, unless asked otherwise: all of WikiText-103 valid
ROWS = 200  # of a decoder's text, much longer each
BATCH_TOKENS = 8192  # at most, unless asked otherwise: a trace keeps all that happens to a batch, 20 times its states


@dataclass(frozen=True)
class HeldOut:
    """The text that a run is analysed on: which sequences of which tokens, and in what batches."""

    tokens: TokenSet
    sequences: NDArray[np.int64]
    batch_tokens: int
    data: DataConfig
    mask_seed: int


@dataclass(frozen=True)
class Opened:
    """A masked model and its text."""

    loaded: LoadedRun
    text: Text
    folder: Path | None  # where results are kept

    @property
    def about(self) -> dict[str, Any]:
        """What stands at the head of every result."""
        masks = {"mask_probability": self.text.mask_probability, "mask_seed": self.text.mask_seed}
        return _about(self.loaded, self.text.tokens, len(self.text)) | masks

    def analyse(self, name: str) -> dict[str, Any]:
        return ANALYSES[name](self.loaded.model, self.text)


@dataclass(frozen=True)
class OpenedDecoder:
    """A decoder and rows of its text."""

    loaded: Loaded[Any]
    tokens: TokenSet
    rows: Tensor
    batch_rows: int
    folder: Path | None

    @property
    def about(self) -> dict[str, Any]:
        return _about(self.loaded, self.tokens, len(self.rows))

    def analyse(self, name: str) -> dict[str, Any]:
        return DECODER_ANALYSES[name](self.loaded.model, self.rows, self.loaded.tokenizer, self.batch_rows)


def _about(loaded: Loaded[Any], tokens: TokenSet, sequences: int) -> dict[str, Any]:
    return {
        "checkpoint": Path(loaded.checkpoint).name,
        "model_type": loaded.model.config.model_type,
        "source": tokens.manifest["name"],
        "sequences": sequences,
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
    held_out, folder = _held_out(run, loaded, data, sequences or SEQUENCES, batch_tokens, progress)
    text = Text(
        held_out.tokens,
        held_out.sequences,
        special_tokens(loaded.tokenizer),
        held_out.data.mask_probability,
        held_out.mask_seed,
        held_out.batch_tokens,
    )
    return Opened(loaded, text, out or folder)


def open_decoder(
    run: str | Path,
    *,
    progress: Progress,
    data: str | None = None,
    sequences: int | None = None,
    batch_tokens: int | None = None,
    out: Path | None = None,
    device: str | None = None,
) -> OpenedDecoder:
    loaded = load_any(run, device=device)
    if not isinstance(loaded.model, DDLForCausalLM):
        kind = type(loaded.model).__name__
        raise UserError(f"{loaded.checkpoint}: rewrites are those of a DDL decoder, and this is a {kind}")
    held_out, folder = _held_out(run, loaded, data, sequences or ROWS, batch_tokens, progress)
    ids = torch.from_numpy(held_out.tokens.take(held_out.sequences)).view(len(held_out.sequences), -1)
    return OpenedDecoder(loaded, held_out.tokens, ids, max(1, held_out.batch_tokens // ids.shape[1]), out or folder)


def _held_out(
    run: str | Path, loaded: Loaded[Any], data: str | None, sequences: int, batch_tokens: int | None, progress: Progress
) -> tuple[HeldOut, Path | None]:
    """RUN's held-out text, or `data`; and the run folder, if results belong there."""
    give_back_freed_memory()
    folder = runs.run_of(loaded.checkpoint) if isinstance(loaded.checkpoint, Path) else None
    config = runs.read_config(folder) if folder is not None else None
    settings = config.evaluation if config is not None else EvaluationConfig()
    treatment = config.data if config is not None else text_of_a_bare_checkpoint(loaded.model)
    if data is not None:
        tokens = prepare_source(open_source(data, treatment, "validation"), loaded.tokenizer, treatment, progress)
        chosen = np.arange(len(tokens))
    elif config is not None:
        prepared = prepare(treatment, progress)
        if fingerprint(prepared.tokenizer) != fingerprint(loaded.tokenizer):
            raise UserError(f"{loaded.checkpoint}: its tokenizer is not the one that the run's config names: they do not match")
        tokens, chosen = prepared.validation, prepared.validation_sequences
    else:
        raise UserError(f"{runs.without_text(run, loaded.checkpoint)}: say what to analyse it on with --data")
    if len(chosen[:sequences]) < 2:
        raise UserError("too little text to analyse: intervals need two sequences or more")
    keeps = folder is not None and Path(run).resolve() == folder and data is None
    batch = batch_tokens or min(settings.batch_tokens, BATCH_TOKENS)
    held_out = HeldOut(tokens, chosen[:sequences], batch, treatment, settings.mask_seed)
    return held_out, folder if keeps else None


def analyse(opened: Opened | OpenedDecoder, name: str) -> dict[str, Any]:
    result = {**opened.about, **opened.analyse(name)}
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
