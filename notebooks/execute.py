"""Runs all notebooks and keeps their outputs, so that they can be read where they cannot be run.

    python notebooks/execute.py RUN        # the PNN of a quickstart: `make figures` leaves one in runs/site

Warnings, notes and times go, and pictures get 128 colours: a notebook stays below 300 kB.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).resolve().parent


def execute(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, record_timing=False, coalesce_streams=True, resources={"metadata": {"path": str(HERE)}}
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [shrunk(output) for output in cell.outputs if is_result(output)]
    notebook.metadata["language_info"] = {"name": "python"}  # which Python it was is nobody's business
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    print(f"{path.name}, {path.stat().st_size / 1000:.0f} kB", flush=True)


def is_result(output: Any) -> bool:
    """What a cell prints and its last value, not what commands say while they work."""
    return output.output_type == "execute_result" or output.get("name") == "stdout"


def shrunk(output: Any) -> Any:
    data = output.get("data", {})
    if "image/png" in data:
        picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
        buffer = io.BytesIO()
        picture.quantize(128).save(buffer, "PNG", optimize=True)
        data["image/png"] = base64.b64encode(buffer.getvalue()).decode("ascii")
    return output


if __name__ == "__main__":
    os.environ["PNN_RUN"] = str(Path(sys.argv[1]).resolve())
    for path in sorted(HERE.glob("*.ipynb")):
        execute(path)
