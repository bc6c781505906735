"""Results as tables on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def print_evaluation(results: dict[str, dict[str, Any]]) -> None:
    """One row per run and set: accuracy after each step, in per cent, the last with its interval."""
    rows = [
        (f"{name}, {label}", measured)
        for name, result in results.items()
        for label, measured in ([("validation", result)] if "accuracy" in result else []) + list(result.get("sets", {}).items())
    ]
    steps = max(len(measured["accuracy_by_step"]) for _, measured in rows)
    table = Table(title="accuracy after each step, per cent", title_justify="left")
    table.add_column("run, text")
    for step in range(steps):
        table.add_column(str(step), justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("best possible", justify="right")
    for name, measured in rows:
        cells = [percent(value) for value in measured["accuracy_by_step"]]
        cells += [""] * (steps - len(cells))
        low, high = measured["accuracy_interval"]
        ceiling = percent(measured["ceiling"]) if "ceiling" in measured else ""
        table.add_row(name, *cells, f"{percent(low)}–{percent(high)}", ceiling)
    Console().print(table)
