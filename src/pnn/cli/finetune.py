from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import AsJson, NumSteps, Run


@app.command()
def finetune(
    model: Run,
    task: Annotated[str, typer.Option(help="Tasks separated by commas (cola, mrpc, boolq …), or glue, superglue, all.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder of the official files (CoLA/train.tsv …). Default: from the hub.")
    ] = None,
    learning_rates: Annotated[str, typer.Option(help="Separated by commas; the first seed chooses the best on dev.")] = "3e-5",
    epochs: Annotated[int, typer.Option(help="Passes over the training set; the best on dev is kept.", min=1)] = 3,
    batch_size: Annotated[int, typer.Option(help="Examples per update.", min=1)] = 32,
    seeds: Annotated[int, typer.Option(help="How many times to fine-tune: seeds 0, 1, …", min=1)] = 1,
    num_steps: NumSteps = None,
    every_step: Annotated[
        bool, typer.Option("--every-step", help="Learn after every step of a PNN, so that pnn calibrate can leave steps out.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(help="For a trial: only this many examples of each set, and no test predictions.", min=1),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/<model's name>-finetuned")] = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune on GLUE and SuperGLUE.

    Gives official metrics, baselines, and predictions in the benchmarks' format.

    Example: pnn finetune runs/pnn_wikitext103 --task cola --data glue --learning-rates 2e-5,3e-5,5e-5 --seeds 3

    Tasks: cola sst2 mrpc stsb qqp mnli qnli rte wnli (GLUE), boolq cb copa wic wsc superglue_rte multirc (SuperGLUE)
    """
    from pnn.cli.tables import print_finetuning
    from pnn.finetuning.run import Settings, parse_rates
    from pnn.finetuning.run import finetune as run

    settings = Settings(parse_rates(learning_rates), epochs, batch_size, seeds, num_steps, limit, every_step)
    folder = output or Path("runs") / f"{Path(model).name}-finetuned"
    result = run(model, task, data, folder, settings)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_finetuning(result)
        print(folder / "results.json")
