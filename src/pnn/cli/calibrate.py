from __future__ import annotations

import json
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import AsJson, BatchTokens, Run
from pnn.errors import UserError


@app.command()
def calibrate(
    run: Run,
    lose: Annotated[float | None, typer.Option(help="Points of accuracy that you are willing to lose, such as 0.3.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Text to use instead of the run's held-out text; for a fine-tuned task, the folder of its files."),
    ] = None,
    batch_tokens: BatchTokens = None,
    undo: Annotated[bool, typer.Option("--undo", help="Go back to all steps, as trained.")] = False,
    as_json: AsJson = False,
) -> None:
    """Leave out steps that are not needed, and say what that saves.

    One half of the held-out text chooses the fastest setting that loses at most that many points; the other half says what it
    costs. For a fine-tuned classifier, these are halves of the task's dev examples. The setting is stored in the model's
    config: fill, evaluate, finetune and export use it.

    Example: pnn calibrate runs/quickstart/pnn --lose 0.3

    Example: pnn calibrate runs/finetuned/sst2 --lose 0.5
    """
    if (lose is None) != undo:
        raise UserError("say how many points may be lost (--lose 0.3), or give --undo alone")
    from pnn.cli.tables import print_calibration
    from pnn.evaluation.calibrate import calibrate_run
    from pnn.evaluation.choosing import undo as undo_run
    from pnn.evaluation.reading import smaller_batches
    from pnn.finetuning.calibrate import calibrate_run as calibrate_classifier
    from pnn.finetuning.calibrate import is_fine_tuned
    from pnn.memory import out_of_memory_says
    from pnn.progress import track

    if lose is None:
        result = undo_run(run)
        unit = ", and the learned unit halts tokens again" if result["changes"]["halt"] else ""
        said = f"All {result['changes']['num_steps']} steps again{unit}: {run}"
        print(json.dumps(result, indent=2) if as_json else said)
        return
    with out_of_memory_says(lambda: smaller_batches("calibrate", run, tokens=batch_tokens or 8192)):
        if is_fine_tuned(run):
            result = calibrate_classifier(run, lose / 100, progress=track, data=data, batch_tokens=batch_tokens)
        else:
            result = calibrate_run(run, lose / 100, progress=track, data=data, batch_tokens=batch_tokens)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_calibration(run, result)
