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

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys

import gymnasium as gym
import numpy as np
import torch

from mtrl_lightning.envs import ToyReach, VectorEnv

print("runs once")


class Scaled(gym.RewardWrapper):
    def reward(self, reward):
        return FACTOR * reward

    def loaded(self):
        return "torch" in sys.modules, hasattr(sys.modules["__main__"], "Scaled")


class Own(ToyReach):
    def make_env(self, task, split, seed):
        return Scaled(super().make_env(task, split, seed))


FACTOR = 0.5
for workers in (0, 1):
    envs = VectorEnv(Own(2, 4), [0, 1], num_workers=workers)
    envs.reset()
    print(envs.step(np.full((2, 2), 0.1))[1].tolist())
print(envs.call("loaded"))
"""


@pytest.mark.slow
def test_workers_step_envs_of_an_unguarded_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = {"stdout": subprocess.PIPE, "text": True, "check": True, "timeout": 100}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "script.py")]
    printed = subprocess.run(command, cwd=ROOT, env=environment, **options).stdout.splitlines()
    assert printed[0] == "runs once" and printed[1] == printed[2]
    assert printed[3:] == [str(((False, False), (False, False)))]


def test_workers_import_modules_of_the_user(tmp_path, monkeypatch):
    """The benchmark's module is on the main process's path only."""
    text = "from mtrl_lightning.envs import ToyReach\nclass Own(ToyReach): pass\n"
    (tmp_path / "a_module_of_the_user.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    benchmark = importlib.import_module("a_module_of_the_user").Own(2)
    envs = VectorEnv(benchmark, [0, 1], num_workers=1)
    assert envs.reset(seed=1)[0].shape == (2, 2)
    envs.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts Linux's file descriptors")
def test_closed_environments_leave_no_descriptor_open():
    counts = []
    for _ in range(2):
        envs = VectorEnv(ToyReach(), [0, 1, 2], num_workers=3, max_restarts=1)
        envs.reset()
        os.kill(envs.worker_pids[1], 9)
        envs.step(np.zeros((3, 2)))
        envs.close()
        del envs
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[0] == counts[1]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this is what other systems do")
def test_shared_memory_works_without_memfd(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create")
    observations = []
    for workers in (0, 1):
        envs = VectorEnv(ToyReach(), [0, 1, 2], num_workers=workers)
        envs.reset(seed=1)
        observations.append(envs.step(np.full((3, 2), 0.3))[0])
        envs.close()
    assert np.array_equal(*observations)
    assert list(tmp_path.iterdir()) == []
