from __future__ import annotations

import json
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.tables import print_evaluation
from pnn.config import EvaluationSet


@app.command()
def evaluate(
    run: Annotated[str, typer.Argument(help="A run folder, a checkpoint folder, or a hub name.")],
    data: Annotated[list[str] | None, typer.Option(help="Further text to evaluate on: files or a hub name.")] = None,
    undo_wikitext_marks: Annotated[bool, typer.Option(help="Undo WikiText's marks in --data.")] = False,
    num_steps: Annotated[int | None, typer.Option(help="Refinement steps, if not as trained.")] = None,
    stride: Annotated[int | None, typer.Option(help="Of a decoder: tokens scored a window; fewer see more context.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of a batch; fewer need less memory.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Accuracy and loss after every refinement step, on masks that are the same for every model; of a decoder, loss and
    perplexity.

    Example: pnn evaluate runs/quickstart/pnn
    """
    from pnn.evaluation.run import evaluate_run
    from pnn.progress import track

    sets = {source: EvaluationSet(source, undo_wikitext_marks) for source in data or []}
    result = evaluate_run(run, progress=track, sets=sets, num_steps=num_steps, stride=stride, batch_tokens=batch_tokens)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_evaluation({run: result})
