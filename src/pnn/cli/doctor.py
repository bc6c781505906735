from __future__ import annotations

import typer

from pnn.cli import app


@app.command()
def doctor() -> None:
    """Look at this machine: what works, what is fast.

    Prints versions, devices, disk and data folders. Exit code 0 means that everything needed works.

    Example: pnn doctor
    """
    from pnn.doctor import examine

    broken = 0
    for finding in examine():
        print(("BROKEN: " if finding.broken else "") + finding.text)
        broken += finding.broken
    if broken:
        raise typer.Exit(1)
