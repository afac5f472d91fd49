"""Episodes are whole, repeatable, those of the real environments, and as many as were wanted."""

import numpy as np
import pytest

from mtrl_lightning.demonstrations import (
    ScriptedPolicy,
    UniformPolicy,
    collect,
    read_collection,
    write_collection,
)
from mtrl_lightning.envs import MetaWorld, ToyReach
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.fakes import Constant, Named, Scripted, scripted_length, scripted_success


def assert_same(one, another):
    assert one.seeds == another.seeds and one.attempts == another.attempts
    assert one.columns.keys() == another.columns.keys()
    for name, column in one.columns.items():
        np.testing.assert_array_equal(column, another.columns[name])


def assert_replayed(benchmark, split, collection, seeds):
    """Step new environments by the collected actions, an episode at a time."""
    columns = collection.columns
    for task, name in enumerate(benchmark.spec.task_names):
        env = benchmark.make_env(task, split, seed=99)
        episodes = np.unique(columns["episode"][columns["task"] == task])
        assert len(episodes) == len(seeds[name])
        # in another order than they were collected in
        for episode, seed in reversed(list(zip(episodes, seeds[name], strict=True))):
            rows = {key: column[columns["episode"] == episode] for key, column in columns.items()}
            observation, _ = env.reset(seed=seed)
            for row, action in enumerate(rows["action"]):
                expected = np.asarray(observation, np.float32)
                np.testing.assert_array_equal(rows["observation"][row], expected)
                observation, reward, terminated, truncated, info = env.step(action)
                expected = np.asarray(observation, np.float32)
                np.testing.assert_array_equal(rows["next_observation"][row], expected)
                assert rows["reward"][row] == np.float32(reward)
                assert rows["success"][row] == bool(info["success"])
                assert rows["terminated"][row] == terminated
                assert rows["truncated"][row] == truncated
            assert terminated or truncated


