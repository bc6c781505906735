"""From a run folder or checkpoint to results: load the model, choose its held-out text, analyse, write JSON.

A run folder keeps what is found: analysis/<name>.json and experimental_results.json; of other text (`data`), under a name that
says which, analysis/<name>_on_<text>.json. A bare checkpoint has no text of its own: `data` says which, and the result is
returned and not kept unless `out` names a folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pnn.analysis.subject import Decoder, Subject
from pnn.analysis.trace import Text
from pnn.data.batches import special_tokens
from pnn.data.shards import Progress
from pnn.errors import UserError
from pnn.evaluation.reading import reading_of, text_to_measure
from pnn.files import make_folder, write_json
from pnn.memory import give_back_freed_memory
from pnn.models.loading import Loaded, load_decoder, load_run
from pnn.runs import read_json
from pnn.studies.registry import analysis, chosen_experiments, experiment_names, experiments, module, why_not

SEQUENCES = 2188  # at most, unless asked otherwise: all of WikiText-103 valid
ROWS = 200  # of a decoder's text, much longer each
BATCH_TOKENS = 8192  # at most, unless asked otherwise: a trace keeps all that happens to a batch, 20 times its states


@dataclass(frozen=True)
class Opened:
    """A model with its text."""

    subject: Any  # a Subject or a Decoder, as the analysis asks for
    about: dict[str, Any]  # what stands at the head of every result
    folder: Path | None  # where results are kept
    on: str = ""  # what a file's name says of other text


def open_run(
    run: str | Path,
    name: str | None = None,
    *,
    progress: Progress,
    data: str | None = None,
    sequences: int | None = None,
    batch_tokens: int | None = None,
    out: Path | None = None,
    device: str | None = None,
) -> Opened:
    """RUN's model and held-out text, for the analysis of this name; without one, a masked model for any experiment. A model
    that the analysis cannot take is told before any text is read."""
    causal = name is not None and analysis(name).kind == "causal"
    loaded: Loaded[Any] = load_decoder(run, device=device) if causal else load_run(run, device=device)
    if name is not None:
        check(name, loaded.model)
    give_back_freed_memory()
    reading = reading_of(loaded)
    tokens, chosen = text_to_measure(run, loaded, reading, data, "analyse it on", progress)
    chosen = chosen[: sequences or (ROWS if causal else SEQUENCES)]
    if len(chosen) < 2:
        raise UserError("too little text to analyse: intervals need two sequences or more")
    batch = batch_tokens or min(reading.evaluation.batch_tokens, BATCH_TOKENS)
    folder = out or (reading.folder if reading.folder == Path(run).resolve() else None)
    about = {
        "checkpoint": Path(loaded.checkpoint).name,
        "model_type": loaded.model.config.model_type,
        **({"num_steps": steps} if (steps := getattr(loaded.model.config, "num_steps", None)) is not None else {}),
        "source": tokens.manifest["name"],
        "sequences": len(chosen),
    }
    if causal:
        rows = torch.from_numpy(tokens.take(chosen)).view(len(chosen), -1)
        decoder = Decoder(loaded.model, rows, loaded.tokenizer, max(1, batch // rows.shape[1]))
        return Opened(decoder, about, folder, _on(data, out))
    masks: dict[str, Any] = {"mask_probability": reading.data.mask_probability, "mask_seed": reading.evaluation.mask_seed}
    text = Text(tokens, chosen, special_tokens(loaded.tokenizer), **masks, batch_tokens=batch)
    return Opened(Subject(loaded.model, text, loaded.tokenizer), about | masks, folder, _on(data, out))


def _on(data: str | None, out: Path | None) -> str:
    """In a run's own folder, results of other text must not take the place of its own."""
    return "" if data is None or out is not None else "_on_" + re.sub(r"[^\w.-]+", "_", data).strip("_.")[-80:]


@torch.no_grad()
def perform(name: str, subject: Any) -> dict[str, Any]:
    """The result of an analysis or experiment. What cannot be done on this model says why and has no verdict."""
    reason = why_not(name, subject.model)
    found: dict[str, Any] = {"not_done": reason} if reason else module(name).run(subject)
    return {"experiment": name, **found} if name in experiment_names() else found


def check(name: str, model: Any) -> None:
    reason = why_not(name, model)
    if reason:
        raise UserError(f"analyze {name}: {reason}")


def analyse(opened: Opened, name: str) -> dict[str, Any]:
    check(name, opened.subject.model)
    result = {**opened.about, **perform(name, opened.subject)}
    if opened.folder is not None:
        make_folder(opened.folder / "analysis")
        write_json(opened.folder / "analysis" / f"{name}{opened.on}.json", result)
    return result


def _same(before: dict[str, Any] | None, about: dict[str, Any]) -> bool:
    """The same model and text; what older versions did not write down is taken to be the same."""
    return before is not None and before == {key: value for key, value in about.items() if key in before}


def collect_evidence(opened: Opened, names: list[str] | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Experiments by name, or all. The file keeps those that were done before and is rewritten after each."""
    wanted, suite = chosen_experiments(names), experiments()
    for name in wanted if names and "all" not in names else []:
        reason = why_not(name, opened.subject.model)
        if reason:
            raise UserError(f"--experiment {name}: {reason}")
    path = None if opened.folder is None else opened.folder / f"experimental_results{opened.on}.json"
    results: dict[str, Any] = {"about": opened.about}
    if path is not None and path.exists():
        before = read_json(path)
        if _same(before.get("about"), opened.about):  # the same model and text: what was found still holds
            results = before
    if opened.folder is not None:
        make_folder(opened.folder)
    for name in wanted:
        progress(name)
        results[suite[name].key] = perform(name, opened.subject)
        if path is not None:
            write_json(path, results)
    return results
