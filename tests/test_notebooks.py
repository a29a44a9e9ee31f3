"""The notebooks run from top to bottom, and are stored without outputs."""

from pathlib import Path

import pytest


nbclient = pytest.importorskip("nbclient", reason="nbclient is part of the dev extra")
nbformat = pytest.importorskip("nbformat", reason="nbformat is part of the dev extra")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def read(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    client = nbclient.NotebookClient(
        read(path), timeout=120, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    client.execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    for cell in read(path).cells:
        assert cell.cell_type != "code" or (cell.outputs == [] and cell.execution_count is None)


def test_there_is_a_notebook_to_start_with():
    assert "quickstart" in [path.stem for path in NOTEBOOKS]
