import importlib.util
import re
import statistics

import nbformat
import pytest
from nbclient import NotebookClient

from mtrl_lightning.envs.render.opengl import find_renderer
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.command_line import ROOT

pytestmark = pytest.mark.slow


def check_first_run(text):
    success = text.split("success of each task: [")[1].split("]")[0].split(",")
    assert len(success) == 3 and min(map(float, success)) >= 0.8
    assert "eval/return/heavy" in text, "environments defined in a cell were stepped by workers"


def check_family(text):
    evaluated = "cartpole-swingup-pole-0.35, cartpole-swingup-pole-0.4, cartpole-swingup-pole-0.1"
    assert f"Evaluated without training: {evaluated}" in text
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
DRAWN = "02_dm_control"
"""Needs MuJoCo and a renderer for one of its pictures."""


def test_every_notebook_is_run():
    assert {path.stem for path in ROOT.glob("notebooks/*.ipynb")} == {*NOTEBOOKS}


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def can_draw():
    try:
        find_renderer()
    except ConfigurationError:
        return False
    return True


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs_and_shows_what_it_says(name, tmp_path, monkeypatch):
    num_pictures, check = NOTEBOOKS[name]
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    assert outputs_of(notebook) == []  # it is stored without them
    if name == DRAWN and importlib.util.find_spec("dm_control") is None:
        pytest.skip("dm_control is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the programs that it starts
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = outputs_of(notebook)
    text = "".join(output.get("text", "") for output in outputs)
    is_drawn = name != DRAWN or can_draw()
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == num_pictures - (not is_drawn)
    assert is_drawn == ("No video: " not in text)
    check(text)
