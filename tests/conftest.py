"""What all tests share.

PyTorch and the package are imported in fixtures: pytest-xdist's main process runs no test, and
starts the others once it has read this file.
"""

import contextlib
import gc
import io
import os
import sys
from functools import cache, lru_cache

import pytest

SLOWEST = (
    "tests/test_notebooks.py",
    "tests/matrix/test_toy.py",
    "tests/matrix/test_continuation.py",
    "tests/test_ray.py",
    "tests/test_metaworld_learning.py",
    "tests/test_readme.py",
    "tests/test_ranks.py",
    "tests/test_benchmarks.py",
    "tests/test_configs.py",
)
"""The files whose slow tests take longest, the longest first."""

# small networks gain nothing from threads, and lose much where other processes use the cores
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def small_process():
    """Use one thread, and keep the models of all of MetaWorld's tasks.

    A program keeps the last two, since it makes a task's environments in a row. Tests make those
    of all tasks often: to compile a model takes 0.3 s, and to keep it 1 MiB.
    """
    import torch

    from mtrl_lightning.envs.fast import metaworld_models

    torch.set_num_threads(1)
    compiled = metaworld_models._compiled.__wrapped__
    metaworld_models._compiled = lru_cache(maxsize=60)(compiled)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Search for no garbage while tests are collected: what they import stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Start the longest files first, so that no worker waits for one at the end."""
    if config.option.markexpr != "slow":
        return
    ranks = {file: rank for rank, file in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(SLOWEST)))


@pytest.fixture(autouse=True)
def no_curves(request, monkeypatch):
    """Leave out ``curves.png`` and the charts of pages in this process.

    They take a third of a short run's time.

    Tests that are marked ``curves`` have it.
    """
    from tests.helpers.command_line import leave_out_curves

    if request.node.get_closest_marker("curves") is None:
        leave_out_curves(monkeypatch)


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory):
    """Train runs of the toy benchmark, each once; return their folder and what they print."""
    from tests.helpers.command_line import CommandLine, leave_out_curves

    @cache
    def train_once(name, *options):
        with (
            pytest.MonkeyPatch.context() as monkeypatch,
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            leave_out_curves(monkeypatch)
            made = CommandLine(tmp_path_factory.mktemp("finished"), monkeypatch)
            made("fit", f"--name={name}", *options)
        return made.folder(name), printed.getvalue()

    return train_once


@pytest.fixture
def command_line(tmp_path, monkeypatch, finished_runs):
    from tests.helpers.command_line import CommandLine

    made = CommandLine(tmp_path, monkeypatch, finished_runs)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()
    wandb = sys.modules.get("wandb")
    if getattr(wandb, "run", None):  # Lightning would reuse it in the next test
        wandb.finish()
