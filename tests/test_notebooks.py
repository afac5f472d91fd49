import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def num_pictures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs_of(notebook))


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs_and_shows_what_it_says(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    assert num_pictures(notebook) == 2, "the notebook is stored with what it shows"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "".join(output.get("text", "") for output in outputs_of(notebook))
    assert num_pictures(notebook) == 2
    success = text.split("success of each task: [")[1].split("]")[0].split(",")
    assert len(success) == 3 and min(map(float, success)) >= 0.8
    assert "eval/return/heavy" in text, "environments defined in a cell were stepped by workers"
