"""A custom benchmark that also evaluates its tasks on held-out gravities."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from gymnasium.wrappers import RescaleAction

from mtrl_lightning import SAC, Benchmark, EnvSpec, train
from mtrl_lightning.networks import MLP

GRAVITIES = {
    "train": {"light": (3.0, 4.0), "heavy": (9.0, 10.0)},
    "eval": {"light": (3.0, 4.0), "heavy": (9.0, 10.0)},
    "eval_extrapolation": {"light": (1.0, 2.0), "heavy": (11.0, 12.0)},
}
LOW = np.float32(-1.0)
HIGH = np.float32(1.0)


class Episodes(gym.Wrapper):
    """Seed the episodes as ``Benchmark`` requires, and sample a gravity for each.

    Args:
        env: the pendulum.
        gravities: smallest and largest gravity.
        is_test: whether ``reset(seed=k)`` starts test episode ``k``, and ``reset()`` the next one.
        seed: of the training episodes.
    """

    def __init__(
        self, env: gym.Env, gravities: tuple[float, float], is_test: bool, seed: int
    ) -> None:
        super().__init__(env)
        self.gravities = gravities
        self.is_test = is_test
        self.next_seed: int | None = 0 if is_test else seed

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        seed = self.next_seed if seed is None else seed
        # only test episodes have their own seeds; training uses one random stream
        self.next_seed = seed + 1 if self.is_test and seed is not None else None
        observation, info = self.env.reset(seed=seed, options=options)
        pendulum: Any = self.env.unwrapped
        pendulum.g = pendulum.np_random.uniform(*self.gravities)
        return observation, info


class Pendulums(Benchmark):
    """Swing up a pendulum; a task is a range of gravities."""

    splits = tuple(GRAVITIES)  # the first is for training, the others for evaluation

    @property
    def spec(self) -> EnvSpec:
        """The tasks' names and spaces."""
        names = tuple(GRAVITIES["train"])
        largest = np.array([1.0, 1.0, 8.0], np.float32)
        return EnvSpec(
            task_names=names,
            observation_space=Box(-largest, largest),
            action_space=Box(LOW, HIGH, (1,), np.float32),
            horizon=200,
            has_success=False,
            train_tasks=tuple(range(len(names))),
            protocol={"benchmark": "pendulums", "horizon": 200},
        )

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make the environment of one task; actions are rescaled to [-1, 1]."""
        gravities = GRAVITIES[split][self.spec.task_names[task]]
        env = RescaleAction(gym.make("Pendulum-v1", max_episode_steps=200), LOW, HIGH)
        return Episodes(env, gravities, split != "train", seed)


if __name__ == "__main__":
    small = partial(MLP, width=32, depth=2)
    agent = partial(SAC, actor=small, critic=small)
    run = train(Pendulums(), agent, total_steps=8_000, name="pendulums")
    print(run.evaluation["eval/return"], run.evaluation["eval_extrapolation/return"])
