import pickle

import metaworld
import numpy as np
import pytest

from mtrl_lightning.envs import MetaWorld

HORIZON = 25
ML10_TRAIN = list(metaworld.env_dict.ML10_V3["train"])
ML10_TEST = list(metaworld.env_dict.ML10_V3["test"])


@pytest.fixture(scope="module")
def upstream_goals():
    """MetaWorld's own goals of a task, drawn once."""
    drawn = {}

    def goals(name, seed):
        if (name, seed) not in drawn:
            drawn[name, seed] = metaworld.MT1(name, seed=seed).train_tasks
        return drawn[name, seed]

    return goals


def rand_vec(task):
    return pickle.loads(task.data)["rand_vec"].tolist()


def goal_of(env):
    """What decides an episode: the random vector that MetaWorld keeps."""
    return env.unwrapped._last_rand_vec.tolist()


def actions(number, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (number, 4)).astype(np.float32)


def run_episode(env, seed=None, number=HORIZON):
    observation, _ = env.reset(seed=seed)
    observations = [observation]
    rewards = []
    successes = []
    for action in actions(number):
        observation, reward, _, _, info = env.step(action)
        observations.append(observation)
        rewards.append(reward)
        successes.append(info["success"])
    return np.array(observations), np.array(rewards), successes


@pytest.mark.slow
@pytest.mark.parametrize("reward_version", ["v1", "v2"])
@pytest.mark.parametrize("name", ["reach-v3", "door-open-v3"])
def test_every_episode_equals_upstreams_environment_beside_it(name, reward_version, upstream_goals):
    env = MetaWorld([name], reward_version=reward_version, horizon=HORIZON).make_env(
        0, "eval", seed=5
    )
    for k, goal in enumerate(upstream_goals(name, 0)[:3]):
        upstream = metaworld.ALL_V3_ENVIRONMENTS[name](reward_function_version=reward_version)
        upstream.set_task(goal)
        observation, _ = env.reset(seed=0) if k == 0 else env.reset()
        expected, _ = upstream.reset()
        assert np.array_equal(observation, expected)
        assert expected[-3:].any(), "the goal is visible"
        for action in actions(HORIZON, seed=k):
            observation, reward, terminated, _, info = env.step(action)
            expected, expected_reward, *_, expected_info = upstream.step(action)
            assert np.array_equal(observation, expected)
            assert reward == expected_reward
            assert not terminated
            assert info["success"] == expected_info["success"]
        upstream.close()
    env.close()


def test_reward_versions_differ():
    rewards = {}
    for version in ("v1", "v2"):
        env = MetaWorld(["reach"], reward_version=version, horizon=HORIZON).make_env(
            0, "eval", seed=0
        )
        _, rewards[version], _ = run_episode(env, seed=0)
    assert (rewards["v1"] != rewards["v2"]).all()
    assert (rewards["v2"] >= 0).all() and (rewards["v2"] <= 10).all()


def test_test_episodes_may_have_another_horizon():
    benchmark = MetaWorld(["reach"], horizon=3, evaluation_horizon=5)
    for split, horizon in (("train", 3), ("eval", 5)):
        assert benchmark.horizon_of(split) == horizon
        env = benchmark.make_env(0, split, seed=0)
        env.reset(seed=0)
        truncated = [env.step(action)[3] for action in actions(horizon)]
        assert truncated == [False] * (horizon - 1) + [True]
    assert benchmark.spec.horizon == 3
    assert benchmark.spec.protocol["evaluation_horizon"] == 5
    same = MetaWorld(["reach"], horizon=3)
    assert same.horizon_of("eval") == 3 and "evaluation_horizon" not in same.spec.protocol


def test_a_horizon_beyond_upstreams_500_is_kept():
    env = MetaWorld(["reach"], horizon=502).make_env(0, "train", seed=0)
    env.reset(seed=0)
    truncated = [env.step(action)[3] for action in actions(502)]
    assert np.flatnonzero(truncated).tolist() == [501]


def test_success_does_not_end_the_episode():
    env = MetaWorld(["reach"], horizon=150).make_env(0, "eval", seed=0)
    observation, _ = env.reset(seed=0)
    ends, successes = [], []
    for _ in range(150):
        action = np.append(np.clip(5 * (observation[-3:] - observation[:3]), -1, 1), 0).astype(
            np.float32
        )
        observation, _, terminated, truncated, info = env.step(action)
        ends.append((terminated, truncated))
        successes.append(info["success"])
    assert any(successes[:100]), "the hand went straight to the goal"
    assert ends == [(False, False)] * 149 + [(False, True)]


