"""From a MODEL's name and names of text to a cycle, scores, or a model with other heads: what the commands call.

A MODEL is a run folder, a checkpoint folder (reorganised or not), or a hub name. Weights are taken in fp32, whatever they were
stored in: scores and growth compare small differences, and learning adds small updates.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pnn.data.shards import Progress
from pnn.errors import UserError
from pnn.memory import out_of_memory_says
from pnn.models.loading import Loaded, load_any
from pnn.plasticity.architectures import architecture_of
from pnn.plasticity.cycle import cycle
from pnn.plasticity.growth import grow, propose
from pnn.plasticity.heads import head_map, heads, original_counts
from pnn.plasticity.journal import check_free
from pnn.plasticity.models import HISTORY, save
from pnn.plasticity.phases import prune_heads
from pnn.plasticity.scores import Scores, score
from pnn.plasticity.settings import CycleSettings, check
from pnn.plasticity.text import Text, read_text
from pnn.progress import say
from pnn.runs import read_json

WITHOUT_TEXT = ("magnitude", "random", "balanced")
SCORE_ROWS = CycleSettings.score_rows
BATCH_ROWS = CycleSettings.batch_rows
LEVEL = 1e-5  # of a score: so close are two that rounding alone keeps apart


def open_model(model: str) -> Loaded[Any]:
    loaded = load_any(model)
    architecture_of(loaded.model)
    return replace(loaded, model=loaded.model.float().eval())


def run_cycle(
    model: str,
    data: str,
    output: Path,
    settings: CycleSettings,
    *,
    validation: str | None = None,
    length: int | None = None,
    held_out_rows: int = 64,
    resume: bool = False,
    progress: Progress,
) -> None:
    """The whole cycle, in a run folder."""
    check_free(output, resume)
    loaded = open_model(model)
    check(loaded.model, settings)
    text = read_text(
        loaded.model,
        loaded.tokenizer,
        data,
        validation=validation,
        length=length,
        train_rows=settings.rows_needed(),
        held_out_rows=held_out_rows,
        progress=progress,
    )
    name = Path(model).resolve().name if Path(model).exists() else model
    with out_of_memory_says(lambda: what_needs_less(settings.batch_rows, text, settings.teacher)):
        cycle(loaded.model, text, output, settings, tokenizer=loaded.tokenizer, name=name, resume=resume, quiet=False)


def what_needs_less(rows: int, text: Text, teacher: str) -> str:
    """Memory, of learning in updates of so many rows."""
    length = text.train.shape[1]
    less = f"--batch-size {rows // 2}" if rows > 1 else f"--max-length {length // 2}"
    alone = "" if teacher == "none" else ", and --teacher none holds one model less"
    return f"with updates of {rows} rows of {length:,} tokens: {less} needs half{alone}"


def run_score(
    model: str, data: str | None, method: str, *, length: int | None, seed: int, progress: Progress
) -> dict[str, Any]:
    loaded = open_model(model)
    scores = _scores(loaded, data, method, length, seed, progress)
    return {
        "model": model,
        "method": method,
        "highest_go": scores.highest_go,
        "head_map": head_map(loaded.model),
        "scores": [{"layer": layer, "head": index, "score": value} for (layer, index), value in scores.items()],
    }


def run_prune(
    model: str,
    data: str | None,
    output: Path,
    *,
    ratio: float,
    method: str,
    per_layer: bool,
    whole_layers: bool,
    length: int | None,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """A smaller model in a new folder."""
    check_free(output)
    settings = CycleSettings(prune=ratio, grow=0, prune_by=method, per_layer=per_layer, whole_layers=whole_layers)
    loaded = open_model(model)
    check(loaded.model, settings)
    scores = _scores(loaded, data, method, length, seed, progress)
    smaller, gone = prune_heads(loaded.model, scores, settings)
    made = changed(loaded.model, smaller, "pruned", gone)
    asked = {"by": method, "share": ratio, "data": None if method in WITHOUT_TEXT else data, "seed": seed}
    save(smaller, output, loaded.tokenizer, history_with(model, loaded, {**asked, **made}))
    return made


def run_grow(
    model: str,
    data: str | None,
    output: Path,
    *,
    ratio: float,
    method: str,
    init: str,
    beyond: int,
    length: int | None,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    """A larger model in a new folder."""
    check_free(output)
    settings = CycleSettings(prune=0, grow=ratio, grow_by=method, init=init, beyond=beyond)
    loaded = open_model(model)
    check(loaded.model, settings)
    if method == "importance":
        raise UserError("--by importance needs the scores of heads when they were pruned, which only a whole cycle has")
    batches = None if method in WITHOUT_TEXT else _batches(loaded, data, method, length, progress)
    new = propose(loaded.model, ratio, method, batches, beyond=beyond, seed=seed)
    larger = grow(loaded.model, new, init, seed=seed)
    made = changed(loaded.model, larger, "grown", new)
    asked = {"by": method, "share": ratio, "init": init, "data": None if method in WITHOUT_TEXT else data, "seed": seed}
    save(larger, output, loaded.tokenizer, history_with(model, loaded, {**asked, **made}))
    return made


def _scores(loaded: Loaded[Any], data: str | None, method: str, length: int | None, seed: int, progress: Progress) -> Scores:
    batches = None if method in WITHOUT_TEXT else _batches(loaded, data, method, length, progress)
    scores = score(loaded.model, batches, method, seed=seed)
    if layers := level_layers(scores):
        where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(map(str, layers))}"
        say(f"note: by {method} all heads of {where} are worth the same: --by contribution may tell them apart")
    return scores


def level_layers(scores: Scores) -> list[int]:
    """Layers whose heads, two or more, all have one score, but for rounding."""
    of_layer: dict[int, list[float]] = {}
    for (layer, _), value in scores.items():
        of_layer.setdefault(layer, []).append(value)
    return [
        layer
        for layer, values in of_layer.items()
        if len(values) > 1 and max(values) - min(values) <= LEVEL * max(map(abs, values))
    ]


def _batches(
    loaded: Loaded[Any], data: str | None, method: str, length: int | None, progress: Progress
) -> list[dict[str, Tensor]]:
    if data is None:
        raise UserError(f"--by {method} needs text to score heads on: name it with --data")
    text = read_text(loaded.model, loaded.tokenizer, data, length=length, train_rows=SCORE_ROWS, progress=progress)
    return list(text.batches(text.train, BATCH_ROWS))


def history_with(model: str, loaded: Loaded[Any], change: dict[str, Any]) -> dict[str, Any]:
    """What was done to a model, this last, and which one it was at first."""
    before = Path(loaded.checkpoint) / HISTORY
    held = read_json(before) if before.exists() else {"source": model, "changes": []}
    return {**held, "changes": [*held["changes"], change]}


def changed(before: Any, after: Any, what: str, which: list[tuple[int, int]]) -> dict[str, Any]:
    return {
        what: [{"layer": layer, "head": index} for layer, index in which],
        "heads": len(heads(after)),
        "heads_before": len(heads(before)),
        "original_heads": sum(original_counts(after)),
        "head_map": head_map(after),
        "parameters": sum(p.numel() for p in after.parameters()),
        "parameters_before": sum(p.numel() for p in before.parameters()),
    }
