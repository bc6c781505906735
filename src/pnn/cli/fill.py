from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app, importing
from pnn.cli.options import AsJsonLines, NumSteps, Run
from pnn.errors import UserError


@app.command()
def fill(
    run: Run,
    texts: Annotated[list[str] | None, typer.Argument(help="Texts with [MASK]. Default: the lines of --file or stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file, one text per line.")] = None,
    num_steps: NumSteps = None,
    top: Annotated[int, typer.Option(help="Predictions for each [MASK].")] = 5,
    by_step: Annotated[bool, typer.Option("--by-step", help="Also print the best prediction after each step.")] = False,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per batch; fewer need less memory.", min=1)] = 16384,
    as_json: AsJsonLines = False,
) -> None:
    """Predict every [MASK], and see each step rewrite it.

    Example: pnn fill runs/quickstart/pnn "the fox of avon wore amber hats . it has old [MASK] boots ." --by-step

    Many texts: pnn fill runs/quickstart/pnn --file texts.txt > filled.jsonl
    """
    with importing():
        from pnn.cli.tables import print_filled
        from pnn.data.corpora import text_lines
        from pnn.evaluation.fill import fill as fill_texts
        from pnn.evaluation.reading import smaller_batches
        from pnn.memory import out_of_memory_says
        from pnn.models.loading import load_run
        from pnn.models.registry import kind_of, steps_read
        from pnn.progress import track

    if texts and file is not None:
        raise UserError(f"--file {file}: give texts or a file, not both")
    if texts:
        lines, origin = iter(texts), "text"
    elif file is not None:
        try:
            lines, origin = text_lines(file.open("rb"), file), f"{file}: line"
        except FileNotFoundError:
            raise UserError(f"no file {file}") from None
    elif sys.stdin is None or sys.stdin.isatty():
        raise UserError("nothing to fill: give a text with [MASK], --file, or lines on standard input")
    else:
        lines, origin = text_lines(sys.stdin.buffer, "standard input"), "standard input: line"
    loaded = load_run(run, num_steps=num_steps, of_decoders="pnn generate continues a text with it")
    results = fill_texts(
        loaded.model,
        loaded.tokenizer,
        (line.rstrip("\r\n") for line in lines),
        top=top,
        num_steps=num_steps,
        by_step=by_step,
        batch_tokens=batch_tokens,
        precision=loaded.precision,
        origin=origin,
    )
    with out_of_memory_says(lambda: smaller_batches("fill", run, tokens=batch_tokens)):
        if as_json or not sys.stdout.isatty():
            for filled in results if texts else track(results, "filling"):
                print(json.dumps(filled))
        else:
            for filled in results:
                print_filled(filled, kind_of(loaded.model).unit, steps_read(loaded.model.config))
