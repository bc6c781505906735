from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import Setting


@app.command()
def quickstart(
    output: Annotated[Path, typer.Option(help="Folder for the three runs and the report.")] = Path("runs/quickstart"),
    settings: Setting = None,
) -> None:
    """Train two small PNNs and a BERT, evaluate them, write a report.

    All learn the embedded corpus. It takes a few minutes on a laptop.

    Example: pnn quickstart
    """
    from pnn.cli.tables import print_evaluation
    from pnn.quickstart import run_quickstart

    results, page = run_quickstart(output, settings or [])
    print_evaluation(results)
    print(f"\nOpen {page}")
