"""dm_control's suite as Shimmy and Gymnasium offer it, with nothing of ours but the padding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import gymnasium as gym
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FlattenObservation

from mtrl_lightning.envs import DMControl
from mtrl_lightning.envs.dm_control_domains import import_suite
from mtrl_lightning.envs.padding import pad_to_spec
from mtrl_lightning.errors import import_optional
from mtrl_lightning.types import EnvSpec


def make_vec(tasks: Sequence[str], strategy: Literal["sync", "async"]) -> gym.vector.VectorEnv:
    """Make Gymnasium's ``SyncVectorEnv`` or ``AsyncVectorEnv`` of Shimmy's wrapper of the tasks.

    Gymnasium needs one size for all: smaller observations and actions are padded, as ours are.

    Args:
        tasks: a set such as ``DMC19``, or names.
        strategy: which of both.
    """
    spec = DMControl(tasks[0] if len(tasks) == 1 else list(tasks), action_repeat=1).spec
    makers = [partial(_make_one, name, spec) for name in spec.task_names]
    kind = gym.vector.SyncVectorEnv if strategy == "sync" else gym.vector.AsyncVectorEnv
    return kind(makers, observation_mode="different", autoreset_mode=AutoresetMode.SAME_STEP)


def _make_one(name: str, spec: EnvSpec) -> gym.Env:
    suite = import_suite()
    shimmy = import_optional("shimmy.dm_control_compatibility", '"mtrl_lightning[bench]"')
    wrapped = shimmy.DmControlCompatibilityV0(suite.load(*name.split("-")))
    return pad_to_spec(FlattenObservation(wrapped), spec)
