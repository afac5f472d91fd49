"""Worker processes: a program of ours that gets the benchmark, not the user's main module."""

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mtrl_lightning.envs import ToyReach, VectorEnv
from tests.helpers.fakes import arrays_of

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys

import gymnasium as gym
import numpy as np
import torch

from mtrl_lightning.envs import ToyReach, VectorEnv

with open(sys.argv[1], "a") as file:
    file.write("run\\n")

FACTORS = np.array([0.5, 2.0])


class Scaled(gym.RewardWrapper):
    def __init__(self, env, factor):
        super().__init__(env)
        self.factor = factor

    def reward(self, reward):
        return float(reward * self.factor)

    def loaded(self):
        main = sys.modules["__main__"]
        return "torch" in sys.modules, hasattr(main, "Scaled"), sys.stdin.read()


class Cells(ToyReach):
    def make_env(self, task, split, seed):
        return Scaled(super().make_env(task, split, seed), FACTORS[task])


found = []
for workers in (0, 2):
    envs = VectorEnv(Cells(2, 4), [0, 1], num_workers=workers)
    found.append([envs.reset()[0].tolist()])
    for k in range(10):
        result = envs.step(np.full((2, 2), 0.1 * k - 0.5))
        found[-1].append([array.tolist() for array in result[:4]])
    if workers:
        print(envs.call("loaded"))
    envs.close()
print(found[0] == found[1], len(found[0]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_file", [True, False])
def test_workers_step_envs_of_an_unguarded_script(tmp_path, has_file):
    """Without a file, as in a notebook: its cells are no module that a worker could import."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(script) if has_file else "-", str(log)],
        input=None if has_file else SCRIPT,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    loaded, equal = ended.stdout.splitlines()
    assert loaded == str(((False, False, ""), (False, False, "")))
    assert equal == "True 11"
    assert log.read_text() == "run\n", "the script runs once"


MODULE = """
import numpy as np
from mtrl_lightning.envs import ToyReach


class Heavy(ToyReach):
    def __init__(self):
        super().__init__()
        self.ballast = np.arange(500_000.0)
"""


def test_workers_import_modules_of_the_user_and_large_benchmarks(tmp_path, monkeypatch):
    """The benchmark is larger than a pipe, and its module is on the main process's path only."""
    (tmp_path / "a_module_of_the_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    benchmark = importlib.import_module("a_module_of_the_user").Heavy()
    results = []
    for workers in (0, 1):
        envs = VectorEnv(benchmark, [0, 1], num_workers=workers)
        envs.reset(seed=1)
        results.append(envs.step(np.zeros((2, 2)))[0].tolist())
        envs.close()
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts Linux's file descriptors")
def test_closed_environments_leave_no_descriptor_open():
    def cycle():
        envs = VectorEnv(ToyReach(), [0, 1, 2], num_workers=3, max_restarts=1)
        envs.reset()
        os.kill(envs.worker_pids[1], 9)
        envs.step(np.zeros((3, 2)))
        assert envs.num_restarts == 1
        envs.close()

    cycle()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    cycle()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this is what other systems do")
def test_shared_memory_works_without_memfd(tmp_path, monkeypatch):
    def collected(num_workers):
        envs = VectorEnv(ToyReach(), [0, 1, 2], num_workers=num_workers)
        observation_ED, _ = envs.reset(seed=1)
        envs.send(np.full((3, 2), 0.3))
        result = envs.receive()
        envs.close()
        return [observation_ED, *arrays_of(result).values()]

    expected = collected(0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create")
    assert all(np.array_equal(a, b) for a, b in zip(collected(1), expected, strict=True))
    assert list(tmp_path.iterdir()) == []
