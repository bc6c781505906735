from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import Setting, complete_config
from pnn.errors import UserError

Arms = Annotated[
    list[str], typer.Argument(help="Names of shipped configs (pnn configs), or YAML files.", autocompletion=complete_config)
]


@app.command()
def sweep(
    configs: Arms,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,C", help="Values to try: training.learning_rate=3e-4,1e-3. Repeat it for a grid."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds 0, 1, … of every arm.", min=1)] = 1,
    output: Annotated[Path | None, typer.Option(help="Folder of the sweep. Default: sweeps/<first config>")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time. Default: as many as fit.", min=1)] = None,
    settings: Setting = None,
) -> None:
    """Train a grid of runs and compare them.

    Trains every config with every value and seed. The same command continues after a stop; runs that fail are left out.

    Example: pnn sweep quickstart_pnn --over training.learning_rate=3e-4,1e-3,2e-3 --seeds 3
    """
    if len(set(configs)) < len(configs):
        raise UserError("a config is given twice")
    from pnn.cli.tables import print_sweep
    from pnn.figures.style import png, save
    from pnn.figures.sweep import sweep as draw
    from pnn.sweep import run_sweep

    result, folder = run_sweep(configs, over or [], seeds, settings or [], output, jobs)
    if any(arm["seeds"] for arm in result["arms"]):
        print_sweep(result)
        print(f"Wrote {folder / 'sweep.json'} and {save(png(draw(result)), folder / 'figures' / 'sweep.png')}")
    if result["failed"]:
        raise UserError(f"{len(result['failed'])} of the runs failed: run the same command to try them again")
