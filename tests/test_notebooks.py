"""The notebooks run from top to bottom, show what they should, and are stored without outputs."""

from pathlib import Path

import pytest


nbclient = pytest.importorskip("nbclient", reason="nbclient is part of the dev extra")
nbformat = pytest.importorskip("nbformat", reason="nbformat is part of the dev extra")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
SHOWN = {"train": ["<th>Validation Loss</th>", "<th>Tau</th>", *(f"<th>Acceptance {k}</th>" for k in range(1, 9))]}


def read(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    client.execute()
    tables = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    for text in SHOWN.get(path.stem, ()):
        assert any(text in table for table in tables), text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    for cell in read(path).cells:
        assert cell.cell_type != "code" or (cell.outputs == [] and cell.execution_count is None)


def test_there_are_notebooks_to_start_and_to_train_with():
    assert {"quickstart", "train"} <= {path.stem for path in NOTEBOOKS}
