"""Tasks of which every transition is the same one, and a policy that always acts alike."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.spaces import Box
from torch import Tensor

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.envs import Benchmark
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.types import ActOutput, Mode

NUM_TASKS = 3
HORIZON = 7


class Still(Benchmark):
    """Observations and rewards that depend on the task alone."""

    splits = ("train", "eval")

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            task_names=tuple(f"still-{task}" for task in range(NUM_TASKS)),
            observation_space=Box(-np.inf, np.inf, (4,), np.float32),
            action_space=Box(-1.0, 1.0, (2,), np.float32),
            horizon=HORIZON,
            has_success=False,
            train_tasks=tuple(range(NUM_TASKS)),
            protocol={"benchmark": "still"},
        )

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        return StillEnv(self.spec, task)


class StillEnv(gym.Env):
    """Always the same observation and reward."""

    def __init__(self, spec: EnvSpec, task: int) -> None:
        self.observation_space = spec.observation_space
        self.action_space = spec.action_space
        self._observation_D = np.linspace(-1, task, 4).astype(np.float32)
        self._reward = 0.5 + task
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[npt.NDArray, dict]:
        self.steps = 0
        return self._observation_D, {}

    def step(self, action: npt.NDArray) -> tuple[npt.NDArray, float, bool, bool, dict]:
        self.steps += 1
        return self._observation_D, self._reward, False, self.steps == HORIZON, {}

    def get_state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def set_state(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Steady(SAC):
    """Act by the task alone, and draw no noise in the losses."""

    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode
    ) -> ActOutput:
        return np.stack([0.1 * task_E, -0.2 * task_E], axis=1).astype(np.float32)

    def noise_like(self, action_BA: Tensor) -> Tensor:
        return torch.zeros_like(action_BA)
