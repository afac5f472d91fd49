import re
import statistics

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers.command_line import ROOT, skip_without_renderer

pytestmark = pytest.mark.slow


def check_first_run(text):
    success = text.split("success of each task: [")[1].split("]")[0].split(",")
    assert len(success) == 3 and min(map(float, success)) >= 0.8
    assert "eval/return/heavy" in text, "environments defined in a cell were stepped by workers"


def check_family(text):
    scores = dict(re.findall(r"'(eval_\w+)': ([\d.]+)", text))
    assert scores.keys() == {"eval_base", "eval_interpolation", "eval_extrapolation"}
    # a random policy scores less than 0.1, and this one 0.45 to 0.7
    assert float(scores["eval_base"]) > 0.25 and float(scores["eval_interpolation"]) > 0.25


def check_comparison(text):
    returns = re.findall(r"runs/(?:mean|pcgrad)/version_[01] (-?\d+\.\d+)", text)
    assert len(returns) == 4, "two methods with two seeds"
    assert statistics.mean(map(float, returns)) > -5, "before training it is -7"


NOTEBOOKS = {
    "01_first_run": (2, check_first_run),
    "02_dm_control": (3, check_family),
    "03_compare_methods": (1, check_comparison),
}
"""The number of pictures, and a check of what is printed."""


def test_every_notebook_is_run():
    assert {path.stem for path in ROOT.glob("notebooks/*.ipynb")} == {*NOTEBOOKS}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_and_shows_what_it_says(name, tmp_path, monkeypatch):
    if name == "02_dm_control":
        pytest.importorskip("dm_control")
        skip_without_renderer()
    num_pictures, check = NOTEBOOKS[name]
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # it is stored without them
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the programs that it starts
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == num_pictures
    check("".join(output.get("text", "") for output in outputs))
