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

EVAL = {"split": "eval", "num_workers": 0}


def contents(collected):
    """All that was collected, as values that compare by their bits."""
    return collected.attempts, {
        name: [
            (
                one.seed,
                [column.tobytes() for column in one[:5]],
                {info: column.tobytes() for info, column in one.infos.items()},
            )
            for one in episodes
        ]
        for name, episodes in collected.episodes.items()
    }


def of_all(collected, get):
    """Return a column of all episodes, task after task."""
    return np.concatenate([get(one) for of_task in collected.episodes.values() for one in of_task])


def seeds_of(collected, name="task-1"):
    return [one.seed for one in collected.episodes[name]]


@pytest.mark.usefixtures("few_goals")
def test_written_episodes_equal_a_replay_of_their_actions(tmp_path):
    need_minari()
    benchmark = MetaWorld(["reach-v3", "door-open-v3"], horizon=12)
    collected = collect(
        ScriptedPolicy(benchmark.spec), benchmark, 2, seed=5, noise=0.1, num_workers=0
    )
    write_data_sets(tmp_path / "new", benchmark.spec, collected.episodes, {})
    read = read_episodes(tmp_path / "new")
    for task, name in enumerate(benchmark.spec.task_names):
        env = benchmark.make_env(task, "train", seed=99)
        assert len(read[name]) == 2
        for episode in reversed(read[name]):  # in another order than they were collected in
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
    # in tasks by the same names, beside others, are the same episodes
    alone = MetaWorld(["door-open-v3"], horizon=12)
    (again,) = collect(ScriptedPolicy(alone.spec), alone, 1, seed=5, num_workers=0).episodes[name]
    first = collected.episodes[name][0]
    assert again.seed == first.seed
    assert np.array_equal(again.observations[0], first.observations[0])


@pytest.mark.parametrize("num_tasks", [2, 40])
def test_episodes_are_whole_and_in_order(num_tasks):
    """With 40 tasks each has one environment, with 2 it has one per episode."""
    collected = collect(Constant(), Scripted(num_tasks), 5, **EVAL)
    rows = [
        (task, episode, step)
        for task in range(num_tasks)
        for episode in range(5)
        for step in range(scripted_length(task, episode))
    ]
    observation_ND = of_all(collected, lambda one: one.observations[:-1])
    assert observation_ND[:, :3].tolist() == [[*row] for row in rows]
    assert list(collected.episodes) == [f"task-{task}" for task in range(num_tasks)]
    assert {len(of_task) for of_task in collected.episodes.values()} == {5}
    assert of_all(collected, lambda one: one.infos["success"]).tolist() == [
        scripted_success(task, k, step + 1) for task, k, step in rows
    ]
    is_last = [step + 1 == scripted_length(task, k) for task, k, step in rows]
    done_N = of_all(collected, lambda one: one.terminations | one.truncations)
    assert done_N.tolist() == is_last
    assert set(collected.attempts.values()) == {5}
    assert seeds_of(collected) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_tasks", [2, 40])
def test_further_episodes_run_until_enough_succeed(num_tasks):
    collected = collect(Constant(), Scripted(num_tasks), 4, successes_only=True, **EVAL)
    # an episode succeeds if its number is even, or divisible by 3
    assert seeds_of(collected) == [0, 2, 3, 4]
    assert set(collected.attempts.values()) == {5}
    assert {len(of_task) for of_task in collected.episodes.values()} == {4}
    assert [one.observations[0, 1] for one in collected.episodes["task-1"]] == [0, 2, 3, 4]


def test_fewer_successes_than_wanted_are_reported():
    collected = collect(Constant(), Scripted(2), 2, attempts=1, successes_only=True, **EVAL)
    assert [seeds_of(collected, name) for name in ("task-0", "task-1")] == [[0], [0]]
    assert collected.attempts == {"task-0": 2, "task-1": 2}

    class Never(Scripted):
        def make_env(self, task, split, seed):
            env = super().make_env(task, split, seed)
            step = env.step
            env.step = lambda action: (*step(action)[:4], {"success": False})
            return env

    with pytest.raises(ConfigurationError, match="6 attempts"):
        collect(Constant(), Never(2), 3, attempts=2, successes_only=True, **EVAL)


def test_seed_decides_and_noise_is_stored_separately():
    benchmark = ToyReach(3, horizon=5)

    def collected(seed):
        policy = UniformPolicy(benchmark.spec)
        return collect(policy, benchmark, 2, seed=seed, noise=0.5, num_workers=0)

    one, other = collected(1), collected(2)
    assert contents(one) == contents(collected(1))

    def actions(episode):
        return episode.actions

    def chosen(episode):
        return episode.infos["policy_action"]

    for get in (actions, chosen, lambda episode: episode.observations):
        assert (of_all(one, get) != of_all(other, get)).any()
    action_NA = of_all(one, actions)
    noise_NA = (action_NA - of_all(one, chosen))[np.abs(action_NA) < 1]
    assert 0.3 < noise_NA.std() < 0.6 and np.abs(action_NA).max() <= 1
    # what was sent is what was stored
    moved_ND = of_all(one, lambda episode: np.diff(episode.observations, axis=0))
    assert np.corrcoef(moved_ND[:, 0], action_NA[:, 0])[0, 1] > 0.9

    silent = collect(Constant(), benchmark, 1, num_workers=0)
    assert "policy_action" not in silent.episodes["goal-0"][0].infos
    assert (of_all(silent, actions) == Constant().action).all()


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing():
    benchmark = MetaWorld(["reach-v3", "push-v3"], horizon=8, num_goals=6)
    policy = ScriptedPolicy(benchmark.spec)
    first, second = (
        collect(policy, benchmark, 3, seed=4, noise=0.2, num_workers=number) for number in (0, 2)
    )
    assert contents(first) == contents(second)


def test_benchmark_without_success_has_no_successes():
    class WithoutSuccess(Scripted):
        @property
        def spec(self):
            return super().spec._replace(has_success=False)

    with pytest.raises(ConfigurationError, match="success"):
        collect(Constant(), WithoutSuccess(2), 1, successes_only=True, **EVAL)
    collected = collect(Constant(), WithoutSuccess(2), 1, **EVAL)
    assert not collected.episodes["task-0"][0].infos
