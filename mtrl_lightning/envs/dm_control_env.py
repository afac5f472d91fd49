"""A task of dm_control's suite as a Gymnasium environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box

from mtrl_lightning.envs.simulator import MujocoState
from mtrl_lightning.errors import ConfigurationError


class SuiteEnv(gym.Env):
    """Step a task by dm_control's own ``Environment.step``.

    Observations are the values of dm_control's dictionary in its order, in single precision.

    Args:
        environment: dm_control's ``Environment`` of the task.
        action_repeat: control steps per environment step; their rewards are added.
        horizon: control steps in an episode, at most dm_control's own.
        reward_scale: factor of every reward.
        numbered: whether a seed is the number of a test episode, which the next one follows.
        seed: of the task's draws until ``reset`` gets another one.

    Raises:
        ConfigurationError: if actions are not bounded.
    """

    def __init__(
        self,
        environment: Any,
        action_repeat: int,
        horizon: int,
        reward_scale: float,
        numbered: bool,
        seed: int,
    ) -> None:
        self._environment = environment
        self._task = environment.task
        self._physics = environment.physics
        self.model = environment.physics.model.ptr
        """MuJoCo's own."""
        self.data = environment.physics.data.ptr
        """MuJoCo's own."""
        self._simulation = MujocoState(self.model, self.data)
        self._action_repeat = action_repeat
        self._horizon = horizon
        self._reward_scale = reward_scale
        self._num_steps = horizon  # `reset` comes first
        self._next_episode = 0 if numbered else None
        self._seed: int | None = None if numbered else seed
        self._observation: Any = None
        actions = environment.action_spec()
        low, high = actions.minimum, actions.maximum
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ConfigurationError(
                "its actions are not bounded, so they cannot be rescaled to [-1, 1]"
            )
        self._is_rescaled = not (np.all(low == -1) and np.all(high == 1))
        self._low = low
        self._scale = (high - low) / 2
        size = sum(
            int(np.prod(value.shape)) for value in environment.observation_spec().values()
        )
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = Box(-1.0, 1.0, actions.shape, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        if self._next_episode is not None:
            seed = self._next_episode if seed is None else seed
            self._next_episode = seed + 1
        elif seed is None:
            seed = self._seed
        self._seed = None
        if seed is not None:
            self._task._random = np.random.RandomState(seed)
        self._num_steps = 0
        return _flat(self._environment.reset().observation), {}

    def step(
        self, action: npt.NDArray
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        if self._num_steps >= self._horizon:
            raise ResetNeeded("the episode has ended, or none has begun: call reset() first")
        if self._is_rescaled:
            action = self._low + self._scale * (action.astype(np.float64) + 1)
        total = 0.0
        for _ in range(min(self._action_repeat, self._horizon - self._num_steps)):
            reward, last_discount = self._control_step(action)
            total += reward
            self._num_steps += 1
            if last_discount is not None:
                self._num_steps = self._horizon
                break
        is_over = self._num_steps == self._horizon
        terminated = is_over and last_discount == 0
        truncated = is_over and not terminated
        return self._observe(), float(total) * self._reward_scale, terminated, truncated, {}

    def _control_step(self, action: npt.NDArray) -> tuple[Any, float | None]:
        """Return a control step's reward, and the discount that it ends the episode with."""
        step = self._environment.step(action)
        self._observation = step.observation
        return step.reward, step.discount if step.last() else None

    def _observe(self) -> npt.NDArray[np.float32]:
        return _flat(self._observation)

    def get_state(self) -> dict[str, Any]:
        return {
            "simulation": self._simulation.get(),
            "task": dict(vars(self._task)),
            "num_steps": self._num_steps,
            "next_episode": self._next_episode,
            "seed": self._seed,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._simulation.set(state["simulation"])
        attributes = vars(self._task)
        attributes.clear()
        attributes.update(state["task"])
        self._num_steps = state["num_steps"]
        self._next_episode = state["next_episode"]
        self._seed = state["seed"]
        self._environment._step_count = self._num_steps
        self._environment._reset_next_step = self._num_steps >= self._horizon


class FastSuiteEnv(SuiteEnv):
    """Step a task as ``Environment.step`` does, and make an observation only where it is returned.

    Args:
        environment: dm_control's ``Environment`` of the task.
        action_repeat: control steps per environment step; their rewards are added.
        horizon: control steps in an episode, at most dm_control's own.
        reward_scale: factor of every reward.
        numbered: whether a seed is the number of a test episode, which the next one follows.
        seed: of the task's draws until ``reset`` gets another one.

    Raises:
        ConfigurationError: if actions are not bounded.
    """

    def __init__(self, environment: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(environment, *args, **kwargs)
        self._num_substeps = environment._n_sub_steps

    def _control_step(self, action: npt.NDArray) -> tuple[Any, float | None]:
        task = self._task
        physics = self._physics
        task.before_step(action, physics)
        physics.step(self._num_substeps)
        task.after_step(physics)
        return task.get_reward(physics), task.get_termination(physics)

    def _observe(self) -> npt.NDArray[np.float32]:
        return _flat(self._task.get_observation(self._physics))


def _flat(observation: dict[str, Any]) -> npt.NDArray[np.float32]:
    return np.concatenate(
        [value.ravel() for value in observation.values()], dtype=np.float32, casting="same_kind"
    )
