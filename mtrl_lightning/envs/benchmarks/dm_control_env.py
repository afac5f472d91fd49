"""A task of dm_control's suite as a Gymnasium environment."""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box

from mtrl_lightning.envs.simulator import release
from mtrl_lightning.errors import ConfigurationError

UNLIMITED = 1e10
"""MuJoCo's ``mjMAXVAL``, which dm_control uses as the bound of unbounded actions."""
FULL_TURN = 2 * np.pi


class Stepper(Protocol):
    """Interface of control steps."""

    def step(self, action: npt.NDArray) -> tuple[Any, float | None]:
        """Make a control step; return its reward, and the discount if it ends the episode."""
        ...

    def observation(self) -> dict[str, Any]:
        """Return the observation after the last step."""
        ...


class OwnStepper:
    """dm_control's own ``Environment.step``.

    Args:
        environment: dm_control's ``Environment``.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._observation: dict[str, Any] = {}

    def step(self, action: npt.NDArray) -> tuple[Any, float | None]:
        """Step, computing an observation in every step."""
        step = self._environment.step(action)
        self._observation = step.observation
        return step.reward, step.discount if step.last() else None

    def observation(self) -> dict[str, Any]:
        """Return the last step's observation."""
        return self._observation


class FastStepper:
    """``Environment.step`` that computes observations only on request.

    Args:
        environment: dm_control's ``Environment``.
    """

    def __init__(self, environment: Any) -> None:
        self._task = environment.task
        self._physics = environment.physics
        self._num_substeps = environment._n_sub_steps

    def step(self, action: npt.NDArray) -> tuple[Any, float | None]:
        """Step."""
        task = self._task
        physics = self._physics
        task.before_step(action, physics)
        physics.step(self._num_substeps)
        task.after_step(physics)
        return task.get_reward(physics), task.get_termination(physics)

    def observation(self) -> dict[str, Any]:
        """Compute an observation."""
        return self._task.get_observation(self._physics)


class SuiteEnv(gym.Env):
    """A task of dm_control's suite.

    Observations are the concatenated values of dm_control's dictionary, in single precision. An
    episode is terminated only if its last discount is 0, and truncated otherwise.

    Args:
        environment: dm_control's ``Environment`` of the task.
        stepper: makes control steps.
        action_repeat: control steps per environment step; their rewards are summed.
        horizon: control steps in an episode, at most dm_control's own.
        reward_scale: factor of every reward.
        wrap_angles: whether to wrap angles that count full turns.
        is_drawable: whether it can be rendered; if not, its textures take no memory on Linux.
        is_for_evaluation: whether seeds are indices of test episodes, and each further reset starts
            the next one; test episode ``k`` is dm_control's first with ``random=k``.
        seed: seed of the task's random generator, until ``reset`` gets another one.
    """

    def __init__(
        self,
        environment: Any,
        stepper: Stepper,
        *,
        action_repeat: int,
        horizon: int,
        reward_scale: float,
        wrap_angles: bool,
        is_drawable: bool,
        is_for_evaluation: bool,
        seed: int,
    ) -> None:
        self._environment = environment
        self._stepper = stepper
        self._task = environment.task
        self.model = environment.physics.model.ptr
        """MuJoCo's model."""
        self.data = environment.physics.data.ptr
        """MuJoCo's data."""
        self.is_drawable = is_drawable
        """Whether it may be rendered."""
        if not is_drawable:
            release(self.model.tex_data)
        self._action_repeat = action_repeat
        self._horizon = horizon
        self._reward_scale = reward_scale
        self._turning_entries = _find_turning_entries(environment) if wrap_angles else []
        self._num_steps = horizon  # no episode has started
        self._next_episode = 0 if is_for_evaluation else None
        self._first_seed = None if is_for_evaluation else seed
        actions = environment.action_spec()
        low = actions.minimum
        high = actions.maximum
        if not (np.all(low > -UNLIMITED) and np.all(high < UNLIMITED)):
            raise ConfigurationError(
                "its actions are unbounded and cannot be rescaled to [-1, 1]: choose another task"
            )
        self._is_rescaled = not (np.all(low == -1) and np.all(high == 1))
        self._low = low
        self._scale = (high - low) / 2
        parts = environment.observation_spec().values()
        size = sum(int(np.prod(part.shape)) for part in parts)
        steps_per_second = 1 / (environment.control_timestep() * action_repeat)
        self.metadata = {"render_modes": [], "render_fps": steps_per_second}
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = Box(-1.0, 1.0, actions.shape, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        if self._next_episode is not None:
            seed = self._next_episode if seed is None else seed
            self._next_episode = seed + 1
        elif seed is None:
            seed = self._first_seed
        self._first_seed = None
        # np_random is for wrappers, whose random numbers the seed must also determine
        super().reset(seed=seed)
        if seed is not None:
            self._task._random = np.random.RandomState(seed)
        self._num_steps = 0
        return self._observed(self._environment.reset().observation), {}

    def step(
        self, action: npt.NDArray
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        num_steps = min(self._action_repeat, self._horizon - self._num_steps)
        if num_steps == 0:
            raise ResetNeeded("the episode has ended, or none has started: call reset() first")
        if self._is_rescaled:
            action = self._low + self._scale * (action.astype(np.float64) + 1)
        step = self._stepper.step
        total = 0.0
        for _ in range(num_steps):
            reward, last_discount = step(action)
            total += reward
            self._num_steps += 1
            if last_discount is not None:
                self._num_steps = self._horizon
                break
        is_over = self._num_steps == self._horizon
        terminated = is_over and last_discount == 0
        observation = self._observed(self._stepper.observation())
        truncated = is_over and not terminated
        return observation, float(total) * self._reward_scale, terminated, truncated, {}

    def _observed(self, observation: dict[str, Any]) -> npt.NDArray[np.float32]:
        """Return dm_control's observation as one vector, with angles wrapped if configured."""
        flat_D = _flat(observation)
        if self._turning_entries:
            angles = flat_D[self._turning_entries]
            flat_D[self._turning_entries] = angles - FULL_TURN * np.round(angles / FULL_TURN)
        return flat_D


def _flat(observation: dict[str, Any]) -> npt.NDArray[np.float32]:
    parts = [part.ravel() for part in observation.values()]
    return np.concatenate(parts, dtype=np.float32, casting="same_kind")


def _find_turning_entries(environment: Any) -> list[int]:
    """Return the entries of an observation that count the full turns of a joint.

    These increase by a full turn when the joint makes one; others contain sines and cosines of
    angles, or positions. If a spring, a limit or a position actuator acts on a joint, a full turn
    changes the accelerations and thus the state, so that its angle is not wrapped. Reset the
    environment afterwards.
    """
    import mujoco

    task = environment.task
    physics = environment.physics
    model = physics.model.ptr
    data = physics.data.ptr
    before_D = _flat(environment.reset().observation)
    mujoco.mj_forward(model, data)
    acceleration = data.qacc.copy()
    entries: set[int] = set()
    for joint in np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_HINGE):
        address = model.jnt_qposadr[joint]
        data.qpos[address] += FULL_TURN
        mujoco.mj_forward(model, data)
        if np.allclose(data.qacc, acceleration, atol=1e-3):
            change_D = _flat(task.get_observation(physics)) - before_D
            entries.update(np.flatnonzero(np.isclose(change_D, FULL_TURN, atol=1e-3)).tolist())
        data.qpos[address] -= FULL_TURN
    return sorted(entries)
