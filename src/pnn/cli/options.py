"""Arguments and options that several commands share: one name and one meaning each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pnn.config import shipped_configs


def complete_config(incomplete: str) -> list[str]:
    return [name for name in shipped_configs() if name.startswith(incomplete)]


Config = Annotated[
    str,
    typer.Argument(help="The name of a shipped config (pnn configs), or a YAML file.", autocompletion=complete_config),
]
Configs = Annotated[
    list[str] | None,
    typer.Argument(
        help="Names of shipped configs, or YAML files. Default: the quickstart's PNN and BERT.", autocompletion=complete_config
    ),
]
Setting = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key: --set model.num_steps=6")]
Run = Annotated[str, typer.Argument(help="A run folder, a checkpoint folder, or a hub name.")]
NumSteps = Annotated[int | None, typer.Option(help="Refinement steps of a PNN. Default: as trained, or as calibrated.")]
BatchTokens = Annotated[int | None, typer.Option(help="Tokens per batch; fewer need less memory.", min=1)]
Sequences = Annotated[int | None, typer.Option(help="Most sequences to read (default 2,188; for decoders 200 rows).", min=2)]
Results = Annotated[Path | None, typer.Option(help="Folder for results. Default: the run folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what was stopped.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print JSON lines; the default unless output is a terminal.")]
