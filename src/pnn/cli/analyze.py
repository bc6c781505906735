from __future__ import annotations

import json
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import AsJson, BatchTokens, Results, Run, Sequences
from pnn.studies.registry import analysis_names

Data = Annotated[str | None, typer.Option(help="Text to use instead of the run's own held-out text.")]


@app.command()
def analyze(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(analysis_names())}.", metavar="ANALYSIS")],
    run: Run,
    data: Data = None,
    sequences: Sequences = None,
    batch_tokens: BatchTokens = None,
    output: Results = None,
    as_json: AsJson = False,
) -> None:
    """See what refinement does inside a model.

    Every analysis has controls and computes its verdicts.

    When do predictions settle, by the paper's measure and by honest ones?

    Example: pnn analyze convergence runs/quickstart/pnn

    How far are gates open, by step, dimension and kind of token?

    Example: pnn analyze gates runs/quickstart/pnn

    Is it learned optimisation: does the loss fall along the path, do updates follow gradients, do more steps help?

    Example: pnn analyze optimisation runs/quickstart/pnn

    What could stopping each token when it is done save, compared with fewer steps for everyone? An oracle reads each of at
    most 500 sequences up to hundreds of times. That takes about half a minute for the quickstart's model. For one of 50M
    parameters it is about half a minute for each sequence on a CPU core: ask for fewer.

    Example: pnn analyze halting runs/quickstart/pnn

    Example: pnn analyze halting models/pnn-base --data my.txt --sequences 20

    Is it an iteration toward something: what do more steps do to predictions, and do states settle?

    Example: pnn analyze more_steps runs/quickstart/pnn

    Does a Deep Delta decoder rewrite its state, and does it need to?

    Example: pnn analyze rewrites runs/ddl_tiny
    """
    from pnn.cli.findings import print_findings
    from pnn.evaluation.reading import smaller_batches
    from pnn.figures.studies import figure_of
    from pnn.figures.style import png, save
    from pnn.memory import out_of_memory_says
    from pnn.progress import track
    from pnn.studies.run import BATCH_TOKENS, analyse, open_run

    opened = open_run(run, name, progress=track, data=data, sequences=sequences, batch_tokens=batch_tokens, out=output)
    with out_of_memory_says(lambda: smaller_batches(f"analyze {name}", run, tokens=batch_tokens or BATCH_TOKENS)):
        result = analyse(opened, name)
    if opened.folder is not None:
        picture = save(png(figure_of(name)(result)), opened.folder / "figures" / f"{name}{opened.on}.png")
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print_findings(result["findings"])
    if opened.folder is not None:
        print(f"Wrote {opened.folder / 'analysis' / name}{opened.on}.json and {picture}")
