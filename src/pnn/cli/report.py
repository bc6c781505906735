from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run folder, or several to put side by side.")],
    output: Annotated[Path | None, typer.Option(help="Where to write. Default: report.html in the first run.")] = None,
) -> None:
    """Write a page about one run or several.

    The page shows results, curves and architecture, in one file that opens anywhere.

    Example: pnn report runs/quickstart/pnn runs/quickstart/bert
    """
    from pnn.report.page import write_report

    print(write_report(runs, output or runs[0] / "report.html"))
