"""Gymnasium's and Stable-Baselines3's own checkers, over the environments of every benchmark."""

from __future__ import annotations

import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import StickyAction
from stable_baselines3.common import env_checker as stable_baselines3

from mtrl_lightning.envs import (
    DMControl,
    DMControlFamily,
    GymnasiumTasks,
    MetaWorld,
    Padded,
    Pixels,
    ToyConflict,
    ToyReach,
    WithWrappers,
)
from mtrl_lightning.envs.benchmarks.dm_control_domains import import_suite
from tests.helpers.command_line import skip_without_renderer
from tests.helpers.fakes import point_in_space, point_on_a_line

WRAPPED = "is different from the unwrapped version"
"""The environment that is stepped is the one that ``make_env`` returns, wrappers included."""
CONSTANT = "maximum and minimum values are equal"
"""Zeros behind a smaller observation, and the height of goals on a table, are constant."""
UNBOUNDED = "value is -?infinity"
"""Positions and velocities of a simulation have no bound."""
STACKED = "has an unconventional shape"
"""Stacked frames have four axes; Stable-Baselines3's own networks take three."""

LEVEL = ("assembly-v3", "soccer-v3")
"""Some tasks of MetaWorld whose goals have the same height."""
SUITE_TASKS = {domain: f"{domain}-{task}" for domain, task in import_suite().ALL_TASKS}
del SUITE_TASKS["lqr"]  # its actions are not bounded
TIME = "gymnasium.wrappers.TimeAwareObservation"
PENDULUM = {"id": "Pendulum-v1", "kwargs": {"g": 5.0}}
OWN = {"light": PENDULUM, "line": point_on_a_line, "space": point_in_space}


def metaworld(*tasks):
    return lambda: MetaWorld([*tasks])


def suite(*tasks, **options):
    return lambda: DMControl([*tasks], **options)


def slow(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.slow)


CASES = [
    (ToyReach, set()),
    (ToyConflict, set()),
    (lambda: GymnasiumTasks(OWN, horizon=30), {WRAPPED, CONSTANT, UNBOUNDED}),
    (suite("cartpole-balance", "humanoid-walk"), {WRAPPED, CONSTANT, UNBOUNDED}),
    (suite("cartpole-balance", "reacher-easy", fast=False), {WRAPPED, CONSTANT, UNBOUNDED}),
    (lambda: MetaWorld(["pick-place"], reward_version="v1", horizon=150), {WRAPPED, UNBOUNDED}),
    (lambda: WithWrappers(ToyReach(), [TIME]), {WRAPPED}),
    (lambda: WithWrappers(MetaWorld(["reach"]), [TIME]), {WRAPPED, UNBOUNDED}),
    (
        lambda: WithWrappers(DMControl(["reacher-easy", "walker-run"]), [TIME]),
        {WRAPPED, CONSTANT, UNBOUNDED},
    ),
    *[slow(metaworld(name), {WRAPPED, UNBOUNDED, CONSTANT}) for name in LEVEL],
    *[slow(metaworld(name), {WRAPPED, UNBOUNDED}) for name in ("coffee-button", "push")],
    *[slow(suite(name), {UNBOUNDED}) for name in SUITE_TASKS.values()],
    slow(lambda: DMControlFamily("finger_length"), {UNBOUNDED}),
]


@pytest.mark.parametrize(("make", "expected"), CASES)
def test_checkers_find_nothing_but_expected_warnings(make, expected):
    check(make(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", [ToyReach, metaworld("reach"), suite("walker-walk")])
def test_checkers_find_nothing_in_pixels(make):
    skip_without_renderer()
    check(Pixels(make(), size=36), {WRAPPED, STACKED})


def check(benchmark, expected):
    """Run both checkers on a benchmark's environments; other warnings than expected are errors."""
    for split in benchmark.splits:
        for task in benchmark.split_tasks(split):
            env = benchmark.make_env(task, split, seed=0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for text in expected:
                    warnings.filterwarnings("ignore", f"(?s).*{text}")
                check_env(env, skip_render_check=True)
                if not hasattr(env.unwrapped, "compute_reward"):  # taken for one with goals
                    stable_baselines3.check_env(env)
            first, again = rollout(env), rollout(env)
            assert all(map(np.array_equal, first, again)), "a seed determines them"
            env.close()


def rollout(env, num_steps=12):
    """Observations, all of which lie in the space; the checkers look at one step."""
    generator = np.random.default_rng(0)
    observations = [env.reset(seed=3)[0]]
    rewards = []
    for _ in range(num_steps):
        action = generator.uniform(-1, 1, env.action_space.shape).astype(env.action_space.dtype)
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        rewards.append([reward, terminated, truncated])
        if terminated or truncated:
            break
    observations.append(env.reset()[0])
    assert all(observation in env.observation_space for observation in observations)
    return [*observations, np.array(rewards)]


# ---- what they found ----


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("make", [metaworld("reach"), suite("walker-walk"), ToyReach])
def test_a_seed_decides_what_wrappers_draw(make, split):
    wrapped = WithWrappers(make(), [lambda env: StickyAction(env, 0.5)])
    rows = []
    for seed in (0, 1):
        env = wrapped.make_env(0, split, seed=seed)
        env.reset(seed=5)
        env.action_space.seed(0)
        rows.append([env.step(env.action_space.sample())[0] for _ in range(10)])
    assert np.array_equal(*rows)


def test_padded_registered_env_is_made_from_its_spec():
    env = Padded(gym.make("Pendulum-v1"), 5, 2)
    again = env.spec.make()
    assert again.observation_space == env.observation_space and again.action_space.shape == (2,)
    assert GymnasiumTasks({"a": "Pendulum-v1"}).make_env(0, "train", 0).spec is None
