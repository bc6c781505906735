from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pnn.cli import app, importing
from pnn.errors import UserError


@app.command()
def explore(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Run folders (or a folder of runs), checkpoint folders or hub names. "
            "Default: models/pnn-base, or the quickstart's models.",
            metavar="MODEL...",
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes a free one.", min=0, max=65535)] = 7860,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the browser.")] = False,
) -> None:
    """Look inside models, in the browser.

    Only this machine can open the page, and it needs no internet.

    Example: pnn explore runs/quickstart/pnn runs/quickstart/bert
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported
    try:
        import gradio  # noqa: F401  (the extra `app`)
    except ImportError as error:
        if error.name != "gradio":
            raise
        raise UserError("the page needs gradio: pip install gradio") from None
    with importing():
        from pnn.explore.server import serve
        from pnn.explore.subjects import default_models

    serve(models or default_models(Path.cwd()), host, port, browser=not no_browser)
