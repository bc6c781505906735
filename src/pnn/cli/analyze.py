from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app

group = typer.Typer(help="See what refinement does inside a model.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(group, name="analyze")

Run = Annotated[str, typer.Argument(help="A run folder, a checkpoint folder, or a hub name.")]
Data = Annotated[str | None, typer.Option(help="Text to use instead of the run's own held-out text.")]
Sequences = Annotated[int | None, typer.Option(help="At most so many sequences (default 2,188).", min=2)]
BatchTokens = Annotated[int | None, typer.Option(help="Tokens of a batch; fewer need less memory.", min=1)]
Out = Annotated[Path | None, typer.Option(help="Folder for results, if not the run's own.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def analyse_and_print(
    name: str, run: str, data: str | None, sequences: int | None, batch_tokens: int | None, out: Path | None, as_json: bool
) -> None:
    from pnn.analysis.run import analyse, open_run
    from pnn.cli.findings import print_findings
    from pnn.evaluation.reading import smaller_batches
    from pnn.figures.analyses import ANALYSIS_FIGURES
    from pnn.figures.style import png, save
    from pnn.memory import out_of_memory_says
    from pnn.progress import track

    opened = open_run(run, progress=track, data=data, sequences=sequences, batch_tokens=batch_tokens, out=out)
    with out_of_memory_says(lambda: smaller_batches(f"analyze {name}", run, opened.text.batch_tokens)):
        result = analyse(opened, name)
    if opened.folder is not None:
        picture = save(png(ANALYSIS_FIGURES[name](result)), opened.folder / "figures" / f"{name}.png")
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print_findings(result["findings"])
    if opened.folder is not None:
        print(f"Wrote {opened.folder / 'analysis' / name}.json and {picture}")


@group.command()
def convergence(
    run: Run,
    data: Data = None,
    sequences: Sequences = None,
    batch_tokens: BatchTokens = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """When do predictions settle? The paper's classes and steps to convergence, and the honest ones, with controls.

    Example: pnn analyze convergence runs/quickstart/pnn
    """
    analyse_and_print("convergence", run, data, sequences, batch_tokens, out, as_json)


@group.command()
def gates(
    run: Run,
    data: Data = None,
    sequences: Sequences = None,
    batch_tokens: BatchTokens = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """How far are gates open, by step, dimension and kind of token?

    Example: pnn analyze gates runs/quickstart/pnn
    """
    analyse_and_print("gates", run, data, sequences, batch_tokens, out, as_json)


@group.command()
def optimisation(
    run: Run,
    data: Data = None,
    sequences: Sequences = None,
    batch_tokens: BatchTokens = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Is refinement learned optimisation? Loss along the path, updates against gradients, more steps than trained.

    Example: pnn analyze optimisation runs/quickstart/pnn
    """
    analyse_and_print("optimisation", run, data, sequences, batch_tokens, out, as_json)
