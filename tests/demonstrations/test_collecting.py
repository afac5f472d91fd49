"""Episodes are whole, repeatable, those of the real environments, and as many as were wanted."""

import numpy as np
import pytest

from mtrl_lightning.demonstrations import (
    ScriptedPolicy,
    UniformPolicy,
    collect,
    write_data_sets,
)
from mtrl_lightning.envs import MetaWorld, ToyReach
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.demonstrations import need_minari, read_episodes
from tests.helpers.fakes import Constant, Scripted, scripted_length, scripted_success


def assert_same(one, another):
    assert one.attempts == another.attempts
    assert one.episodes.keys() == another.episodes.keys()
    for name, episodes in one.episodes.items():
        for episode, other in zip(episodes, another.episodes[name], strict=True):
            assert episode.seed == other.seed and episode.infos.keys() == other.infos.keys()
            for column, expected in zip(episode[:5], other[:5], strict=True):
                np.testing.assert_array_equal(column, expected)
            for key, column in episode.infos.items():
                np.testing.assert_array_equal(column, other.infos[key])


def of_all(collected, get):
    """Return a column of all episodes, task after task."""
    return np.concatenate([get(one) for of_task in collected.episodes.values() for one in of_task])


def seeds_of(collected, name):
    return [one.seed for one in collected.episodes[name]]


def assert_replayed(benchmark, split, episodes):
    """Step new environments by the collected actions, an episode at a time."""
    for task, name in enumerate(benchmark.spec.task_names):
        env = benchmark.make_env(task, split, seed=99)
        # in another order than they were collected in
        for episode in reversed(episodes[name]):
            observation, _ = env.reset(seed=episode.seed)
            for row, action in enumerate(episode.actions):
                assert observation.dtype == episode.observations.dtype
                np.testing.assert_array_equal(episode.observations[row], observation)
                observation, reward, terminated, truncated, info = env.step(action)
                np.testing.assert_array_equal(episode.observations[row + 1], observation)
                assert episode.rewards[row] == reward
                assert episode.infos["success"][row] == bool(info["success"])
                assert episode.terminations[row] == terminated
                assert episode.truncations[row] == truncated
            assert terminated or truncated


def test_written_episodes_equal_a_replay_of_their_actions(tmp_path):
    need_minari()
    benchmark = MetaWorld(["reach-v3", "door-open-v3"], horizon=12)
    collected = collect(
        ScriptedPolicy(benchmark.spec), benchmark, 2, seed=5, noise=0.1, num_workers=0
    )
    write_data_sets(tmp_path / "new", benchmark.spec, collected.episodes, {})
    read = read_episodes(tmp_path / "new")
    assert [[one.num_steps for one in of_task] for of_task in read.values()] == [[12, 12]] * 2
    assert read["reach-v3"][0].observations.dtype == np.float64
    assert_replayed(benchmark, "train", read)
    # in tasks by the same names, beside others, are the same episodes
    alone = MetaWorld(["door-open-v3"], horizon=12)
    again = collect(ScriptedPolicy(alone.spec), alone, 1, seed=5, num_workers=0)
    first = collected.episodes["door-open-v3"][0]
    assert seeds_of(again, "door-open-v3") == [first.seed]
    (found,) = again.episodes["door-open-v3"]
    np.testing.assert_array_equal(found.observations[0], first.observations[0])


@pytest.mark.parametrize("num_tasks", [2, 40])
def test_episodes_are_whole_and_in_order(num_tasks):
    """With 40 tasks each has one environment, with 2 it has one per episode."""
    benchmark = Scripted(num_tasks)
    collected = collect(Constant(), benchmark, 5, split="eval", num_workers=0)
    rows = [
        (task, episode, step)
        for task in range(num_tasks)
        for episode in range(5)
        for step in range(scripted_length(task, episode))
    ]
    observation_ND = of_all(collected, lambda one: one.observations[:-1])
    np.testing.assert_array_equal(observation_ND[:, :3], rows)
    assert list(collected.episodes) == [f"task-{task}" for task in range(num_tasks)]
    lengths = [[one.num_steps for one in of_task] for of_task in collected.episodes.values()]
    assert lengths == [[scripted_length(task, k) for k in range(5)] for task in range(num_tasks)]
    assert of_all(collected, lambda one: one.infos["success"]).tolist() == [
        scripted_success(task, k, step + 1) for task, k, step in rows
    ]
    is_last = [step + 1 == scripted_length(task, k) for task, k, step in rows]
    done_N = of_all(collected, lambda one: one.terminations | one.truncations)
    assert done_N.tolist() == is_last
    assert set(collected.attempts.values()) == {5}
    assert seeds_of(collected, "task-1") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_tasks", [2, 40])
