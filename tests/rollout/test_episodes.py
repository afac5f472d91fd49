import json

import numpy as np
import pytest

from mtrl_lightning.rollout import EpisodeWindows, RunningEpisodes
from mtrl_lightning.types import Episode
from tests.fakes import step_result


def random_results(num_steps, num_envs, seed=0, broken=0.0):
    generator = np.random.default_rng(seed)
    return [
        step_result(
            reward=generator.normal(size=num_envs),
            terminated=generator.random(num_envs) < 0.1,
            truncated=generator.random(num_envs) < 0.1,
            success=generator.random(num_envs) < 0.2,
            valid=generator.random(num_envs) >= broken,
        )
        for _ in range(num_steps)
    ]


def naive(results, task_E):
    """Every environment's episodes by a slow loop: ``{(step, env): episode}``."""
    ended = {}
    for e, task in enumerate(task_E):
        rewards = []
        successes = []
        broken = False
        for s, result in enumerate(results):
            rewards.append(float(result.reward_E[e]))
            successes.append(bool(result.success_E[e]))
            broken = broken or not result.valid_E[e]
            if result.terminated_E[e] or result.truncated_E[e] or not result.valid_E[e]:
                if not broken:
                    ended[s, e] = Episode(
                        task, sum(rewards), len(rewards), any(successes), successes[-1]
                    )
                rewards = []
                successes = []
                broken = False
    return ended


@pytest.mark.parametrize("broken", [0.0, 0.05])
def test_episodes_equal_those_of_a_naive_loop(broken):
    task_E = np.array([2, 0, 1, 0])
    results = random_results(200, 4, broken=broken)
    running = RunningEpisodes(task_E)
    found = {
        (s, e): episode
        for s, result in enumerate(results)
        for e, episode in running.add(result).items()
    }
    expected = naive(results, task_E.tolist())
    assert found.keys() == expected.keys()
    assert len(found) > 80
    for key, episode in found.items():
        assert episode.return_ == pytest.approx(expected[key].return_, abs=1e-12)
        assert episode._replace(return_=0) == expected[key]._replace(return_=0)
    kinds = {(episode.success, episode.success_last) for episode in found.values()}
    assert kinds == {(True, True), (True, False), (False, False)}


def test_the_last_steps_reward_and_success_count_and_those_after_the_end_do_not():
    running = RunningEpisodes(np.array([0]))
    assert running.add(step_result([1.0], [False], [False], [False], [True])) == {}
    assert running.add(step_result([10.0], [False], [True], [True], [True])) == {
        0: Episode(0, 11.0, 2, True, True)
    }
    assert running.add(step_result([100.0], [True], [False], [False], [True])) == {
        0: Episode(0, 100.0, 1, False, False)
    }


def test_an_episode_of_a_restarted_worker_counts_nowhere_and_the_next_begins_anew():
    running = RunningEpisodes(np.array([0, 1]))
    go, stop = [False, False], [True, True]
    running.add(step_result([1.0, 1.0], go, go, [True, True], [True, True]))
    assert running.add(step_result([5.0, 5.0], go, go, go, [False, True])) == {}
    ended = running.add(step_result([2.0, 2.0], stop, go, go, [True, True]))
    assert ended == {0: Episode(0, 2.0, 1, False, False), 1: Episode(1, 8.0, 3, True, False)}


def test_an_end_that_a_restarted_worker_reports_is_no_episode():
    running = RunningEpisodes(np.array([0]))
    assert running.add(step_result([1.0], [False], [True], [True], [False])) == {}


def test_reset_forgets_what_runs():
    running = RunningEpisodes(np.array([0]))
    running.add(step_result([1.0], [False], [False], [True], [True]))
    running.reset()
    assert running.add(step_result([2.0], [True], [False], [False], [True])) == {
        0: Episode(0, 2.0, 1, False, False)
    }


def test_running_sums_go_on_from_their_state():
    results = random_results(60, 3, seed=1)
    running, resumed = RunningEpisodes(np.arange(3)), RunningEpisodes(np.arange(3))
    for result in results[:31]:
        running.add(result)
    assert running.length_E.any()
    resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
    assert [running.add(result) for result in results[31:]] == [
        resumed.add(result) for result in results[31:]
    ]


def episode(task, return_, length=1, success=False, success_last=False):
    return Episode(task, return_, length, success, success_last)


def test_windows_by_hand():
    windows = EpisodeWindows(num_tasks=3, size=10)
    windows.add([episode(0, 1.0, 5, True), episode(2, -4.0, 7)])
    windows.add([episode(0, 2.0, 6), episode(0, 6.0, 10, True, True), episode(0, -1.0, 3, True)])
    assert windows.summary() == {
        0: {
            "return": {"mean": 2.0, "min": -1.0, "max": 6.0},
            "length": {"mean": 6.0, "min": 3.0, "max": 10.0},
            "success": {"mean": 0.75, "min": 0.0, "max": 1.0},
        },
        2: {
            "return": {"mean": -4.0, "min": -4.0, "max": -4.0},
            "length": {"mean": 7.0, "min": 7.0, "max": 7.0},
            "success": {"mean": 0.0, "min": 0.0, "max": 0.0},
        },
    }


def test_windows_hold_the_last_episodes_of_each_task():
    windows = EpisodeWindows(num_tasks=2, size=3)
    windows.add(episode(0, float(k)) for k in range(10))
    windows.add([episode(1, 50.0)])
    summary = windows.summary()
    assert summary[0]["return"] == {"mean": 8.0, "min": 7.0, "max": 9.0}
    assert summary[1]["return"] == {"mean": 50.0, "min": 50.0, "max": 50.0}


def test_windows_go_on_from_their_state():
    windows, resumed = EpisodeWindows(2, 3), EpisodeWindows(2, 3)
    windows.add(
        [episode(0, 1.0, 4, True), episode(1, 2.0), episode(0, 3.0, 5, True, True), episode(0, 4.0)]
    )
    resumed.add([episode(1, 99.0)])
    resumed.load_state_dict(json.loads(json.dumps(windows.state_dict())))
    assert resumed.summary() == windows.summary()
    for window in (windows, resumed):
        window.add([episode(0, 8.0)])
    assert resumed.summary() == windows.summary()
    assert resumed.summary()[0]["return"] == {"mean": 5.0, "min": 3.0, "max": 8.0}
