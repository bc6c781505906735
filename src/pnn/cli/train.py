from __future__ import annotations

import shlex
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from pnn.cli import app
from pnn.cli.options import Config, Setting
from pnn.config import RunConfig, load_config
from pnn.errors import UserError
from pnn.progress import say

MANY_STEPS = 32  # four times the deepest config that is shipped


@app.command()
def train(
    config: Config,
    output: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/<config's name>")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint, or start from the beginning if there is none.")
    ] = False,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per micro-batch; the effective batch is unchanged.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training text.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Updates, instead of epochs.")] = None,
    num_steps: Annotated[int | None, typer.Option(help="Refinement steps of a PNN.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, order, masks and dropout.")] = None,
    settings: Setting = None,
) -> None:
    """Train a model.

    Example: pnn train pnn_wikitext103 --batch-size 128 --set data.train='text/*.txt'

    Several GPUs: accelerate launch -m pnn train pnn_wikitext103
    """
    flags = {
        "training.batch_size": batch_size,
        "training.epochs": epochs,
        "training.max_steps": max_steps,
        "model.num_steps": num_steps,
        "training.learning_rate": learning_rate,
        "training.seed": seed,
    }
    if epochs is not None and max_steps is not None:
        raise UserError("--epochs and --max-steps both say how long to train: give one of them")
    if epochs is not None:
        settings = ["training.max_steps=null", *(settings or [])]
    overrides = [f"{key}={value}" for key, value in flags.items() if value is not None] + (settings or [])
    chosen = load_config(config, overrides)
    folder = output or Path("runs") / chosen.name
    warn_of_many_steps(chosen)

    from pnn.cli.tables import print_evaluation
    from pnn.runs import read_json
    from pnn.training.run import train_run

    signal.signal(signal.SIGTERM, end)  # updates listen themselves; schedulers signal twice, and the second may come after them
    if train_run(chosen, folder, resume=resume):
        print_evaluation({folder.name: read_json(folder / "evaluation.json")})
        print(f"The run is in {folder}. Next: pnn report {shlex.quote(str(folder))}, or {next_command(chosen, folder)}")


def end(number: int, frame: FrameType | None) -> None:
    """With the exit code of a run that was told to stop and has saved."""
    raise SystemExit(128 + number)


def warn_of_many_steps(config: RunConfig) -> None:
    steps = config.model.get("num_steps")
    if isinstance(steps, int) and steps > MANY_STEPS:
        say(f"note: model.num_steps is {steps:,}: every update computes {steps:,} steps and holds them in memory")


def next_command(config: RunConfig, folder: Path) -> str:
    """What people like to see first of a model of this kind."""
    if config.data.layout == "rows":
        from pnn.data.run_tokens import first_words

        prompt = first_words(folder, config.data) or "…"
        quoted = f'"{prompt}"' if prompt.replace(" ", "").isalnum() else shlex.quote(prompt)
        return f"pnn generate {shlex.quote(str(folder))} {quoted}"
    return f'pnn fill {shlex.quote(str(folder))} "… [MASK] …"'
