import gc
import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import ClipReward, NormalizeReward, RecordEpisodeStatistics

from mtrl_lightning.envs import MetaWorld, ToyReach, VectorEnv
from mtrl_lightning.envs.vector.episodes import Episodes, episode_seed
from mtrl_lightning.envs.vector.vector import default_num_workers
from mtrl_lightning.errors import EnvironmentFaultError, PolicyFaultError
from tests.helpers.fakes import (
    Faulty,
    Scripted,
    arrays_of,
    scripted_length,
    scripted_return,
    scripted_success,
)
from tests.helpers.processes import alive


def draw(num_steps, num_envs, size, seed=0):
    return (
        np.random.default_rng(seed).uniform(-1, 1, (num_steps, num_envs, size)).astype(np.float32)
    )


def collect(envs, action_SEA, seed=None):
    """The first observation and every step's results."""
    observation_ED, _ = envs.reset(seed=seed)
    results = []
    for action_EA in action_SEA:
        envs.send(action_EA)
        results.append(envs.receive())
    return observation_ED, results


def assert_same(a, b):
    assert np.array_equal(a[0], b[0])
    for ours, theirs in zip(a[1], b[1], strict=True):
        expected = arrays_of(theirs)
        assert arrays_of(ours).keys() == expected.keys()
        for name, array in arrays_of(ours).items():
            assert array.dtype == expected[name].dtype, name
            assert np.array_equal(array, expected[name]), name


def by_hand(benchmark, tasks, split, action_SEA, seeds):
    """What a vector environment should give: each environment stepped alone, in a slow loop."""
    first, rows = [], [[] for _ in action_SEA]
    for e, task in enumerate(tasks):
        env = benchmark.make_env(task, split, 123)
        episodes = itertools.count()
        first.append(env.reset(seed=episode_seed(seeds[e], next(episodes)))[0])
        for s in range(len(action_SEA)):
            following, reward, terminated, truncated, info = env.step(action_SEA[s, e])
            observation = following
            if terminated or truncated:
                observation, _ = env.reset(seed=episode_seed(seeds[e], next(episodes)))
            rows[s].append((observation, following, reward, terminated, truncated, info["success"]))
    return np.stack(first), [
        [np.stack(column) for column in zip(*row, strict=True)] for row in rows
    ]


# ---- the same numbers for any number of workers ----

TASKS = [0, 1, 0, 2]


@pytest.fixture(scope="module")
def metaworld_envs():
    """MetaWorld with 0 and 3 workers, and an episode end every six steps."""
    benchmark = MetaWorld(["reach", "push", "drawer-close"], horizon=6, num_goals=5)
    envs = {
        workers: VectorEnv(benchmark, TASKS, seed=11, num_workers=workers) for workers in (0, 3)
    }
    yield envs
    for vector in envs.values():
        vector.close()


def test_metaworld_equals_environments_stepped_alone(metaworld_envs):
    action_SEA = draw(15, 4, 4, seed=1)
    benchmark = MetaWorld(["reach", "push", "drawer-close"], horizon=6, num_goals=5)
    first, rows = by_hand(benchmark, TASKS, "train", action_SEA, seeds=[7, 8, 9, 10])
    for envs in metaworld_envs.values():
        observation_ED, results = collect(envs, action_SEA, seed=7)
        assert np.array_equal(observation_ED, first)
        for result, row in zip(results, rows, strict=True):
            for ours, theirs in zip(result[:6], row, strict=True):
                assert np.array_equal(ours, theirs)
            assert result.valid_E.all()
        ends = [s for s, result in enumerate(results) if result.truncated_E.all()]
        assert ends == [5, 11], "time is over in every episode and not only in the first"


def test_workers_do_not_load_torch(metaworld_envs):
    for pid in metaworld_envs[3].worker_pids:
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


@pytest.fixture(scope="module")
def toy_envs():
    envs = {
        workers: VectorEnv(ToyReach(3, horizon=5), [0, 1, 2, 1], seed=4, num_workers=workers)
        for workers in (0, 3)
    }
    yield envs
    for vector in envs.values():
        vector.close()


