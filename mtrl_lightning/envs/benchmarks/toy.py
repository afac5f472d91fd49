"""Benchmarks without a simulator: move a point to a goal that depends only on the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from mtrl_lightning.checks import above, at_least
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.spec import EnvSpec

STEP = 0.2
"""Distance that an action of 1 moves the point along an axis."""
RADIUS = 0.15
"""Distance to the goal within which a step is a success."""
IMAGE_SIZE = 128
"""Width and height of an image in pixels."""


class ToyReach(Benchmark):
    """Move a point in the square [-1, 1]² to the task's goal, on a circle of radius 0.7.

    The observation is only the position, so that only a task-conditioned agent can solve more than
    one task. The reward is 1 minus the distance to the goal.

    Args:
        num_tasks: number of tasks, at least 1; the goal of task ``i`` is at the angle
            ``2 pi i / num_tasks``.
        horizon: steps in an episode.
    """

    def __init__(self, num_tasks: int = 3, horizon: int = 20) -> None:
        at_least(1, num_tasks=num_tasks, horizon=horizon)
        self.num_tasks = num_tasks
        self.horizon = horizon

    @property
    def spec(self) -> EnvSpec:
        """Two numbers in, two numbers out."""
        return _spec(self.num_tasks, self.horizon, {"benchmark": "toy", "horizon": self.horizon})

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make the environment of one task."""
        return _ToyEnv(
            task, 2 * np.pi * task / self.num_tasks, self.horizon, split != "train", seed
        )


class ToyConflict(Benchmark):
    """``ToyReach`` with conflicting tasks: in the effect of actions, and in reward scale.

    Task ``i`` has its goal at the angle ``4 pi i / num_tasks`` and rotates actions by
    ``2 pi i / num_tasks``. With an even number of tasks, ``i`` and ``i + num_tasks / 2`` share a
    goal, but an action towards it in one leads away from it in the other, from any position.
    Rewards increase from task to task. A network without task conditioning can solve at most one
    task of each such pair.

    Args:
        num_tasks: number of tasks, at least 2.
        horizon: steps in an episode.
        reward_spread: ratio of the last task's reward scale to the first's, spaced geometrically.
    """

    def __init__(self, num_tasks: int = 6, horizon: int = 20, reward_spread: float = 10.0) -> None:
        at_least(2, num_tasks=num_tasks)
        at_least(1, horizon=horizon)
        above(0, reward_spread=reward_spread)
        self.num_tasks = num_tasks
        self.horizon = horizon
        self.reward_spread = reward_spread

    @property
    def spec(self) -> EnvSpec:
        """Two numbers in, two numbers out."""
        names = {
            "benchmark": "toy_conflict",
            "horizon": self.horizon,
            "reward_spread": self.reward_spread,
        }
        return _spec(self.num_tasks, self.horizon, names)

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make the environment of one task."""
        angle = 2 * np.pi * task / self.num_tasks
        scale = self.reward_spread ** (task / (self.num_tasks - 1))
        return _ToyEnv(
            task, 2 * angle, self.horizon, split != "train", seed, rotation=angle, scale=scale
        )


def _spec(num_tasks: int, horizon: int, protocol: Mapping[str, Any]) -> EnvSpec:
    square = Box(-1.0, 1.0, (2,), np.float32)
    return EnvSpec(
        task_names=tuple(f"goal-{i}" for i in range(num_tasks)),
        observation_space=square,
        action_space=square,
        horizon=horizon,
        has_success=True,
        train_tasks=tuple(range(num_tasks)),
        protocol=protocol,
    )


class _ToyEnv(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(
        self,
        task: int,
        angle: float,
        horizon: int,
        numbered: bool,
        seed: int,
        rotation: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        self.observation_space = self.action_space = Box(-1.0, 1.0, (2,), np.float32)
        self._goal = 0.7 * np.array([np.cos(angle), np.sin(angle)])
        self._task = task
        self._horizon = horizon
        self._numbered = numbered
        self._turn = np.array(
            [[np.cos(rotation), -np.sin(rotation)], [np.sin(rotation), np.cos(rotation)]]
        )
        self._scale = scale
        self._position = np.zeros(2)
        self._steps = 0
        self._next_episode = 0
        self.np_random = np.random.default_rng(seed)

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        super().reset(seed=seed)
        if self._numbered:
            episode = self._next_episode if seed is None else seed
            self._next_episode = episode + 1
            self.np_random = np.random.default_rng([episode, self._task])
        self._position = self.np_random.uniform(-1, 1, 2)
        self._steps = 0
        return self._position.astype(np.float32), {}

    def step(self, action: npt.NDArray) -> tuple[npt.NDArray, float, bool, bool, dict[str, Any]]:
        self._position = np.clip(self._position + STEP * self._turn @ np.clip(action, -1, 1), -1, 1)
        self._steps += 1
        distance = float(np.linalg.norm(self._position - self._goal))
        truncated = self._steps >= self._horizon
        reward = self._scale * (1 - distance)
        return (
            self._position.astype(np.float32),
            reward,
            False,
            truncated,
            {"success": distance < RADIUS},
        )

    def render(self) -> npt.NDArray[np.uint8]:
        """Draw the point in blue, and the goal region in green."""
        x, y = np.meshgrid(np.linspace(-1, 1, IMAGE_SIZE), np.linspace(1, -1, IMAGE_SIZE))
        image = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), 255, np.uint8)
        for center, radius, color in (
            (self._goal, RADIUS, (120, 200, 120)),
            (self._position, RADIUS / 3, (30, 60, 200)),
        ):
            image[np.hypot(x - center[0], y - center[1]) < radius] = color
        return image
