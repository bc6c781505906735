"""Every notebook runs from top to bottom in a real kernel, on a tiny run in place of the quickstart's. One kernel serves all,
emptied before each: importing torch again would take most of the time."""

import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
pytest.importorskip("nbclient", reason="nbclient and ipykernel come with the dev extra")


@pytest.fixture(scope="module")
def kernel(trained_run):
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=os.environ | {"PNN_RUN": str(trained_run)})
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, kernel):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    brief = "import pnn.plasticity.measure\npnn.plasticity.measure.SECONDS = 0.0\n"  # of timing a cycle's models
    emptied = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(brief + "%reset -f")])
    for one in (emptied, notebook):
        NotebookClient(one, timeout=120, km=kernel).execute(cleanup_kc=False)
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not any(output["output_type"] == "error" for output in shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs(path):
    """As `notebooks/execute.py` leaves them: all cells once, from top to bottom, small, and nothing of the machine."""
    import nbformat

    text = path.read_text(encoding="utf-8")
    cells = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert len(text.encode()) < 300_000
    assert not any(folder in text for folder in ("/home/", "/root/", "/tmp/", "/Users/", str(Path(__file__).parents[1])))


def test_every_idea_has_one():
    assert [path.stem for path in NOTEBOOKS] == [
        "analyse_gates",
        "explore_data",
        "images",
        "prune_and_grow",
        "rewrite_a_state",
        "start_here",
        "visualise_results",
    ]
