"""Findings as a table on a terminal: what was asked, what was measured, and the verdict that follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

COLOURS = {"supported": "green", "not supported": "red", "undecided": "yellow"}


def print_findings(findings: Mapping[str, dict[str, Any]]) -> None:
    table = Table(title="95 % intervals over sequences; a control is what the effect has to beat", title_justify="left")
    for column in ("", "hypothesis", "effect", "control", "verdict"):
        table.add_column(column, overflow="fold")
    for name, found in findings.items():
        if "not_done" in found:
            table.add_row(name, f"not done: {found['not_done']}", "", "", "")
            continue
        verdict = found["verdict"]
        control = found.get("control")
        table.add_row(
            name,
            found["hypothesis"],
            f"{with_interval(found['effect'])}\n{found['measure']}",
            f"{with_interval(control)}\n{control['what']}" if control else "",
            f"[{COLOURS[verdict]}]{verdict}[/]",
        )
    Console().print(table)


def with_interval(estimate: dict[str, Any]) -> str:
    def shown(value: float | None) -> str:
        return "?" if value is None else f"{value:.3f}"

    low, high = estimate["interval"]
    return f"{shown(estimate['value'])} ({shown(low)} to {shown(high)})"