def test_further_episodes_run_until_enough_succeed(num_tasks):
    collected = collect(
        Constant(), Scripted(num_tasks), 4, split="eval", successes_only=True, num_workers=0
    )
    # an episode succeeds if its number is even, or divisible by 3
    assert seeds_of(collected, "task-1") == [0, 2, 3, 4]
    assert set(collected.attempts.values()) == {5}
    assert [len(of_task) for of_task in collected.episodes.values()] == [4] * num_tasks
    assert [one.observations[0, 1] for one in collected.episodes["task-1"]] == [0, 2, 3, 4]


def test_fewer_successes_than_wanted_are_reported():
    options = {"split": "eval", "successes_only": True, "num_workers": 0}
    collected = collect(Constant(), Scripted(2), 2, attempts=1, **options)
    assert [seeds_of(collected, name) for name in ("task-0", "task-1")] == [[0], [0]]
    assert collected.attempts == {"task-0": 2, "task-1": 2}

    class Never(Scripted):
        def make_env(self, task, split, seed):
            env = super().make_env(task, split, seed)
            step = env.step
            env.step = lambda action: (*step(action)[:4], {"success": False})
            return env

    with pytest.raises(ConfigurationError, match="6 attempts"):
        collect(Constant(), Never(2), 3, attempts=2, **options)


def test_seed_decides_and_noise_is_stored_separately():
    benchmark = ToyReach(3, horizon=5)
    spec = benchmark.spec
    options = {"noise": 0.5, "num_workers": 0}
    collected = collect(UniformPolicy(spec), benchmark, 2, seed=1, **options)
    assert_same(collected, collect(UniformPolicy(spec), benchmark, 2, seed=1, **options))
    other = collect(UniformPolicy(spec), benchmark, 2, seed=2, **options)
    for get in (
        lambda one: one.observations,
        lambda one: one.actions,
        lambda one: one.infos["policy_action"],
    ):
        assert (of_all(collected, get) != of_all(other, get)).any()
    action_NA = of_all(collected, lambda one: one.actions)
    policy_action_NA = of_all(collected, lambda one: one.infos["policy_action"])
    noise_NA = (action_NA - policy_action_NA)[np.abs(action_NA) < 1]
    assert 0.3 < noise_NA.std() < 0.6 and np.abs(action_NA).max() <= 1
    # what was sent is what was stored
    moved_ND = of_all(collected, lambda one: np.diff(one.observations, axis=0))
    assert np.corrcoef(moved_ND[:, 0], action_NA[:, 0])[0, 1] > 0.9

    silent = collect(Constant(), benchmark, 1, num_workers=0)
    assert "policy_action" not in silent.episodes["goal-0"][0].infos
    assert (of_all(silent, lambda one: one.actions) == Constant().action).all()


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing():
    benchmark = MetaWorld(["reach-v3", "push-v3"], horizon=8)
    policy = ScriptedPolicy(benchmark.spec)
    first, second = (
        collect(policy, benchmark, 3, seed=4, noise=0.2, num_workers=number) for number in (0, 2)
    )
    assert_same(first, second)


def test_benchmark_without_success_has_no_successes(tmp_path):
    class WithoutSuccess(Scripted):
        @property
        def spec(self):
            return super().spec._replace(has_success=False)

    with pytest.raises(ConfigurationError, match="success"):
        collect(Constant(), WithoutSuccess(2), 1, successes_only=True)
    collected = collect(Constant(), WithoutSuccess(2), 1, split="eval", num_workers=0)
    assert not collected.episodes["task-0"][0].infos
