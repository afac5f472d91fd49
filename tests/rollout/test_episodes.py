import numpy as np
import pytest

from mtrl_lightning.envs import ToyReach
from mtrl_lightning.rollout import EpisodeWindows, RunningEpisodes
from mtrl_lightning.rollout.episodes import EpisodeTimes
from mtrl_lightning.transitions import Episode
from tests.helpers.fakes import step_result

SPEC = ToyReach(3).spec._replace(task_names=("a", "b", "c"))


def episode(task, return_, length=1, success=False, success_last=False, env=0, **options):
    return Episode(task, return_, length, success, success_last, env, **options)


def test_episodes_equal_those_of_a_slow_loop():
    generator, task_E = np.random.default_rng(0), np.array([2, 0, 1, 0])

    def flags(probability):
        return generator.random(4) < probability

    running, steps, kinds = RunningEpisodes(task_E), [[] for _ in task_E], []
    for _ in range(200):
        result = step_result(
            reward=generator.normal(size=4),
            terminated=flags(0.1),
            truncated=flags(0.1),
            success=flags(0.2),
            valid=flags(0.95),
            midway=flags(0.5),
        )
        expected = {}
        for e, task in enumerate(task_E.tolist()):
            steps[e].append((float(result.reward_E[e]), bool(result.success_E[e])))
            if result.terminated_E[e] or result.truncated_E[e] or not result.valid_E[e]:
                if result.valid_E[e]:
                    rewards, successes = zip(*steps[e], strict=True)
                    return_ = pytest.approx(sum(rewards), abs=1e-12)
                    outcome = (return_, len(rewards), any(successes), successes[-1], e)
                    expected[e] = episode(task, *outcome, midway=bool(result.midway_E[e]))
                    kinds.append(outcome[2:4])
                steps[e] = []
        assert running.add(result) == expected
    assert len(kinds) > 80 and {*kinds} == {(True, True), (True, False), (False, False)}


NAN = float("nan")
GO, STOP = [False, False], [True, True]


def informed(energy, truncated, valid=(True, True)):
    """Make a step of two environments that report an energy; NaN for none."""
    result = step_result([1.0, 1.0], GO, truncated, GO, valid)
    return result._replace(info={"energy": np.array(energy)})


def test_info_is_averaged_over_steps_that_report_it():
    running = RunningEpisodes(np.array([0, 1]), ["energy"])
    running.add(informed([1.0, NAN], GO))
    running.add(informed([NAN, NAN], GO))
    ended = running.add(informed([4.0, NAN], STOP))
    assert ended[0].info == {"energy": 2.5, "energy_last": 4.0}
    assert ended[1].info == {}, "it reported nothing"
    running.add(informed([7.0, 3.0], GO))
    running.add(informed([0.0, 5.0], GO, [False, True]))
    ended = running.add(informed([9.0, NAN], STOP))
    assert ended[0].info == {"energy": 9.0, "energy_last": 9.0}, "the rebuilt one began again"
    assert ended[1].info == {"energy": 4.0, "energy_last": 5.0}


def test_new_info_starts_where_a_run_continues():
    running = RunningEpisodes(np.array([0, 1]), ["energy"])
    new = RunningEpisodes(np.array([0, 1]), ["energy", "heat"])
    running.add(informed([1.0, 2.0], GO))
    new.load_state_dict(running.state_dict())
    hot = informed([3.0, NAN], STOP)
    hot.info["heat"] = np.array([8.0, NAN])
    expected = {"energy": 2.0, "energy_last": 3.0, "heat": 8.0, "heat_last": 8.0}
    assert new.add(hot)[0].info == expected


def test_scores_are_of_the_last_episodes_from_a_reset():
    windows = EpisodeWindows(3, 5)
    outcomes = [(3, True, False), (6, False, False), (9, True, False), (4, True, False)]
    for return_, success, midway in [*outcomes, (7, False, True), (2, False, False)]:
        windows.add([episode(0, float(return_), success=success, midway=midway)])
    windows.add([episode(1, 1.0, success=True, midway=True)] * 4)
    assert windows.success_from_reset() == {0: 0.5}, "the last five, of which one began midway"
    assert windows.recent_score(0, 3, SPEC) == pytest.approx(2 / 3)
    assert windows.recent_from_reset(0, 3) == pytest.approx((2 / 3, 5.0))
    assert windows.recent_score(0, 5, SPEC) is None
    # successful only midway
    assert windows.recent_score(1, 1, SPEC) is None
    assert windows.recent_from_reset(1, 1) is None


def test_windows_hold_the_last_episodes_of_each_task():
    windows = EpisodeWindows(num_tasks=3, size=4)
    assert windows.metrics(SPEC) == windows.summary() == {}
    windows.add(episode(0, 99.0, 99) for _ in range(3))
    of_a = [(1.0, 5, True), (2.0, 6, False), (6.0, 10, True), (-1.0, 3, True)]
    of_c = [(-4.0, 7, False)]
    windows.add(episode(task, *one) for task, of in ((0, of_a), (2, of_c)) for one in of)
    summary = windows.summary()
    expected = {}
    for column, name in enumerate(("return", "length", "success")):
        for key, over_tasks in {"mean": np.mean, "min": min, "max": max, "std": np.mean}.items():
            values = [getattr(np.array(of, float)[:, column], key)() for of in (of_a, of_c)]
            assert [summary[task][name][key] for task in (0, 2)] == pytest.approx(values)
            if name != "success" or key == "mean":
                prefix = f"rollout/{name}" + f"_{key}" * (key != "mean")
                metrics = (prefix, f"{prefix}/a", f"{prefix}/c")
                expected |= zip(metrics, (over_tasks(values), *values), strict=True)
    assert windows.metrics(SPEC) == pytest.approx(expected)
    assert "rollout/success" not in windows.metrics(SPEC._replace(has_success=False))


def test_windows_average_info_over_episodes_that_have_it():
    windows = EpisodeWindows(num_tasks=3, size=2)
    infos = [(0, {"x": 50.0}), (0, {"x": 1.0}), (0, {"x": 2.0, "y": 7.0}), (2, {"x": 4.5})]
    windows.add(episode(task, 0.0, env=task, info=info) for task, info in [*infos, (1, {})])
    found = windows.metrics(SPEC)
    assert {name: value for name, value in found.items() if "/info/" in name} == {
        "rollout/info/x": 3.0,
        "rollout/info/x/a": 1.5,
        "rollout/info/x/c": 4.5,
        "rollout/info/y": 7.0,
        "rollout/info/y/a": 7.0,
    }
    resumed = EpisodeWindows(num_tasks=3, size=2)
    resumed.load_state_dict(windows.state_dict())
    assert resumed.metrics(SPEC) == found and resumed.count_T.tolist() == [3, 1, 1]


def test_episode_seconds_are_from_start_to_end(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    times = EpisodeTimes(np.array([0, 1, 0]))
    times.end([0])
    assert times.drain() == {}, "its start is not known"
    times.start(slice(None))
    now[0] = 103.0
    times.end([0, 1])
    times.start(np.array([True, True, False]))
    now[0] = 105.0
    times.end([0, 2])
    assert times.drain() == {0: (3 + 2 + 5) / 3, 1: 3.0}
    times.forget()
    times.end([1])
    assert times.drain() == {}
