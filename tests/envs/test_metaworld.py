"""Goals, seeds and lengths of MetaWorld's episodes, beside MetaWorld's own."""

import pickle

import metaworld
import numpy as np
import pytest

from mtrl_lightning.envs import MetaWorld

pytestmark = pytest.mark.usefixtures("few_goals")
ML10_TEST = next(iter(metaworld.env_dict.ML10_V3["test"]))


def goal_of(env):
    """What decides an episode: the random vector that MetaWorld keeps."""
    return env.unwrapped._last_rand_vec.tolist()


def upstream_goals(name, seed=0):
    return [
        pickle.loads(task.data)["rand_vec"].tolist()
        for task in metaworld.MT1(name, seed=seed).train_tasks
    ]


def actions(number, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (number, 4)).astype(np.float32)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_episodes_equal_upstreams_environment_stepped_alone(version):
    env = MetaWorld(["reach"], reward_version=version, horizon=25).make_env(0, "eval", seed=5)
    upstream = metaworld.ALL_V3_ENVIRONMENTS["reach-v3"](reward_function_version=version)
    for k, goal in enumerate(metaworld.MT1("reach-v3", seed=0).train_tasks[:2]):
        upstream.set_task(goal)
        expected, _ = upstream.reset()
        assert np.array_equal(env.reset(seed=0 if k == 0 else None)[0], expected)
        assert expected[-3:].any(), "the goal is visible"
        for action in actions(25, seed=k):
            observation, reward, terminated, _, info = env.step(action)
            expected, expected_reward, *_, expected_info = upstream.step(action)
            assert np.array_equal(observation, expected) and not terminated
            assert (reward, info["success"]) == (expected_reward, expected_info["success"])


def test_episodes_end_at_the_horizon_of_their_split():
    benchmark = MetaWorld(["reach"], horizon=3, evaluation_horizon=502)  # upstream's limit is 500
    assert benchmark.spec.horizon == 3
    assert benchmark.spec.protocol["evaluation_horizon"] == 502
    for split, horizon in (("train", 3), ("eval", 502)):
        assert benchmark.horizon_of(split) == horizon
        env = benchmark.make_env(0, split, seed=0)
        env.reset(seed=0)
        env.step(np.zeros(4, np.float32))
        env.restart_clock()
        truncated = [env.step(action)[3] for action in actions(horizon)]
        assert np.flatnonzero(truncated).tolist() == [horizon - 1]
    same = MetaWorld(["reach"], horizon=3)
    assert same.horizon_of("eval") == 3 and "evaluation_horizon" not in same.spec.protocol


@pytest.mark.parametrize(
    ("tasks", "name", "split", "goal_seed"),
    [
        (["reach"], "reach-v3", "eval", 42),
        ("MT10", "pick-place-v3", "eval", 0),
        ("ML10", ML10_TEST, "eval_test", 7),
    ],
)
def test_goals_are_upstreams_of_that_seed_in_order(tasks, name, split, goal_seed):
    benchmark = MetaWorld(tasks, horizon=1, goal_seed=goal_seed, num_goals=4)
    env = benchmark.make_env(benchmark.spec.task_names.index(name), split, seed=8)
    goals = upstream_goals(name, goal_seed)
    assert len({tuple(goal) for goal in goals}) == 6
    assert goals != upstream_goals(name, goal_seed + 1)
    for k in (0, 3, 11, 4, 2):
        env.reset(seed=k)
        assert goal_of(env) == goals[k % 4]
        env.reset()
        assert goal_of(env) == goals[(k + 1) % 4]


def test_training_draws_from_the_first_goals():
    env = MetaWorld(["reach"], horizon=1, num_goals=4).make_env(0, "train", seed=1)
    drawn = set()
    for _ in range(30):
        env.reset()
        drawn.add(tuple(goal_of(env)))
    assert drawn == {tuple(goal) for goal in upstream_goals("reach-v3")[:4]}
