"""Environments stepped together give what each gives alone, for any number of workers."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from mtrl_lightning.envs import MetaWorld, ToyReach, VectorEnv
from mtrl_lightning.envs.vector.episodes import episode_seed
from mtrl_lightning.envs.vector.vector import default_num_workers
from mtrl_lightning.errors import EnvironmentFaultError, PolicyFaultError
from tests.helpers.environments import draw, run
from tests.helpers.fakes import Faulty, Scripted, arrays_of, scripted_length
from tests.helpers.processes import alive

ZEROS = np.zeros((3, 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_metaworld_equals_environments_stepped_alone(workers):
    tasks = [0, 0, 1]  # a goal of basketball edits the model
    benchmark = MetaWorld(["basketball", "reach"], horizon=6, num_goals=5)
    envs = VectorEnv(benchmark, tasks, seed=11, num_workers=workers)
    observation_ED, _ = envs.reset(seed=7)
    action_SEA = draw(envs, 15)
    results = run(envs, action_SEA)
    for pid in envs.worker_pids:
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    envs.close()
    for e, task in enumerate(tasks):
        env = benchmark.make_env(task, "train", 123)
        assert np.array_equal(observation_ED[e], env.reset(seed=7 + e)[0])
        for s, result in enumerate(results):
            following, *rest, info = env.step(action_SEA[s, e])
            assert rest[2] == (s in (5, 11)), "time is over in every episode, not only in the first"
            observation = following
            if rest[2]:
                observation, _ = env.reset(seed=episode_seed(7 + e, s // 6 + 1))
            expected = (observation, following, *rest, info["success"])
            assert all(map(np.array_equal, [column[e] for column in result[:6]], expected))
            assert result.valid_E[e]


def test_number_of_workers_has_bounds():
    cores = len(os.sched_getaffinity(0))
    assert default_num_workers(1000) == max(1, cores - 1)
    assert default_num_workers(1000, spare=0) == cores
    assert default_num_workers(1) == default_num_workers(5, spare=cores) == 1
    envs = VectorEnv(ToyReach(), [0], num_workers=4)
    assert envs.num_workers == 1, "no worker without an environment"
    pids = envs.worker_pids
    assert alive(pids)
    del envs
    gc.collect()
    assert not alive(pids)


def test_results_are_not_overwritten_by_the_next_step():
    envs = VectorEnv(Scripted(3), [0, 1, 2], num_workers=1)
    kept, _ = envs.reset(seed=1)
    envs.send(ZEROS)
    arrays = [kept, *arrays_of(envs.receive()).values()]
    copies = [array.copy() for array in arrays]
    envs.step(ZEROS + 1)
    envs.reset()
    envs.close()
    assert all(map(np.array_equal, arrays, copies))


@pytest.mark.parametrize("workers", [0, 2])
def test_calls_reach_every_environment_in_order(workers):
    envs = VectorEnv(Scripted(3), [2, 0, 1], num_workers=workers)
    envs.reset(seed=[4, 5, 6])
    assert envs.get_attr("task") == (2, 0, 1)
    assert envs.call("place", steps=3) == ((4, 3), (5, 3), (6, 3))
    envs.close()


# ---- what can go wrong ----


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
        ("reset_observation", np.nan),
        ("reset_observation", np.inf),
        ("raise_reset", 0),
    ],
)
def test_a_fault_names_its_task(faulty_envs, workers, fault, value):
    envs = faulty_envs[workers]
    step = 1 if "reset" in fault else 3
    options = {"fault": fault, "value": value, "task": "task-1", "step": step}
    envs.reset(seed=[1, 1, 2], options=options)
    with pytest.raises(EnvironmentFaultError, match="task-1"):
        for _ in range(scripted_length(1, 1)):
            envs.step(ZEROS)
    if "reset" in fault:
        with pytest.raises(EnvironmentFaultError, match="task-1"):
            envs.reset(seed=0, options=options | {"step": 0})
    envs.reset(seed=0, options={})


def test_observation_may_be_the_largest_float32(faulty_envs):
    options = {"fault": "observation", "value": np.finfo(np.float32).max, "task": "task-1"}
    envs = faulty_envs[0]
    envs.reset(seed=[1, 1, 2], options=options | {"step": 1})
    assert envs.step(ZEROS)[0][1, 2] == options["value"]


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_fault_every_worker_answers_the_question_asked(workers):
    envs = VectorEnv(Faulty(3), [0, 1, 2], num_workers=workers)
    envs.reset(seed=0, options={"fault": "raise", "task": "task-0", "step": 1})
    with pytest.raises(EnvironmentFaultError, match="task 'task-0', step 1"):
        envs.step(ZEROS)
    observations = [envs.reset(seed=5, options={})[0], *(envs.step(ZEROS)[0] for _ in range(2))]
    envs.close()
    assert np.array(observations)[:, :, 1:3].tolist() == [  # episode and step
        [[5, 0], [6, 0], [7, 0]],
        [[5, 1], [7, 0], [7, 1]],
        [[5, 2], [7, 1], [8, 0]],
    ]


@pytest.mark.parametrize("axis", [0, 1])
def test_an_action_that_is_not_a_number_is_no_step(axis):
    """MuJoCo silently resets the simulation after a NaN: then every observation is finite."""
    envs = VectorEnv(Scripted(3), [0, 1], num_workers=0)
    envs.reset(seed=0)
    action_EA = np.zeros((2, 2), np.float32)
    action_EA[1, axis] = np.nan
    with pytest.raises(PolicyFaultError, match="task-1"):
        envs.send(action_EA)