@pytest.mark.parametrize("goal_seed", [0, 42])
def test_goals_are_upstreams_of_that_seed_in_order(goal_seed, upstream_goals):
    env = MetaWorld(["reach"], horizon=1, goal_seed=goal_seed).make_env(0, "eval", seed=8)
    goals = []
    for k in range(50):
        env.reset(seed=0 if k == 0 else None)
        goals.append(goal_of(env))
    assert goals == [rand_vec(task) for task in upstream_goals("reach-v3", goal_seed)]
    assert len({tuple(goal) for goal in goals}) == 50
    assert goals != [rand_vec(task) for task in upstream_goals("reach-v3", 42 - goal_seed)]


def test_a_task_has_the_same_goals_in_every_list_of_tasks():
    lists = [["pick-place"], ["reach", "pick-place"], "MT10"]
    found = []
    for tasks in lists:
        benchmark = MetaWorld(tasks, horizon=1)
        env = benchmark.make_env(
            benchmark.spec.task_names.index("pick-place-v3"), "eval", seed=len(found)
        )
        goals = []
        for k in range(5):
            env.reset(seed=k)
            goals.append(goal_of(env))
        found.append(goals)
    assert found[0] == found[1] == found[2]
    assert found[0] == [
        rand_vec(task) for task in metaworld.MT1("pick-place-v3", seed=0).train_tasks[:5]
    ]


def test_test_episode_k_has_goal_k_modulo_the_number_of_goals(upstream_goals):
    env = MetaWorld(["reach"], horizon=1, num_goals=4).make_env(0, "eval", seed=0)
    goals = [rand_vec(task) for task in upstream_goals("reach-v3", 0)]
    for k in (3, 0, 4, 11, 2):
        env.reset(seed=k)
        assert goal_of(env) == goals[k % 4]
        env.reset()
        assert goal_of(env) == goals[(k + 1) % 4]


def test_training_draws_goals_from_its_own_seed(upstream_goals):
    benchmark = MetaWorld(["reach"], horizon=1, num_goals=10)

    def drawn(env, seed, number=30):
        goals = []
        for k in range(number):
            env.reset(seed=seed if k == 0 else None)
            goals.append(tuple(goal_of(env)))
        return goals

    env, other = (benchmark.make_env(0, "train", seed=seed) for seed in (1, 2))
    first = drawn(env, 5)
    known = {tuple(rand_vec(task)) for task in upstream_goals("reach-v3", 0)[:10]}
    assert set(first) <= known, "only the first num_goals goals"
    assert len(set(first)) > 5, "the goal changes from episode to episode"
    assert drawn(other, 5) == first == drawn(env, 5)
    assert drawn(env, 6) != first
    made = [drawn(benchmark.make_env(0, "train", seed=seed), None) for seed in (3, 3, 4)]
    assert made[0] == made[1] != made[2]


def test_nothing_draws_from_numpys_global_generator():
    np.random.seed(1)
    expected = np.random.get_state()
    env = MetaWorld(["push"], horizon=5, goal_seed=17).make_env(0, "train", seed=0)
    for seed in (3, None):
        run_episode(env, seed, number=5)
    assert all(np.array_equal(a, b) for a, b in zip(expected, np.random.get_state(), strict=True))


def test_the_first_classes_of_ml10_have_its_goals(monkeypatch):
    """MetaWorld seeds its generator once for all train classes, and once for all test classes."""
    monkeypatch.setattr(metaworld, "_N_GOALS", 3)
    arguments = metaworld.env_dict.ML10_ARGS_KWARGS
    for kind, (first, *_) in {"train": ML10_TRAIN, "test": ML10_TEST}.items():
        monkeypatch.setitem(arguments, kind, {first: arguments[kind][first]})
    upstream = metaworld.ML10(seed=7)
    benchmark = MetaWorld("ML10", horizon=1, goal_seed=7, num_goals=3)
    sets = (("eval", upstream.train_tasks), ("eval_test", upstream.test_tasks))
    for split, goals in sets:
        first, *_ = benchmark.split_tasks(split)
        assert benchmark.spec.task_names[first] == goals[0].env_name
        env = benchmark.make_env(first, split, seed=0)
        found = []
        for k in range(3):
            env.reset(seed=k)
            found.append(goal_of(env))
        assert found == [rand_vec(goal) for goal in goals[:3]]