def test_any_number_of_workers_is_bit_equal(toy_envs):
    action_SEA = draw(17, 4, 2)
    first = collect(toy_envs[0], action_SEA)
    assert_same(first, collect(toy_envs[3], action_SEA))
    remade = VectorEnv(ToyReach(3, horizon=5), [0, 1, 2, 1], seed=4, num_workers=0)
    assert_same(first, collect(remade, action_SEA))
    other = VectorEnv(ToyReach(3, horizon=5), [0, 1, 2, 1], seed=5, num_workers=0)
    assert not np.array_equal(first[0], collect(other, action_SEA)[0])


# ---- an episode's end ----


@pytest.mark.parametrize("workers", [0, 2])
def test_episode_end_keeps_successor_and_starts_the_next(workers):
    tasks = [0, 1, 1, 2]
    envs = VectorEnv(Scripted(3), tasks, num_workers=workers)
    action_SEA = draw(25, 4, 2)
    observation_ED, results = collect(envs, action_SEA, seed=[0, 0, 4, 2])
    envs.close()
    ends = 0
    for e, (task, episode) in enumerate(zip(tasks, [0, 0, 4, 2], strict=True)):
        assert observation_ED[e].tolist() == [task, episode, 0, 0]
        step = 0
        for action_EA, result in zip(action_SEA[:, :, 0].astype(np.float64), results, strict=True):
            step += 1
            last = step == scripted_length(task, episode)
            assert result.next_observation_ED[e].tolist() == [task, episode, step, action_EA[e]]
            assert result.reward_E[e] == (scripted_return(task, episode) if last else 0)
            assert result.terminated_E[e] == (last and task == 1)
            assert result.truncated_E[e] == (last and task != 1)
            assert result.success_E[e] == scripted_success(task, episode, step)
            if last:
                episode, step, ends = episode + 1, 0, ends + 1
                assert result.observation_ED[e].tolist() == [task, episode, 0, 0]
            else:
                assert np.array_equal(result.observation_ED[e], result.next_observation_ED[e])
    assert ends > 20


def test_results_are_not_overwritten_by_the_next_step(toy_envs):
    envs = toy_envs[3]
    kept, _ = envs.reset(seed=1)
    copy = kept.copy()
    action_SEA = draw(2, 4, 2)
    envs.send(action_SEA[0])
    first = envs.receive()
    copies = {name: array.copy() for name, array in arrays_of(first).items()}
    envs.send(action_SEA[1])
    envs.receive()
    envs.reset()
    assert np.array_equal(kept, copy)
    assert all(np.array_equal(array, copies[name]) for name, array in arrays_of(first).items())


# ---- Gymnasium's and MetaWorld's own code on it ----


def gymnasiums_own(benchmark, tasks):
    def maker(task):
        return lambda: Episodes(benchmark.make_env(task, "train", 0), 0, is_numbered=False)

    return SyncVectorEnv([maker(task) for task in tasks], autoreset_mode=AutoresetMode.SAME_STEP)


