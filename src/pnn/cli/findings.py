"""Findings on a terminal: the verdict, what was asked, and the numbers that it follows from."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from pnn.numbers import estimate
from pnn.results import Finding

COLOURS = {"supported": "green", "not supported": "red", "undecided": "yellow", "not done": "dim"}
INDENT = max(map(len, COLOURS)) + 2


def print_findings(findings: Mapping[str, Finding]) -> None:
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
    if len(findings) > 1:
        console.print(
            f"Each of the {len(findings)} verdicts stands alone: of 40 effects at their margins, chance supports one."
        )


def _numbers(found: Finding) -> list[str]:
    rows = [] if "not_done" in found else [f"effect {estimate(found['effect'])}: {found['measure']}"]
    if found.get("margin"):
        rows.append(f"margin {found['margin']:g}: an effect no larger than this does not count")
    if "control" in found:
        rows.append(f"control {estimate(found['control'])}: {found['control']['what']}")
    return rows
