import importlib.util
import re
from collections.abc import Callable
from typing import NamedTuple

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

MAX_BYTES = 200_000
"""Size of a notebook with its pictures."""


def check_first_run(text):
    success = text.split("success of each task: [")[1].split("]")[0].split(",")
    assert len(success) == 3 and min(map(float, success)) >= 0.8
    assert "eval/return/heavy" in text, "environments defined in a cell were stepped by workers"


def check_sweep(text):
    number = r"(-?\d+\.\d+)"
    rows = re.findall(rf"complete +{number} +{number} +\[{number}, {number}\]", text)
    assert len(rows) == 2, "a configuration for each method"
    # before training it is -7
    assert all(float(best) > 5 and float(low) <= float(high) for best, _, low, high in rows)


class Expected(NamedTuple):
    """What a notebook needs and shows."""

    num_pictures: int
    check: Callable[[str], None]
    """Called with what it prints."""
    package: str | None = None
    """Without which it is skipped."""


NOTEBOOKS = {
    "01_first_run": Expected(2, check_first_run),
    "03_compare_methods": Expected(2, check_sweep, package="optuna"),
}


def test_every_notebook_is_run():
    assert {path.stem for path in ROOT.glob("notebooks/*.ipynb")} == {*NOTEBOOKS}


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def num_pictures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs_of(notebook))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_and_shows_what_it_says(name, tmp_path, monkeypatch):
    expected = NOTEBOOKS[name]
    path = ROOT / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert num_pictures(notebook) == expected.num_pictures, "it is stored with what it shows"
    assert path.stat().st_size < MAX_BYTES
    if expected.package and importlib.util.find_spec(expected.package) is None:
        pytest.skip(f"{expected.package} is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the programs that it starts
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "".join(output.get("text", "") for output in outputs_of(notebook))
    assert num_pictures(notebook) == expected.num_pictures
    expected.check(text)