def test_step_gives_what_gymnasiums_own_vector_environment_gives():
    tasks = [0, 1, 2, 1]
    ours, theirs = VectorEnv(Scripted(3), tasks, num_workers=0), gymnasiums_own(Scripted(3), tasks)
    assert ours.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    for name in (
        "num_envs",
        "single_observation_space",
        "observation_space",
        "single_action_space",
        "action_space",
    ):
        assert getattr(ours, name) == getattr(theirs, name)
    assert np.array_equal(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
    ends = 0
    for action_EA in draw(40, 4, 2):
        *arrays, info = ours.step(action_EA)
        *expected, expected_info = theirs.step(action_EA)
        for array, other in zip(arrays, expected, strict=True):
            assert array.dtype == other.dtype and np.array_equal(array, other)
        assert (
            ("final_obs" in info) == ("final_obs" in expected_info) == (arrays[2] | arrays[3]).any()
        )
        if "final_obs" in info:
            assert np.array_equal(info["_final_obs"], expected_info["_final_obs"])
            assert np.array_equal(info["_final_info"], expected_info["_final_info"])
            for e in np.flatnonzero(info["_final_obs"]):
                assert np.array_equal(info["final_obs"][e], expected_info["final_obs"][e])
                assert info["final_info"]["success"][e] == expected_info["final_info"]["success"][e]
                ends += 1
            assert all(info["final_obs"][e] is None for e in np.flatnonzero(~info["_final_obs"]))
    assert ends > 20


def test_final_info_holds_the_episodes_return_and_length():
    tasks = [0, 1, 2]
    envs = VectorEnv(Scripted(3), tasks, num_workers=0)
    envs.reset(seed=[5, 6, 7])
    episodes, ended = [5, 6, 7], 0
    for action_EA in draw(30, 3, 2):
        *_, terminated_E, truncated_E, info = envs.step(action_EA)
        for e in np.flatnonzero(terminated_E | truncated_E):
            episode = info["final_info"]["episode"]
            assert episode["r"][e] == scripted_return(tasks[e], episodes[e])
            assert episode["l"][e] == scripted_length(tasks[e], episodes[e])
            assert info["final_info"]["_episode"][e]
            episodes[e], ended = episodes[e] + 1, ended + 1
    assert ended > 15
    envs.step(np.zeros((3, 2)))
    envs.reset(seed=5)
    while True:
        *_, info = envs.step(np.zeros((3, 2)))
        if "final_info" in info:
            break
    first = int(np.flatnonzero(info["_final_info"])[0])
    assert info["final_info"]["episode"]["l"][first] == scripted_length(first, 5 + first), (
        "reset begins anew"
    )


@pytest.mark.parametrize(
    "wrap",
    [RecordEpisodeStatistics, NormalizeReward, lambda envs: ClipReward(envs, -0.1, 0.4)],
    ids=["RecordEpisodeStatistics", "NormalizeReward", "ClipReward"],
)
def test_gymnasiums_vector_wrappers_work(toy_envs, wrap):
    tasks = [0, 1, 2, 1]
    ours, theirs = wrap(toy_envs[3]), wrap(gymnasiums_own(ToyReach(3, horizon=5), tasks))
    assert np.array_equal(ours.reset(seed=2)[0], theirs.reset(seed=2)[0])
    recorded = 0
    for action_EA in draw(17, 4, 2, seed=3):
        *arrays, info = ours.step(action_EA)
        *expected, expected_info = theirs.step(action_EA)
        for array, other in zip(arrays, expected, strict=True):
            assert np.array_equal(array, other)
        assert ("episode" in info) == ("episode" in expected_info)
        if "episode" in info:
            recorded += 1
            assert np.array_equal(info["episode"]["r"], expected_info["episode"]["r"])
            assert info["episode"]["l"].tolist() == [5, 5, 5, 5]
    assert recorded == (3 if wrap is RecordEpisodeStatistics else 0)


# ---- attributes, state ----


def test_attributes_and_calls_reach_every_environment_in_order():
    for workers in (0, 2):
        envs = VectorEnv(Scripted(3), [2, 0, 1], num_workers=workers)
        envs.reset(seed=[4, 5, 6])
        assert envs.get_attr("task") == (2, 0, 1)
        assert envs.call("place", steps=3) == ((4, 3), (5, 3), (6, 3))
        envs.close()


# ---- what can go wrong ----


def test_number_of_workers_has_bounds():
    cores = len(os.sched_getaffinity(0))
    assert default_num_workers(1000) == max(1, cores - 1)
    assert default_num_workers(1000, spare=0) == cores
    assert default_num_workers(1) == default_num_workers(5, spare=cores) == 1
    envs = VectorEnv(ToyReach(), [0], num_workers=4)
    assert envs.num_workers == 1, "no worker without an environment"
    envs.close()


@pytest.fixture(scope="module")
def faulty_envs():
    envs = {workers: VectorEnv(Faulty(3), [0, 1, 2], num_workers=workers) for workers in (0, 1)}
    yield envs
    for vector in envs.values():
        vector.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("fault", "value"),
    [
        ("raise", 0),
        ("reward", np.nan),
        ("reward", -np.inf),
        ("reward", 1e39),
        ("observation", np.nan),
        ("observation", np.inf),
        ("observation", 1e39),
    ],
)
def test_a_fault_in_a_step_names_task_step_and_cause(faulty_envs, workers, fault, value):
    envs = faulty_envs[workers]
    envs.reset(
        seed=[1, 1, 2], options={"fault": fault, "value": value, "task": "task-1", "step": 3}
    )
    for _ in range(2):
        envs.step(np.zeros((3, 2)))
    with pytest.raises(EnvironmentFaultError, match="task-1"):
        envs.step(np.zeros((3, 2)))
    envs.reset(seed=0, options={})


