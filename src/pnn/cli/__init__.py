"""The command `pnn`: one file per command group; parses, calls, prints.

Bad input is one sentence on stderr and exit code 2; a bug keeps its traceback.

`pnn --help` and a typo answer at once: the files here import torch, transformers and our modules that need them inside the
commands, never at their top (a test watches). A config is read, and its mistakes told, before anything heavy is loaded.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pnn import __version__
from pnn.errors import Stopped, UserError, first_line

# as a newcomer meets them
ORDER = (
    "quickstart",
    "train",
    "sweep",
    "evaluate",
    "fill",
    "generate",
    "explore",
    "analyze",
    "evidence",
    "compare",
    "report",
    "shrink",
    "plasticity",
    "calibrate",
    "finetune",
    "export",
    "bench",
    "data",
    "configs",
    "doctor",
)

# command → flags that were called otherwise once, and still work
RENAMED = {
    "evaluate": {"--tasks": "--task"},
    "analyze": {"--out": "--output"},
    "evidence": {"--out": "--output"},
    "compare": {"--out": "--output"},
    "plasticity": {"--length": "--max-length", "--batch-rows": "--batch-size"},
    "finetune": {"--steps": "--num-steps"},
    "export": {"--steps": "--num-steps"},
    "bench": {"--out": "--output"},
}


class Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=ORDER.index)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_new_names(args))


def with_new_names(args: list[str]) -> list[str]:
    """The command line with renamed flags replaced, and a note for each."""
    names = RENAMED.get(args[0], {}) if args else {}
    end = args.index("--") if "--" in args else len(args)  # what follows is no flag
    words = list(args)
    for at, word in enumerate(args[:end]):
        flag, sign, value = word.partition("=")
        if flag in names:
            words[at] = names[flag] + sign + value
            print(f"pnn: note: {flag} is called {names[flag]} now", file=sys.stderr)
    return words


app = typer.Typer(name="pnn", cls=Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pnn {__version__}")
        raise typer.Exit


@app.callback()
def pnn(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Plastic Neural Networks: transformers that rewrite instead of only adding.

    Example: pnn quickstart

    Help for one command: pnn train --help
    """


@contextmanager
def importing() -> Iterator[None]:
    """Torch and transformers make objects by the million and no garbage: looking for it takes a quarter of a short command."""
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # once: frozen objects are never looked at again, garbage of an earlier command too
            gc.freeze()
        gc.enable()


def main() -> None:
    if sys.stdout is None:  # closed by the caller (`>&-`): what is printed goes nowhere
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for as long as the process lives)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # the tokenizer's own threads; we do not fork
    # we have our own bars; one for each file of a checkpoint is noise
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from pnn.cli import (  # noqa: F401  (each registers its commands)
        analyze,
        bench,
        calibrate,
        compare,
        configs,
        data,
        doctor,
        evaluate,
        evidence,
        explore,
        export,
        fill,
        finetune,
        generate,
        plasticity,
        quickstart,
        report,
        shrink,
        sweep,
        train,
    )

    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app()
    except KeyboardInterrupt:
        print("pnn: stopped", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError) as error:
        # what the operating system refuses (a full disk, no permission) is for the user to mend too, not a bug
        print(f"pnn: {error}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        from pnn.memory import is_out_of_memory

        # wherever no better advice is at hand: a model that does not fit by itself, say
        if not is_out_of_memory(error):
            raise
        print(f"pnn: out of memory ({first_line(error)}): a smaller model or less text needs less", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        print(f"pnn: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
