from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import BatchTokens
from pnn.config import EvaluationSet
from pnn.errors import UserError


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="Run folders, checkpoint folders or hub names, two or more.")],
    data: Annotated[str | None, typer.Option(help="Other text to compare on: files or a hub name.")] = None,
    undo_wikitext_marks: Annotated[bool, typer.Option(help="Undo WikiText's marks in --data.")] = False,
    sequences: Annotated[int | None, typer.Option(help="Compare on this many sequences, spread over the text.", min=2)] = None,
    batch_tokens: BatchTokens = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all pairs, instead of a table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
) -> None:
    """Compare runs on the same text: masked models on the same masks, by accuracy; decoders by loss.

    How much does each differ from the first, and which differences hold?

    Example: pnn compare runs/quickstart/pnn runs/quickstart/bert
    """
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        wrong = "that is a folder" if output.is_dir() else f"there is no folder {output.parent}"
        raise UserError(f"--output {output}: {wrong}; give the name of a new file")
    if undo_wikitext_marks and data is None:
        raise UserError("--undo-wikitext-marks needs --data")

    from pnn.cli.tables import print_comparison
    from pnn.evaluation.compare import compare_runs
    from pnn.files import write_json
    from pnn.progress import track

    other = None if data is None else EvaluationSet(data, undo_wikitext_marks)
    result = compare_runs(runs, progress=track, other=other, sequences=sequences, batch_tokens=batch_tokens)
    if output is not None:
        write_json(output, result)
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        print_comparison(result)
