"""Data, recipe and machine of every run, side by side; what is the same for all is written once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pnn.report.loading import Run
from pnn.report.markup import Html, cell, scrolling, tag
from pnn.runs import FREE_ON_RESUME, flat

BOOKKEEPING = ("architectures", "transformers_version", "dtype", "model_type")  # of config.json: nothing about the model


def recipe_differences(runs: Sequence[Run[Any]]) -> list[str]:
    """Settings but the model's that could change the result and are not the same in all runs, with their values. The
    model is left out: to differ in it is the point of a comparison."""
    parts = ("data", "training", "plasticity")
    each = [flat({key: c[key] for key in parts if c.get(key)}) for c in (run.config.to_dict() for run in runs)]
    keys = [key for key in dict.fromkeys(key for settings in each for key in settings) if key not in FREE_ON_RESUME]
    values = {key: [_write(settings.get(key)) for settings in each] for key in keys}
    return [f"{key} ({', '.join(written)})" for key, written in values.items() if len(set(written)) > 1]


def settings_table(runs: Sequence[Run[Any]]) -> Html:
    parts = []
    for heading, each in _groups(runs).items():
        keys = list(dict.fromkeys(key for settings in each for key in settings))
        if keys:
            parts.append(tag("tr", tag("th", heading, colspan=len(runs) + 1, scope="rowgroup"), class_="group"))
            parts += [_row(key, [settings.get(key) for settings in each]) for key in keys]
    names = tag("tr", tag("td"), *(tag("th", run.name, scope="col") for run in runs))
    return scrolling("settings", tag("table", tag("thead", names), tag("tbody", *parts), class_="settings"))


def _groups(runs: Sequence[Run[Any]]) -> dict[str, list[dict[str, Any]]]:
    """Heading → one flat mapping a run."""
    configs = [run.config.to_dict() for run in runs]
    models = [{k: v for k, v in (run.model or run.config.model).items() if k not in BOOKKEEPING} for run in runs]
    return {
        "Model": [flat(model) for model in models],
        "Data": [flat(config["data"]) for config in configs],
        "Training": [flat(config["training"]) for config in configs],
        "Plasticity": [flat(config.get("plasticity") or {}) for config in configs],
        "Evaluation": [flat(config["evaluation"]) for config in configs],
        "Machine": [flat(run.environment) for run in runs],
    }


def _row(key: str, values: list[Any]) -> Html:
    written = [_write(value) for value in values]
    if len(set(written)) == 1:
        return tag("tr", tag("th", key, scope="row"), cell(written[0], colspan=len(values)))
    return tag("tr", tag("th", key, scope="row"), *map(cell, written), class_="differs")


def _write(value: Any) -> str:
    if value is None or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