def test_observation_may_be_the_largest_float32(faulty_envs):
    value = np.finfo(np.float32).max
    envs = faulty_envs[0]
    envs.reset(
        seed=[1, 1, 2],
        options={"fault": "observation", "value": value, "task": "task-1", "step": 1},
    )
    assert envs.step(np.zeros((3, 2)))[0][1, 2] == value
    envs.reset(seed=0, options={})


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("fault", "value"),
    [("reset_observation", np.nan), ("reset_observation", np.inf), ("raise_reset", 0)],
)
def test_fault_at_a_reset_names_the_task(faulty_envs, workers, fault, value):
    envs = faulty_envs[workers]
    options = {"fault": fault, "value": value, "task": "task-1"}
    with pytest.raises(EnvironmentFaultError, match="task-1"):
        envs.reset(seed=0, options=options)
    envs.reset(seed=0, options=options | {"step": 1})
    with pytest.raises(EnvironmentFaultError, match="task-1"):
        for _ in range(scripted_length(1, 1)):
            envs.step(np.zeros((3, 2)))
    envs.reset(seed=0, options={})


@pytest.mark.parametrize("workers", [0, 3])
def test_after_a_fault_every_worker_answers_the_question_asked(workers):
    envs = VectorEnv(Faulty(3), [0, 1, 2], num_workers=workers)
    envs.reset(seed=0, options={"fault": "raise", "task": "task-0", "step": 1})
    with pytest.raises(EnvironmentFaultError, match="task 'task-0', step 1"):
        envs.step(np.zeros((3, 2)))
    observations = [envs.reset(seed=5, options={})[0]]
    observations += [envs.step(np.zeros((3, 2)))[0] for _ in range(2)]
    envs.close()
    assert [
        observation_ED[:, 1:3].tolist() for observation_ED in observations
    ] == [  # episode and step
        [[5, 0], [6, 0], [7, 0]],
        [[5, 1], [7, 0], [7, 1]],
        [[5, 2], [7, 1], [8, 0]],
    ]


@pytest.mark.parametrize("axis", [0, 3])
def test_an_action_that_is_not_a_number_is_no_step(axis, tmp_path, monkeypatch):
    """MuJoCo silently resets the simulation after a NaN: then every observation is finite."""
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its log
    envs = VectorEnv(MetaWorld(["reach", "push"], horizon=20, num_goals=5), [0, 1], num_workers=0)
    envs.reset(seed=0)
    action_EA = np.zeros((2, 4), np.float32)
    action_EA[1, axis] = np.nan
    with pytest.raises(PolicyFaultError, match="push-v3"):
        for _ in range(5):
            envs.step(action_EA)


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_killed_worker_is_named_by_its_tasks_within_seconds(when):
    envs = VectorEnv(Scripted(3), [0, 1, 2], num_workers=2)
    envs.reset()
    envs.step(np.zeros((3, 2)))
    began = time.monotonic()
    if when == "before":
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        with pytest.raises(EnvironmentFaultError, match="task-0, task-1"):
            envs.step(np.zeros((3, 2)))
    else:
        os.kill(envs.worker_pids[1], signal.SIGSTOP)
        envs.send(np.zeros((3, 2)))
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        with pytest.raises(EnvironmentFaultError, match="task-2"):
            envs.receive()
    assert time.monotonic() - began < 5
    envs.close()


# ---- nothing is left behind ----


def test_close_leaves_no_process():
    envs = VectorEnv(ToyReach(), [0, 1], num_workers=2)
    envs.reset()
    pids = envs.worker_pids
    assert len(alive(pids)) == 2
    envs.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not set(pids) & {process.pid for process in multiprocessing.active_children()}
    envs.close()


@pytest.mark.slow
def test_deleted_vector_env_ends_its_workers():
    envs = VectorEnv(ToyReach(), [0, 1], num_workers=2)
    envs.reset()
    pids = envs.worker_pids
    del envs
    gc.collect()
    assert not alive(pids)
