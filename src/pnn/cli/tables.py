"""Results as tables on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def print_evaluation(results: dict[str, dict[str, Any]]) -> None:
    """One row per run and text: accuracy after each refinement step, the last with its interval, all in per cent. A BERT
    baseline has no steps to show: its head is trained on the last layer alone."""
    rows = []
    for name, result in results.items():
        measured = {"validation": result} if "accuracy" in result else {}
        for label, one in (measured | result.get("sets", {})).items():
            steps = one["accuracy_by_step"][:-1] if result["model_type"] == "pnn" else []
            rows.append((f"{name}: {label}" if len(results) > 1 else label, steps, one))
    width = max(len(steps) for _, steps, _ in rows)
    table = Table(title="accuracy after each refinement step, per cent", title_justify="left")
    table.add_column("text", no_wrap=True)
    for step in range(width):
        table.add_column(str(step), justify="right")
    table.add_column("end", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("best possible", justify="right")
    for label, steps, one in rows:
        low, high = one["accuracy_interval"]
        cells = [percent(value) for value in steps] + [""] * (width - len(steps))
        ceiling = percent(one["ceiling"]) if "ceiling" in one else ""
        table.add_row(label, *cells, percent(one["accuracy"]), f"{percent(low)}–{percent(high)}", ceiling)
    Console().print(table)
