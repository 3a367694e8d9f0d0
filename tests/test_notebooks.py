"""The notebooks, run in a fresh kernel as a reader would run them.

After a change that shows in a notebook: `jupyter execute --inplace notebooks/*.ipynb`, and look at
the figures.
"""

from base64 import b64decode
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
assert NOTEBOOKS
PNG = b"\x89PNG\r\n\x1a\n"
MAX_BYTES = 400_000

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def figures(notebook: nbformat.NotebookNode) -> dict[int, list[bytes]]:
    """The PNG images that each code cell shows, by the cell's position, if it has any."""
    found = {}
    for i, cell in enumerate(notebook.cells):
        data = [output.data for output in cell.get("outputs", ()) if "data" in output]
        if images := [b64decode(d["image/png"]) for d in data if "image/png" in d]:
            found[i] = images
    return found


@each_notebook
def test_a_notebook_runs_to_its_end_and_draws_every_figure_that_it_was_committed_with(path):
    notebook = nbformat.read(path, as_version=4)
    want = {i: len(images) for i, images in figures(notebook).items()}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    # An exception in a cell raises CellExecutionError here, with the cell and its traceback.
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()

    drawn = figures(notebook)
    assert want, "the notebook was committed without its figures"
    assert {i: len(images) for i, images in drawn.items()} == want
    for image in (image for images in drawn.values() for image in images):
        assert image.startswith(PNG)
        assert len(image) > 10_000, "a figure of a few kilobytes is an empty one"
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    noise = [each for each in outputs if each.get("name") == "stderr"]
    assert not noise, "the cells should warn of nothing"


@each_notebook
def test_a_committed_notebook_is_executed_in_order_and_small_and_tells_nothing_of_the_machine(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size < MAX_BYTES
    outputs = [output for cell in code for output in cell.outputs]
    for output in outputs:
        output.get("data", {}).pop("image/png", None)
    for private in (str(ROOT), "/home/", "/root/", "/Users/", "/tmp/"):
        assert private not in str(outputs)