def test_a_collection_equals_a_replay_of_its_actions_in_the_real_environments(tmp_path):
    benchmark = MetaWorld(["reach-v3", "door-open-v3"], horizon=12)
    collected = collect(
        ScriptedPolicy(benchmark.spec), benchmark, 2, seed=5, noise=0.1, num_workers=0
    )
    facts = {"seeds": collected.seeds}
    write_collection(tmp_path / "new", benchmark.spec, collected.columns, facts)
    collection = read_collection(tmp_path / "new")
    assert collection.num_transitions == 2 * 2 * 12
    assert collection.facts["episodes"] == {"reach-v3": 2, "door-open-v3": 2}
    assert_replayed(benchmark, "train", collection, collection.facts["seeds"])
    # in tasks by the same names, beside others, are the same episodes
    alone = MetaWorld(["door-open-v3"], horizon=12)
    again = collect(ScriptedPolicy(alone.spec), alone, 1, seed=5, num_workers=0)
    assert again.seeds["door-open-v3"] == collected.seeds["door-open-v3"][:1]
    rows = collection.columns["episode"] == 2
    first = collection.columns["observation"][rows][0]
    np.testing.assert_array_equal(again.columns["observation"][0], first)


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
    np.testing.assert_array_equal(collected.columns["observation"][:, :3], rows)
    assert collected.columns["task"].tolist() == [task for task, *_ in rows]
    assert collected.columns["episode"].tolist() == [5 * task + k for task, k, _ in rows]
    assert collected.columns["success"].tolist() == [
        scripted_success(task, k, step + 1) for task, k, step in rows
    ]
    is_last = [step + 1 == scripted_length(task, k) for task, k, step in rows]
    done_N = collected.columns["terminated"] | collected.columns["truncated"]
    assert done_N.tolist() == is_last
    assert set(collected.attempts.values()) == {5} and not collected.missing
    assert collected.seeds["task-1"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_tasks", [2, 40])
def test_further_episodes_are_run_until_there_are_enough_successes(num_tasks):
    collected = collect(
        Constant(), Scripted(num_tasks), 4, split="eval", successes_only=True, num_workers=0
    )
    # an episode succeeds if its number is even, or divisible by 3
    assert collected.seeds["task-1"] == [0, 2, 3, 4]
    assert set(collected.attempts.values()) == {5} and not collected.missing
    assert len(np.unique(collected.columns["episode"])) == 4 * num_tasks
    of_task = collected.columns["task"] == 1
    episodes = collected.columns["observation"][of_task, 1]
    assert list(dict.fromkeys(episodes.tolist())) == [0, 2, 3, 4]


def test_fewer_successes_than_wanted_are_reported():
    options = {"split": "eval", "successes_only": True, "num_workers": 0}
    collected = collect(Constant(), Scripted(2), 2, attempts=1, **options)
    assert collected.seeds == {"task-0": [0], "task-1": [0]}
    assert collected.attempts == {"task-0": 2, "task-1": 2}
    assert collected.missing == {"task-0": 1, "task-1": 1}

    class Never(Scripted):
        def make_env(self, task, split, seed):
            env = super().make_env(task, split, seed)
            step = env.step
            env.step = lambda action: (*step(action)[:4], {"success": False})
            return env

    message = "no episode succeeded in 6 attempts at each of task-0, task-1: raise --attempts"
    with pytest.raises(ConfigurationError, match=message):
        collect(Constant(), Never(2), 3, attempts=2, **options)


def test_the_seed_decides_and_noise_is_beside_the_policys_actions():
    benchmark = ToyReach(3, horizon=5)
    spec = benchmark.spec
    options = {"noise": 0.5, "num_workers": 0}
    collected = collect(UniformPolicy(spec), benchmark, 2, seed=1, **options)
    assert_same(collected, collect(UniformPolicy(spec), benchmark, 2, seed=1, **options))
    other = collect(UniformPolicy(spec), benchmark, 2, seed=2, **options)
    for name in ("observation", "action", "policy_action"):
        assert (collected.columns[name] != other.columns[name]).any()
    action_NA = collected.columns["action"]
    noise_NA = (action_NA - collected.columns["policy_action"])[np.abs(action_NA) < 1]
    assert 0.3 < noise_NA.std() < 0.6 and np.abs(action_NA).max() <= 1
    # what was sent is what was stored
    moved_ND = collected.columns["next_observation"] - collected.columns["observation"]
    assert np.corrcoef(moved_ND[:, 0], action_NA[:, 0])[0, 1] > 0.9

    silent = collect(Constant(), benchmark, 1, num_workers=0)
    assert "policy_action" not in silent.columns
    assert (silent.columns["action"] == Constant().action).all()


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing():
    benchmark = MetaWorld(["reach-v3", "push-v3"], horizon=8)
    policy = ScriptedPolicy(benchmark.spec)
    first, second = (
        collect(policy, benchmark, 3, seed=4, noise=0.2, num_workers=number) for number in (0, 2)
    )
    assert_same(first, second)


def test_what_cannot_be_collected():
    benchmark = Scripted(2)
    with pytest.raises(ConfigurationError, match="unknown split 'evil': did you mean eval"):
        collect(Constant(), benchmark, 1, split="evil")
    with pytest.raises(ConfigurationError, match="num_episodes is 0"):
        collect(Constant(), benchmark, 0)
    with pytest.raises(ConfigurationError, match="noise is nan"):
        collect(Constant(), benchmark, 1, noise=float("nan"))
    with pytest.raises(ConfigurationError, match="does not know task-1: its tasks are task-0"):
        collect(Named(Constant(), Scripted(1).spec), benchmark, 1)

    class WithoutSuccess(Scripted):
        @property
        def spec(self):
            return super().spec._replace(has_success=False)

    with pytest.raises(ConfigurationError, match="the benchmark reports none"):
        collect(Constant(), WithoutSuccess(2), 1, successes_only=True)
    collected = collect(Constant(), WithoutSuccess(2), 1, split="eval", num_workers=0)
    assert "success" not in collected.columns
