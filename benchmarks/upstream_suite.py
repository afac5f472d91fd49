"""dm_control's suite as Shimmy and Gymnasium offer it, with little of ours but the padding.

The quadruped, which dm_control 1.0.28 cannot step with NumPy 2.4, and the families, which it does
not have, are dm_control's ``Environment`` with its own code, as our benchmarks load them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FlattenObservation, RescaleAction

from mtrl_lightning.envs import DMControl
from mtrl_lightning.envs.benchmarks.dm_control import SuiteTasks
from mtrl_lightning.envs.benchmarks.dm_control_domains import import_suite
from mtrl_lightning.envs.benchmarks.padding import pad_to_spec
from mtrl_lightning.errors import import_optional


def make_vec(benchmark: SuiteTasks, strategy: Literal["sync", "async"]) -> gym.vector.VectorEnv:
    """Make Gymnasium's ``SyncVectorEnv`` or ``AsyncVectorEnv`` of Shimmy's wrapper of the tasks.

    Gymnasium needs one space for all: smaller observations and actions are padded, as ours are,
    and actions lie in [-1, 1].

    Args:
        benchmark: the tasks, with dm_control's own code (``fast=False``) and no action repeat.
        strategy: which of both.
    """
    makers = [partial(_make_one, benchmark, name) for name in benchmark.spec.task_names]
    kind = gym.vector.SyncVectorEnv if strategy == "sync" else gym.vector.AsyncVectorEnv
    return kind(makers, observation_mode="different", autoreset_mode=AutoresetMode.SAME_STEP)


def _make_one(benchmark: SuiteTasks, name: str) -> gym.Env:
    shimmy = import_optional("shimmy.dm_control_compatibility", '"mtrl_lightning[bench]"')
    env: gym.Env = FlattenObservation(shimmy.DmControlCompatibilityV0(_load(benchmark, name)))
    bounds = env.action_space
    assert isinstance(bounds, Box)
    if not (np.all(bounds.low == -1) and np.all(bounds.high == 1)):  # the quadruped
        env = RescaleAction(env, np.float32(-1), np.float32(1))
    return pad_to_spec(env, benchmark.spec)


def _load(benchmark: SuiteTasks, name: str) -> Any:
    domain, _, task = name.partition("-")
    if isinstance(benchmark, DMControl) and domain != "quadruped":
        return import_suite().load(domain, task)
    return benchmark.load(name)
