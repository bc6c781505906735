"""The tab *Runs*: how the named runs went, side by side, and how far those are that still train.

Only what a run wrote about itself is read (config.yaml, metrics.jsonl, evaluation.json), and only of the runs that were named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from pnn.errors import UserError
from pnn.explore.subjects import computing
from pnn.figures.decoders import decoder_curves
from pnn.figures.style import svg
from pnn.figures.training import training_curves
from pnn.numbers import count, per_cent, short_count, written
from pnn.report.markup import Html, table, tag
from pnn.results import Json, median_speed
from pnn.runs import is_cycle, is_finished, read_config, read_json, read_metrics, short_names

FILES = ("config.yaml", "metrics.jsonl", "evaluation.json")
STILL = 120.0  # seconds without a line after which a run is taken to have stopped

Seen = tuple[tuple[str, float, bool], ...]  # the runs' files, when they were last written, and whether that was just now


def expanded(names: Sequence[str]) -> list[str]:
    """A folder that holds runs stands for all of them."""
    found: list[str] = []
    for path in map(Path, names):
        is_one = any(path.glob("config.*"))  # a run or a checkpoint
        inside = [] if is_one else sorted(path.glob("*/config.yaml")) or sorted(path.glob("*/*/config.yaml"))
        found += [str(one.parent) for one in inside] or [str(path)]
    return found


def named_runs(names: Sequence[str]) -> list[Path]:
    """Those of the names that are run folders."""
    return [path for path in map(Path, names) if (path / "config.yaml").exists() and not is_cycle(path)]


def seen(runs: Sequence[Path]) -> Seen:
    """Changes whenever a run writes something, or has not done so for long."""
    written = {file: file.stat().st_mtime for run in runs for name in FILES if (file := run / name).exists()}
    return tuple((str(file), when, time.time() - when < STILL) for file, when in written.items())


@lru_cache(maxsize=4)  # drawn once for everybody who looks
def overview(runs: tuple[Path, ...], seen: Seen) -> Html:
    """`seen` is only what the answer is remembered by."""
    masked: dict[str, list[Json]] = {}
    causal: dict[str, list[Json]] = {}
    rows, problems = [], []
    for name, run in zip(short_names(runs), runs, strict=True):
        try:
            config, metrics = read_config(run), read_metrics(run / "metrics.jsonl")
            evaluation = read_json(run / "evaluation.json") if (run / "evaluation.json").exists() else None
            state = _state(run, evaluation)
        except UserError as error:
            problems.append(tag("p", str(error), class_="problem"))
            continue
        (causal if config.kind.causal else masked)[name] = metrics
        rows.append([name, *_row(metrics, evaluation, config.kind.causal, config.training.max_steps, state)])
    head = ["run", "state", "updates", "training loss", "held-out text", "parameters", "tokens per second"]
    pictures = []
    with computing:  # matplotlib's settings are everybody's
        for of_kind, draw in ((masked, training_curves), (causal, decoder_curves)):
            drawn = {name: metrics for name, metrics in of_kind.items() if metrics}
            if drawn:
                picture = Html(svg(draw(drawn)).decode())
                pictures.append(tag("div", picture, **_scrolling("curves", f"Training curves of {', '.join(drawn)}")))
    whole = tag("div", table(head, rows), **_scrolling("comparison runs", "All runs in a table"))
    return tag("div", *problems, whole, *pictures)


def _scrolling(kind: str, label: str) -> dict[str, object]:
    """On a phone these are wider than the screen, and keys must reach what is hidden."""
    return {"class_": kind, "tabindex": 0, "role": "region", "aria_label": label}


def _state(run: Path, evaluation: Json | None) -> str:
    if evaluation is not None and is_finished(run):
        return "finished"
    file = run / "metrics.jsonl"
    return "training" if file.exists() and time.time() - file.stat().st_mtime < STILL else "not finished"


def _row(metrics: list[Json], evaluation: Json | None, causal: bool, planned: int | None, state: str) -> list[str]:
    """What the table says of a run behind its name; a dash where it has not come so far."""

    def last(key: str) -> float | None:
        return next((row[key] for row in reversed(metrics) if key in row), None)

    step, loss, speed = last("step"), last("last_step_loss"), median_speed(metrics)
    if causal:
        held_out = evaluation["perplexity"] if evaluation else last("validation_perplexity")
        told = None if held_out is None else f"perplexity {written(held_out, 2)}"
    else:
        held_out = evaluation["accuracy"] if evaluation else last("validation_accuracy")
        told = None if held_out is None else f"{per_cent(held_out)} right"
    done = "–" if step is None else count(step) if planned is None else f"{count(step)} of {count(planned)}"
    size = "–" if evaluation is None else short_count(evaluation["parameters"])
    return [
        state,
        done,
        "–" if loss is None else written(loss, 3),
        told or "–",
        size,
        "–" if speed is None else short_count(speed),
    ]
