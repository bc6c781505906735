from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import AsJson, BatchTokens, NumSteps, Run
from pnn.config import EvaluationSet
from pnn.errors import UserError


@app.command()
def evaluate(
    run: Run,
    data: Annotated[list[str] | None, typer.Option(help="Further text to evaluate on: files or a hub name.")] = None,
    undo_wikitext_marks: Annotated[bool, typer.Option(help="Undo WikiText's marks in --data.")] = False,
    num_steps: NumSteps = None,
    stride: Annotated[int | None, typer.Option(help="Decoders: tokens scored per window; fewer see more context.")] = None,
    batch_tokens: BatchTokens = None,
    task: Annotated[
        str | None, typer.Option(help="Decoders: accuracy on these lm-eval tasks instead; all, or names separated by commas.")
    ] = None,
    shots: Annotated[
        str | None, typer.Option(help="Examples in a task's prompt; several numbers separated by commas. Default: 0,1")
    ] = None,
    task_files: Annotated[Path | None, typer.Option(help="Folder with the tasks' documents, if not from the hub.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Take only this many documents of each task. The result is printed, not kept.", min=1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy and loss after every refinement step.

    The masks are the same for every model. For decoders: loss and perplexity, or accuracy on tasks.

    Example: pnn evaluate runs/quickstart/pnn

    Example: pnn evaluate runs/ddl_small --task arc_easy,piqa --shots 0,1
    """
    if task is not None:
        if data or num_steps is not None:
            raise UserError("--task: leave out --data and --num-steps, which are for text")
        _on_tasks(run, task, shots or "0,1", task_files, limit, batch_tokens, as_json)
        return
    if shots is not None or task_files is not None or limit is not None:
        raise UserError("--shots, --task-files and --limit need --task: name the tasks, or give --task all")
    from pnn.cli.tables import note_unknown, print_evaluation
    from pnn.evaluation.run import evaluate_run
    from pnn.progress import track

    sets = {source: EvaluationSet(source, undo_wikitext_marks) for source in data or []}
    result = evaluate_run(run, progress=track, sets=sets, num_steps=num_steps, stride=stride, batch_tokens=batch_tokens)
    if as_json:
        note_unknown({run: result})
        print(json.dumps(result, indent=2))
    else:
        print_evaluation({run: result})


def _on_tasks(
    run: str, tasks: str, shots: str, files: Path | None, limit: int | None, batch_tokens: int | None, as_json: bool
) -> None:
    from pnn.cli.tables import print_tasks
    from pnn.evaluation.harness import evaluate_run_on_tasks, parse_shots, parse_tasks

    result = evaluate_run_on_tasks(
        run, tasks=parse_tasks(tasks), shots=parse_shots(shots), local=files, limit=limit, batch_tokens=batch_tokens
    )
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_tasks(result)
