"""Environments that are paused: not stepped, and their episodes continue later."""

import math
import os
import signal

import numpy as np
import pytest

from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.envs.benchmarks.benchmark import WithInfo
from mtrl_lightning.rollout import Collector, PauseSolved
from mtrl_lightning.rollout.episodes import EpisodeWindows
from tests.helpers.fakes import Constant, Scripted
from tests.helpers.rollout import windows_with


@pytest.mark.parametrize(
    ("success", "expected"), [(0.0, 10), (0.7, 10), (0.85, 5), (0.91, 3), (1.0, 2)]
)
def test_the_number_falls_from_all_to_the_minimum(success, expected):
    assert PauseSolved(0.7, 0.2).num_stepped(10, success) == expected
    assert PauseSolved(0.5, 0.01).num_stepped(3, 1.0) == 1, "one at least"
    assert PauseSolved(0.5, 0.01).num_stepped(10, 0.7) == 6, "10 * 0.3 / 0.5 is 6.000000000000001"


@pytest.mark.parametrize(
    ("windows", "paused"),
    [
        (windows_with(1.0, 0.4, num_episodes=10), [1, 2]),
        (windows_with(0.5, 0.5), [1, 2, 4, 5]),
        (windows_with(1.0, 1.0, num_episodes=9), []),
        (EpisodeWindows(2, 50), []),
    ],
    ids=["one is solved", "the last ten episodes are", "few episodes", "none"],
)
def test_of_each_solved_task_the_last_environments_pause(windows, paused):
    task_E = np.array([0, 0, 0, 1, 1, 1])
    paused_E = PauseSolved(0.5, 1 / 3, episodes=10).paused(ToyReach(2).spec, task_E, windows)
    assert np.flatnonzero(paused_E).tolist() == paused


@pytest.mark.parametrize("workers", [0, 2])
def test_a_paused_environment_keeps_its_episode(workers):
    """Each environment's own steps are those of an environment that was never paused."""
    tasks, action_EA = [0, 1, 2, 1], np.full((4, 2), 0.5)
    envs = VectorEnv(Scripted(3), tasks, num_workers=workers)
    steady = VectorEnv(Scripted(3), tasks, num_workers=0)
    envs.reset(seed=[0, 0, 0, 0])
    steady.reset(seed=[0, 0, 0, 0])
    expected = []
    for _ in range(12):
        steady.send(action_EA)
        expected.append(steady.receive())
    generator = np.random.default_rng(0)
    num_steps_E = np.zeros(4, np.int64)
    for _ in range(12):
        paused_E = generator.random(4) < 0.5
        envs.send(action_EA, paused_E)
        result = envs.receive()
        assert result.paused_E.tolist() == paused_E.tolist()
        assert result.valid_E.tolist() == (~paused_E).tolist()
        for e in np.flatnonzero(~paused_E):
            one = expected[num_steps_E[e]]
            assert result.observation_ED[e].tolist() == one.observation_ED[e].tolist()
            assert result.next_observation_ED[e].tolist() == one.next_observation_ED[e].tolist()
            assert result.reward_E[e] == one.reward_E[e]
            assert result.done_E[e] == one.done_E[e]
        for e in np.flatnonzero(paused_E):
            if num_steps_E[e]:
                before_D = expected[num_steps_E[e] - 1].observation_ED[e]
                assert result.observation_ED[e].tolist() == before_D.tolist()
            assert not result.reward_E[e] and not result.done_E[e] and not result.success_E[e]
        num_steps_E += ~paused_E
    envs.close()


def test_a_rebuilt_environment_is_reported_although_it_is_paused():
    envs = VectorEnv(ToyReach(3), [0, 1, 2], num_workers=1, max_restarts=1)
    envs.reset(seed=0)
    os.kill(envs.worker_pids[0], signal.SIGKILL)
    envs.get_state()
    envs.send(np.zeros((3, 2)), np.array([True, False, False]))
    result = envs.receive()
    assert result.done_E.all() and not result.valid_E.any() and not result.paused_E.any()
    envs.close()


def test_numbers_of_info_are_not_reported_by_paused_environments():
    envs = VectorEnv(WithInfo(ToyReach(2), ["success"]), [0, 1], num_workers=0)
    envs.reset(seed=0)
    envs.step(np.zeros((2, 2)))
    envs.send(np.zeros((2, 2)), np.array([True, False]))
    result = envs.receive()
    assert math.isnan(result.info["success"][0]) and not math.isnan(result.info["success"][1])


def collector_of(*paused, num_envs=3):
    """Make a collector that pauses the environments of one list after the other."""
    script = iter(paused)
    pausing = PauseSolved()
    pausing.paused = lambda *_: np.isin(np.arange(num_envs), next(script))
    envs = VectorEnv(Scripted(3), range(num_envs), num_workers=0)
    collector = Collector(envs, Constant(), extras=[pausing] if paused else [])
    collector.reset([0] * num_envs)
    return collector


def test_a_collector_counts_the_steps_that_were_made():
    """Task 0 has episodes of 3, 1 and 4 steps, task 1 of 1, 4 and 2, task 2 of 4, 2 and 6."""
    collector = collector_of([0], [], [1, 2])
    episodes = []
    for _ in range(3):
        collector.choose_paused()
        for _ in range(2):
            transitions, ended = collector.step("explore")
            assert set(transitions.env_E) == set(np.flatnonzero(~collector.paused_E))
            episodes += [(e, episode.length) for e, episode in ended.items()]
    assert collector.stepped_fractions() == {0: 1.0, 1: 0.0, 2: 0.0}
    assert collector.counters.env_steps == 2 * 2 + 2 * 3 + 2 * 1
    assert collector.counters.dropped_transitions == 0
    assert collector.counters.vector_steps == 6
    assert episodes == [(1, 1), (2, 4), (0, 3), (0, 1)]
    collector.reset()
    assert not collector.paused_E.any()


def test_pauses_are_restored_and_end_in_a_run_without_them():
    collector, other = collector_of([0, 1]), collector_of()
    collector.step("explore")
    collector.choose_paused()
    collector.step("explore")
    other.set_state(collector.get_state())
    assert other.paused_E.tolist() == [True, True, False]
    other.choose_paused()
    assert not other.paused_E.any()
