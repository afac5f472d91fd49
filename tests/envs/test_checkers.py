"""Gymnasium's and Stable-Baselines3's own checkers, over the environments of every benchmark."""

from __future__ import annotations

import inspect
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import StickyAction
from stable_baselines3.common import env_checker as stable_baselines3

import mtrl_lightning.envs
from mtrl_lightning.envs import (
    Benchmark,
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

METAWORLD = {WRAPPED, UNBOUNDED}
SUITE = {UNBOUNDED}
LEVEL = ("assembly-v3", "plate-slide-back-side-v3", "soccer-v3")
"""Some tasks of MetaWorld whose goals have the same height."""
METAWORLD_TASKS = (*LEVEL, "coffee-button-v3", "handle-press-v3", "push-v3", "window-open-v3")
SUITE_TASKS = {domain: f"{domain}-{task}" for domain, task in import_suite().ALL_TASKS}
del SUITE_TASKS["lqr"]  # its actions are not bounded
TIME = "gymnasium.wrappers.TimeAwareObservation"


def check(benchmark, expected=(), tasks=None):
    """Run both checkers on a benchmark's environments; other warnings than expected are errors."""
    for task in benchmark.spec.train_tasks[:1] if tasks is None else tasks:
        for split in benchmark.splits:
            if task in benchmark.split_tasks(split):
                env = benchmark.make_env(task, split, seed=0)
                check_one(env, expected)
                check_values(env)
                env.close()


def check_one(env, expected=()):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in expected:
            warnings.filterwarnings("ignore", f"(?s).*{text}")
        check_env(env, skip_render_check=True)
        if not hasattr(env.unwrapped, "compute_reward"):  # MetaWorld's, taken for one with goals
            stable_baselines3.check_env(env)


def check_values(env, num_steps=12):
    """Observations lie in the space, and a seed determines them; the checkers look at one step."""
    action_SA = np.random.default_rng(0).uniform(-1, 1, (num_steps, *env.action_space.shape))
    rollouts = []
    for _ in range(2):
        observation, _ = env.reset(seed=3)
        rows = [observation]
        for action_A in action_SA.astype(env.action_space.dtype):
            observation, reward, terminated, truncated, _ = env.step(action_A)
            rows += [observation, np.array([reward, terminated, truncated])]
            if terminated or truncated:
                break
        rows.append(env.reset()[0])
        rollouts.append(rows)
        assert all(row in env.observation_space for row in rows if row.shape != (3,))
    assert all(np.array_equal(*pair) for pair in zip(*rollouts, strict=True))


# ---- every benchmark ----


@pytest.mark.slow
@pytest.mark.parametrize("name", METAWORLD_TASKS)
def test_metaworld(name):
    check(MetaWorld([name]), {*METAWORLD, CONSTANT} if name in LEVEL else METAWORLD)


def test_metaworld_of_the_first_papers():
    check(MetaWorld(["pick-place"], reward_version="v1", horizon=150), METAWORLD)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE_TASKS.values())
def test_the_suite(name):
    check(DMControl([name]), SUITE)


@pytest.mark.parametrize("fast", [False, True])
def test_the_suite_padded(fast):
    benchmark = DMControl(["cartpole-balance", "humanoid-walk"], fast=fast)
    check(benchmark, {WRAPPED, CONSTANT, UNBOUNDED}, tasks=[0])
    check(benchmark, {WRAPPED, UNBOUNDED}, tasks=[1])


@pytest.mark.slow
def test_a_family_of_the_suite():
    check(DMControlFamily("finger_length"), SUITE)


def test_the_toy_benchmarks():
    check(ToyReach(), tasks=range(3))
    check(ToyConflict(), tasks=range(6))


def test_gymnasiums_own_environments():
    tasks = {
        "light": {"id": "Pendulum-v1", "kwargs": {"g": 5.0}},
        "car": "MountainCarContinuous-v0",
        "line": point_on_a_line,
        "space": point_in_space,
    }
    benchmark = GymnasiumTasks(tasks, horizon=30)
    check(benchmark, {WRAPPED, CONSTANT, UNBOUNDED}, tasks=range(4))


def test_wrapped_environments():
    padded = DMControl(["reacher-easy", "walker-run"])
    check(WithWrappers(ToyReach(), [TIME]), {WRAPPED})
    check(WithWrappers(MetaWorld(["reach"]), [TIME]), METAWORLD)
    check(WithWrappers(padded, [TIME]), {WRAPPED, CONSTANT, UNBOUNDED})


@pytest.mark.slow
def test_pixels():
    skip_without_renderer()
    for benchmark in (ToyReach(1), MetaWorld(["reach"]), DMControl(["walker-walk"])):
        check(Pixels(benchmark, size=36), {WRAPPED, STACKED})


def test_no_benchmark_is_left_out():
    public = {name for name in mtrl_lightning.envs.__all__ if is_benchmark(name)}
    this_file = inspect.getsource(inspect.getmodule(check))
    assert public and all(f"{name}(" in this_file for name in public)


def is_benchmark(name):
    kind = getattr(mtrl_lightning.envs, name)
    return isinstance(kind, type) and issubclass(kind, Benchmark) and kind is not Benchmark


# ---- what they found ----


def test_metaworlds_goal_lies_in_its_bounds():
    for name in ("reach-v3", "hammer-v3"):
        env = MetaWorld([name]).make_env(0, "eval", seed=0)
        low_3, high_3 = env.observation_space.low[-3:], env.observation_space.high[-3:]
        assert np.array_equal(low_3, env.unwrapped.goal_space.low), name
        assert np.array_equal(high_3, env.unwrapped.goal_space.high), name
        goal_G3 = np.stack([env.reset(seed=goal)[0][-3:] for goal in range(50)])
        assert (low_3 <= goal_G3).all() and (goal_G3 <= high_3).all(), name


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(
    "benchmark", [MetaWorld(["reach"]), DMControl(["walker-walk"]), ToyReach(1)]
)
def test_a_seed_decides_what_wrappers_draw(benchmark, split):
    wrapped = WithWrappers(benchmark, [lambda env: StickyAction(env, 0.5)])
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
