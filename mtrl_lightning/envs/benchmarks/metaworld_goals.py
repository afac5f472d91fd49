"""The goals of ``metaworld.MT1(task, seed).train_tasks``, sampled without simulation.

MetaWorld samples a goal by resetting an environment, which moves the hand for 100 physics steps.
Here, its ``reset_model`` runs without physics, because its rejection sampling does not depend on
the hand's position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.envs.fast.metaworld_fast import DOWN, Upstream
from mtrl_lightning.envs.fast.metaworld_models import new_model
from mtrl_lightning.errors import import_optional


class _GoalSampler(Upstream):
    """A task's environment that only samples goals, without simulating."""

    def _initialize_simulation(self) -> tuple[Any, Any]:
        import mujoco

        model = new_model(self.fullpath, is_drawable=False)
        return model, mujoco.MjData(model)

    def do_simulation(self, ctrl: Any, n_frames: int) -> None:
        pass

    def _reset_hand(self, steps: int = 50) -> None:
        self.data.mocap_pos[0] = self.hand_init_pos  # once, since it does not move without physics
        self.data.mocap_quat[0] = DOWN
        self.init_tcp = self.tcp_center

    def _get_curr_obs_combined_no_goal(self) -> npt.NDArray[np.float64]:
        return np.zeros(18)

    def _get_state_rand_vec(self) -> npt.NDArray[np.float64]:
        space = self._random_reset_space
        self._last_rand_vec = self._generator.uniform(space.low, space.high, size=space.low.size)
        return self._last_rand_vec


def sampled_goals(name: str, seed: int) -> list[Any]:
    """Return MetaWorld's 50 goals of a task.

    Args:
        name: name of the task.
        seed: seed of ``metaworld.MT1``.
    """
    suite = import_optional("metaworld", "metaworld")
    task_class = suite.ALL_V3_ENVIRONMENTS[name]
    kwargs = {
        key: value
        for key, value in suite._env_dict.ML1_ARGS_KWARGS[name]["kwargs"].items()
        if key != "task_id"
    }
    env = type(task_class.__name__, (_GoalSampler, task_class), {})()
    env._generator = np.random.RandomState(seed)
    env._set_task_called = True
    env._set_task_inner(**kwargs)
    goals = []
    for _ in range(suite._N_GOALS):
        env.reset()
        goal = {
            **kwargs,
            "rand_vec": env._last_rand_vec,
            "env_cls": task_class,
            **suite._MT_OVERRIDE,
        }
        goals.append(suite._encode_task(name, goal))
    env.close()
    assert len({goal.data for goal in goals}) == len(goals)
    return goals
