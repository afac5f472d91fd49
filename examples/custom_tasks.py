"""Train on custom Gymnasium environments, one task per environment."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning import SAC, GymnasiumTasks, train
from mtrl_lightning.networks import MLP


class Cart(gym.Env):
    """Push a cart to the origin and keep it there.

    Args:
        mass: mass of the cart; it is not observed, so only the task identifies it.
    """

    def __init__(self, mass: float) -> None:
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = Box(-1.0, 1.0, (1,), np.float32)
        self.mass = mass
        self.position = 0.0
        self.speed = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start at a random position; ``seed`` seeds ``np_random``, the source of randomness."""
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-1.0, 1.0)
        self.speed = 0.0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Push for 0.1 s; ``info["success"]`` is optional."""
        self.speed += 0.1 * float(action[0]) / self.mass
        self.position += 0.1 * self.speed
        distance = abs(self.position)
        return self._observation(), -distance, False, False, {"success": distance < 0.1}

    def _observation(self) -> np.ndarray:
        return np.array([self.position, self.speed], np.float32)


carts = GymnasiumTasks(
    {"light": partial(Cart, mass=0.5), "heavy": partial(Cart, mass=2.0)},
    horizon=50,
    has_success=True,
)

if __name__ == "__main__":
    small = partial(MLP, width=32, depth=2)
    agent = partial(SAC, actor=small, critic=small)
    run = train(carts, agent, total_steps=4_000, name="carts")
    print(run.evaluation["eval/return/light"], run.evaluation["eval/return/heavy"])
