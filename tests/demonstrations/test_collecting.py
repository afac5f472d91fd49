"""Episodes are full, repeatable, those of the real environments, and as many as requested."""

import numpy as np
import pytest

from mtrl_lightning.demonstrations import ScriptedPolicy, UniformPolicy, collect
from mtrl_lightning.envs import MetaWorld, ToyReach
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.altered_reach import NoSuccess
from tests.helpers.fakes import Constant, Scripted, scripted_length, scripted_success

EVAL = {"split": "eval", "num_workers": 0}


def of_all(collected, get):
    """Return a column of all episodes, task after task."""
    return np.concatenate([get(one) for of_task in collected.episodes.values() for one in of_task])


def seeds_of(collected, name="task-1"):
    return [one.seed for one in collected.episodes[name]]


@pytest.mark.usefixtures("few_goals")
def test_episodes_equal_a_replay_of_their_actions():
    benchmark = MetaWorld(["reach-v3", "door-open-v3"], horizon=12)
    collected = collect(
        ScriptedPolicy(benchmark.spec), benchmark, 2, seed=5, noise=0.1, num_workers=0
    )
    for task, (name, episodes) in enumerate(collected.episodes.items()):
        env = benchmark.make_env(task, "train", seed=99)
        assert name == benchmark.task_names[task] and len(episodes) == 2
        for episode in reversed(episodes):  # in another order than they were collected in
            observations, steps = [env.reset(seed=episode.seed)[0]], []
            for action in episode.actions:
                observation, *step, info = env.step(action)
                observations.append(observation)
                steps.append([*step, info["success"]])
            assert episode.observations.dtype == np.float64
            assert np.array_equal(episode.observations, observations)
            columns = (episode.rewards, episode.terminations, episode.truncations)
            assert np.array_equal(np.stack([*columns, episode.infos["success"]], axis=1), steps)
            assert np.flatnonzero(episode.truncations).tolist() == [11]
    # tasks of the same names in another benchmark have the same episodes
    only = MetaWorld(["door-open-v3"], horizon=12)
    (again,) = collect(ScriptedPolicy(only.spec), only, 1, seed=5, num_workers=0).episodes[name]
    assert again.seed == episodes[0].seed
    assert np.array_equal(again.observations[0], episodes[0].observations[0])


@pytest.mark.parametrize("num_tasks", [2, 40])
def test_episodes_are_full_and_in_order(num_tasks):
    """With 40 tasks each has one environment, with 2 it has one per episode."""
    collected = collect(Constant(), Scripted(num_tasks), 5, **EVAL)
    rows = [
        [task, episode, step]
        for task in range(num_tasks)
        for episode in range(5)
        for step in range(scripted_length(task, episode))
    ]
    assert of_all(collected, lambda one: one.observations[:-1])[:, :3].tolist() == rows
    assert of_all(collected, lambda one: one.infos["success"]).tolist() == [
        scripted_success(task, k, step + 1) for task, k, step in rows
    ]
    done_N = of_all(collected, lambda one: one.terminations | one.truncations)
    assert done_N.tolist() == [step + 1 == scripted_length(task, k) for task, k, step in rows]
    assert collected.attempts == {f"task-{task}": 5 for task in range(num_tasks)}
    assert seeds_of(collected) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_tasks", [2, 40])
def test_further_episodes_run_until_enough_succeed(num_tasks):
    collected = collect(Constant(), Scripted(num_tasks), 4, successes_only=True, **EVAL)
    # an episode succeeds if its number is even, or divisible by 3
    assert seeds_of(collected) == [0, 2, 3, 4]
    assert [one.observations[0, 1] for one in collected.episodes["task-1"]] == [0, 2, 3, 4]
    assert collected.attempts == {f"task-{task}": 5 for task in range(num_tasks)}
    assert {len(of_task) for of_task in collected.episodes.values()} == {4}


def test_fewer_successes_than_requested_are_reported():
    collected = collect(Constant(), Scripted(2), 2, attempts=1, successes_only=True, **EVAL)
    assert [seeds_of(collected, name) for name in ("task-0", "task-1")] == [[0], [0]]
    assert collected.attempts == {"task-0": 2, "task-1": 2}
    with pytest.raises(ConfigurationError, match="6 attempts"):
        collect(Constant(), ToyReach(2, 1), 3, attempts=2, successes_only=True, **EVAL)


def test_seed_decides_and_noise_is_stored_separately():
    benchmark = ToyReach(3, horizon=5)

    def collected(seed, num_workers=0):
        policy = UniformPolicy(benchmark.spec)
        return collect(policy, benchmark, 2, seed=seed, noise=0.5, num_workers=num_workers)

    def actions(episode):
        return episode.actions

    def chosen(episode):
        return episode.infos["policy_action"]

    one, again, other = collected(1), collected(1, num_workers=2), collected(2)
    for get in (actions, chosen, lambda episode: episode.observations):
        assert np.array_equal(of_all(one, get), of_all(again, get))
        assert (of_all(one, get) != of_all(other, get)).any()
    action_NA = of_all(one, actions)
    noise_NA = (action_NA - of_all(one, chosen))[np.abs(action_NA) < 1]
    assert 0.3 < noise_NA.std() < 0.6 and np.abs(action_NA).max() <= 1
    # the stored action is the one that was sent
    moved_ND = of_all(one, lambda episode: np.diff(episode.observations, axis=0))
    assert np.corrcoef(moved_ND[:, 0], action_NA[:, 0])[0, 1] > 0.9

    silent = collect(Constant(), benchmark, 1, num_workers=0)
    assert "policy_action" not in silent.episodes["goal-0"][0].infos
    assert (of_all(silent, actions) == Constant().action).all()


def test_benchmark_without_success_has_no_successes():
    with pytest.raises(ConfigurationError, match="success"):
        collect(Constant(), NoSuccess(), 1, successes_only=True, **EVAL)
    assert not collect(Constant(), NoSuccess(), 1, **EVAL).episodes["goal-0"][0].infos
