"""Rows that say how the cost of training grows: one thing varied at a time around a config's own shape.

    tokens     batch_size and effective_batch_size together, a quarter to four times the config's
    width      hidden_size, intermediate_size and heads together (heads keep their size), half to twice
    steps      refinement steps of a PNN, layers of a BERT, a quarter to twice
    processes  one and two, of one thread or one GPU each

A row's `varies` says which; the config's own shape is the `base` of the first three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pnn.bench.processes import process_name, processes_row
from pnn.bench.timing import Budget
from pnn.bench.training import train_row
from pnn.config import RunConfig
from pnn.models.sections import model_config

TOKENS = (0.25, 0.5, 2, 4)
WIDTHS = (0.5, 2)
STEPS = (0.25, 0.5, 2)
PROCESSES = (1, 2)


def jobs(run: RunConfig, budget: Budget) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    yield "base", partial(scaled_row, run, budget, "base", "base")
    for axis, factors, variant in (
        ("tokens", TOKENS, with_tokens),
        ("width", WIDTHS, with_width),
        ("steps", STEPS, with_steps),
    ):
        for factor in factors:
            changed = variant(run, factor)
            if changed is not None:
                name = f"{axis} × {factor:g}"
                yield name, partial(scaled_row, changed, budget, name, axis)
    if run.training.batch_size % max(PROCESSES) == 0:
        for count in PROCESSES:
            yield process_name(count), partial(shared_row, run, budget, count)


def scaled_row(run: RunConfig, budget: Budget, name: str, varies: str) -> dict[str, Any]:
    return train_row(run, budget, name) | {"what": "scaling", "varies": varies}


def shared_row(run: RunConfig, budget: Budget, count: int) -> dict[str, Any]:
    return processes_row(run, budget, count) | {"varies": "processes"}


def with_tokens(run: RunConfig, factor: float) -> RunConfig | None:
    sizes = [getattr(run.training, key) * factor for key in ("batch_size", "effective_batch_size")]
    if not all(size.is_integer() and size >= 1 for size in map(float, sizes)):
        return None
    return replace(run, training=replace(run.training, batch_size=int(sizes[0]), effective_batch_size=int(sizes[1])))


def with_width(run: RunConfig, factor: float) -> RunConfig | None:
    config = model_config(run.model)
    widths = ("hidden_size", "intermediate_size", "num_attention_heads", "embedding_size")
    sizes = {key: getattr(config, key) * factor for key in widths if getattr(config, key, None) is not None}
    if not all(size.is_integer() for size in map(float, sizes.values())):
        return None
    return replace(run, model=run.model | {key: int(size) for key, size in sizes.items()})


def _within(guesses: list[int] | None, steps: int) -> list[int] | None:
    return [step for step in guesses or () if step < steps] or None


def with_steps(run: RunConfig, factor: float) -> RunConfig | None:
    config = model_config(run.model)
    if run.kind.type == "bert":
        layers = config.num_hidden_layers * factor
        return replace(run, model=run.model | {"num_hidden_layers": int(layers)}) if layers >= 1 else None
    steps = int(config.num_steps * factor)
    try:
        schedule = config.order(steps)
    except ValueError:  # its repeated part does not come out at so many
        return None
    if sorted(set(schedule)) != list(range(len(set(schedule)))) or not schedule:  # too short for its refiners
        return None
    changes = {
        "num_steps": steps,
        "schedule": schedule,
        "step_weights": None,
        "random_steps": None,
        "guess_after": _within(config.guess_after, steps),
    }
    return replace(run, model=run.model | changes)
