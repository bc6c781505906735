"""The command `pnn`: one file a command group; parses, calls, prints.

Bad input is one sentence on stderr and exit code 2; a bug keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from pnn.errors import UserError, first_line

# as a newcomer meets them
ORDER = (
    "quickstart",
    "train",
    "evaluate",
    "fill",
    "generate",
    "analyze",
    "evidence",
    "compare",
    "report",
    "plasticity",
    "finetune",
    "export",
    "bench",
    "data",
)


class InOrder(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=ORDER.index)


app = typer.Typer(
    name="pnn",
    cls=InOrder,
    help="Plastic Neural Networks: transformers that rewrite instead of only adding.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # the tokenizer's own threads; we do not fork
    from transformers.utils import logging

    from pnn.cli import (  # noqa: F401  (each registers its commands)
        analyze,
        bench,
        compare,
        data,
        evaluate,
        evidence,
        export,
        fill,
        finetune,
        generate,
        plasticity,
        quickstart,
        report,
        train,
    )
    from pnn.memory import is_out_of_memory
    from pnn.training.loop import Stopped

    logging.disable_progress_bar()  # we have our own bars; one for each file of a checkpoint is noise
    try:
        app()
    except UserError as error:
        print(f"pnn: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        # what the operating system refuses (a full disk, no permission) is for the user to mend, not a bug
        print(f"pnn: {error}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        # wherever no better advice is at hand: a model that does not fit by itself, say
        if not is_out_of_memory(error):
            raise
        print(f"pnn: out of memory ({first_line(error)}): a smaller model or less text needs less", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        print(f"pnn: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
