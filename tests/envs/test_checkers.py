"""Gymnasium's and Stable-Baselines3's own checkers, on the environments of every benchmark."""

import warnings

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common import env_checker as stable_baselines3

from mtrl_lightning import envs
from mtrl_lightning.envs.benchmarks.dm_control_domains import import_suite
from tests.helpers.command_line import skip_without_renderer
from tests.helpers.fakes import point_in_space, point_on_a_line

EXPECTED = (
    # the environment that is stepped is the one that make_env returns, with its wrappers
    "is different from the unwrapped version",
    # zeros after a smaller observation, and the height of goals on a table
    "maximum and minimum values are equal",
    # positions and velocities of a simulation
    "value is -?infinity",
    # stacked frames have four axes; Stable-Baselines3's own networks take three
    "has an unconventional shape",
)
"""Warnings of the checkers that are not faults."""
SUITE = {domain: f"{domain}-{task}" for domain, task in import_suite().ALL_TASKS}
del SUITE["lqr"]  # its actions are not bounded
TIME = "gymnasium.wrappers.TimeAwareObservation"
OWN = {
    "light": {"id": "Pendulum-v1", "kwargs": {"g": 5.0}},
    "line": point_on_a_line,
    "space": point_in_space,
}
CASES = {
    "toy": envs.ToyReach,
    "toy conflict": envs.ToyConflict,
    "Gymnasium": lambda: envs.GymnasiumTasks(OWN, horizon=30),
    "suite": lambda: envs.DMControl(["cartpole-balance", "humanoid-walk"]),
    "suite's own code": lambda: envs.DMControl(["cartpole-balance", "reacher-easy"], fast=False),
    "MetaWorld": lambda: envs.MetaWorld(["pick-place"], reward_version="v1", horizon=150),
    "wrappers": lambda: envs.WithWrappers(envs.DMControl(["reacher-easy", "walker-run"]), [TIME]),
}
SLOW = {
    "MetaWorld's other tasks": lambda: envs.MetaWorld(["assembly", "soccer", "coffee-button"]),
    "suite's domains": lambda: envs.DMControl([*SUITE.values()]),
    "family": lambda: envs.DMControlFamily("finger_length"),
    "pixels": lambda: envs.Pixels(envs.DMControl(["walker-walk"]), size=36),
}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_checkers_find_nothing_but_expected_warnings(name):
    if name == "pixels":
        skip_without_renderer()
    benchmark = {**CASES, **SLOW}[name]()
    for split in benchmark.splits:
        for task in benchmark.split_tasks(split):
            env = benchmark.make_env(task, split, seed=0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for text in EXPECTED:
                    warnings.filterwarnings("ignore", f"(?s).*{text}")
                check_env(env, skip_render_check=True)
                if not hasattr(env.unwrapped, "compute_reward"):  # taken for one with goals
                    stable_baselines3.check_env(env)
            assert all(map(np.array_equal, rollout(env), rollout(env))), "a seed determines them"
            env.close()


def rollout(env, num_steps=12):
    """Return observations, all of which lie in the space, and rewards of an episode."""
    generator = np.random.default_rng(0)
    observations, steps = [env.reset(seed=3)[0]], []
    for _ in range(num_steps):
        action = generator.uniform(-1, 1, env.action_space.shape).astype(env.action_space.dtype)
        observation, *step, _ = env.step(action)
        observations.append(observation)
        steps.append(step)
        if any(step[1:]):
            break
    observations.append(env.reset()[0])
    assert all(observation in env.observation_space for observation in observations)
    return [*observations, np.array(steps)]
