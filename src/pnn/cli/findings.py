"""Findings on a terminal: the verdict, what was asked, and the numbers that it follows from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

COLOURS = {"supported": "green", "not supported": "red", "undecided": "yellow", "not done": "dim"}
INDENT = max(map(len, COLOURS)) + 2


def print_findings(findings: Mapping[str, dict[str, Any]]) -> None:
    console = Console(highlight=False)
    for name, found in findings.items():
        verdict = "not done" if "not_done" in found else found["verdict"]
        head = found["not_done"] if "not_done" in found else found["hypothesis"]
        line = Text.assemble((verdict.ljust(INDENT), COLOURS[verdict]), (name, "bold"), f": {head}")
        console.print(line, soft_wrap=True)
        for row in _numbers(found):
            console.print(Text(" " * INDENT + row), soft_wrap=True)
    if findings:
        console.print("95 % intervals over sequences; an effect has to exceed its margin and beat its control.")


def _numbers(found: dict[str, Any]) -> list[str]:
    rows = [] if "not_done" in found else [f"effect {with_interval(found['effect'])}: {found['measure']}"]
    if found.get("margin"):
        rows.append(f"margin {found['margin']:g}: an effect no larger than this does not count")
    if "control" in found:
        rows.append(f"control {with_interval(found['control'])}: {found['control']['what']}")
    return rows


def with_interval(estimate: dict[str, Any]) -> str:
    def shown(value: float | None) -> str:
        return "?" if value is None else f"{value:.3f}"

    low, high = estimate["interval"]
    return f"{shown(estimate['value'])} ({shown(low)} to {shown(high)})"
