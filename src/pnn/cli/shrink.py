from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import AsJson, Resume, Run
from pnn.errors import UserError


@app.command()
def shrink(
    model: Run,
    data: Annotated[str, typer.Option(help="Text to score, to learn from and to measure on: files, a hub name or synthetic.")],
    parameters: Annotated[str | None, typer.Option(metavar="-N%", help="How many fewer parameters, such as -20%.")] = None,
    speed: Annotated[float | None, typer.Option(help="How many times as fast at reading on this machine, such as 1.3.")] = None,
    kinds: Annotated[
        str,
        typer.Option(
            help="What may go: heads, neurons, layers, width (Llama, Mistral and Qwen2), and tokens that --data rarely or "
            "never has."
        ),
    ] = "heads,neurons,layers",
    by: Annotated[
        str,
        typer.Option(
            help="How to score units: fisher, contribution, gradient or random. surgeon, wanda and magnitude choose within a "
            "matrix, and fisher decides how many go there."
        ),
    ] = "fisher",
    rounds: Annotated[
        int, typer.Option(help="Prune in so many rounds and score what is left anew in each. With --speed: one.", min=1)
    ] = 1,
    repair: Annotated[bool, typer.Option(help="Adjust the remaining weights to replace what was removed.")] = True,
    teacher: Annotated[str, typer.Option(help="What to learn from the original: logits, states (both) or none.")] = "logits",
    lora: Annotated[
        int | None,
        typer.Option(metavar="RANK", help="Learn adapters of this rank, merged in the end. Default: all weights learn."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="New folder for the model. Default: runs/MODEL-small")] = None,
    validation: Annotated[str | None, typer.Option(help="Text to measure on. Default: the last tenth of --data")] = None,
    validation_rows: Annotated[int, typer.Option(help="Most rows to measure on.", min=2)] = 64,
    max_length: Annotated[int | None, typer.Option(help="Tokens per row. Default: the model's context, 128 at most.")] = None,
    optimizer: Annotated[str, typer.Option(help="What learning moves weights by: adamw or muon.")] = "adamw",
    learn_steps: Annotated[int, typer.Option(help="Updates after pruning.", min=0)] = 200,
    learning_rate: Annotated[float, typer.Option(help="At the start; a cosine takes it to a tenth.")] = 3e-4,
    batch_size: Annotated[int, typer.Option(help="Rows per update.", min=1)] = 8,
    score_rows: Annotated[int, typer.Option(help="Rows that units are scored on.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the order of the text.", min=0)] = 0,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Make a model smaller or faster.

    Prunes heads, neurons and layers within one budget, trains what is left, and measures before and after. The original model
    stays as it is.

    Example: pnn shrink runs/gpt2_tiny --parameters -20% --data text.txt --output smaller
    """
    from pnn.cli.tables import print_shrunk
    from pnn.export.shrunk import run_shrink
    from pnn.plasticity.shrink import ShrinkSettings
    from pnn.progress import track

    folder = output or Path("runs") / f"{Path(model).name}-small"
    settings = ShrinkSettings(
        fewer=None if parameters is None else share_of(parameters),
        faster=speed,
        kinds=tuple(kind.strip().removesuffix("s") for kind in kinds.split(",") if kind.strip()),
        by=by,
        rounds=rounds,
        repair=repair,
        teacher=teacher,
        lora=lora,
        optimizer=optimizer,
        learn_steps=learn_steps,
        learning_rate=learning_rate,
        batch_rows=batch_size,
        score_rows=score_rows,
        seed=seed,
    )
    summary = run_shrink(
        model,
        data,
        folder,
        settings,
        validation=validation,
        length=max_length,
        held_out_rows=validation_rows,
        resume=resume,
        progress=track,
    )
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    print_shrunk(summary)
    print(f"Wrote {folder}: the model, its card (README.md) and summary.json")


def share_of(text: str) -> float:
    """-20% → 0.2."""
    if not re.fullmatch(r"[-−]\d+(\.\d+)?\s*%", text.strip()):
        raise UserError(f"--parameters {text}: say how many fewer, in per cent, such as -20%")
    return float(re.sub(r"[^\d.]", "", text)) / 100
