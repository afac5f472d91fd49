"""Environments stepped together give what each gives alone, for any number of workers."""

import gc
import itertools
import os

import numpy as np
import pytest

from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.envs.vector.vector import default_num_workers
from mtrl_lightning.errors import EnvironmentFaultError, PolicyFaultError
from tests.helpers.altered_reach import OnceFaulty
from tests.helpers.environments import draw, run
from tests.helpers.fakes import Scripted
from tests.helpers.processes import alive

ZEROS = np.zeros((3, 2))


def test_number_of_workers_has_bounds():
    cores = len(os.sched_getaffinity(0))
    assert default_num_workers(1000) == max(1, cores - 1)
    assert default_num_workers(1000, spare=0) == cores
    assert default_num_workers(1) == default_num_workers(5, spare=cores) == 1
    envs = VectorEnv(ToyReach(), [0], num_workers=4)
    (pid,) = envs.worker_pids
    assert alive([pid])
    del envs
    gc.collect()
    assert not alive([pid])


def test_calls_reach_every_environment_in_order():
    envs = VectorEnv(Scripted(3), [2, 0, 1], num_workers=2)
    envs.reset(seed=[4, 5, 6])
    assert envs.get_attr("task") == (2, 0, 1)
    assert envs.call("place", steps=3) == ((4, 3), (5, 3), (6, 3))
    envs.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_fault_every_worker_answers_the_question_asked(workers):
    envs = VectorEnv(OnceFaulty("raise", step=3), [0, 1, 2], num_workers=workers)
    plain = VectorEnv(ToyReach(3, horizon=5), [0, 1, 2], num_workers=0)
    envs.reset(seed=0)
    with pytest.raises(EnvironmentFaultError, match="task 'goal-1', step 3"):
        for _ in range(3):
            envs.step(ZEROS)
    assert np.array_equal(envs.reset(seed=5)[0], plain.reset(seed=5)[0])
    for result, expected in zip(run(envs, draw(envs, 8)), run(plain, draw(envs, 8)), strict=True):
        assert np.array_equal(result.observation_ED, expected.observation_ED)
    envs.close()


@pytest.mark.parametrize("value", ["no number", np.nan])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_of_a_reset_names_its_task(workers, number, value):
    """It raises, or returns what is not finite."""

    class Broken(ToyReach):
        def make_env(self, task, split, seed):
            env = super().make_env(task, split, seed)
            reset = env.reset
            calls = itertools.count(1)

            def broken_reset(**kwargs):
                observation, info = reset(**kwargs)
                return observation + (value if next(calls) == number else 0), info

            env.reset = broken_reset if task == 1 else reset
            return env

    envs = VectorEnv(Broken(3, horizon=1), [0, 1, 2], num_workers=workers)
    with pytest.raises(EnvironmentFaultError, match="goal-1"):
        envs.reset(seed=0)
        envs.step(ZEROS)
    envs.close()


def test_an_action_that_is_not_a_number_is_no_step():
    """MuJoCo silently resets the simulation after a NaN: then every observation is finite."""
    envs = VectorEnv(Scripted(3), [0, 1], num_workers=0)
    envs.reset(seed=0)
    action_EA = np.zeros((2, 2), np.float32)
    action_EA[1, 1] = np.nan
    with pytest.raises(PolicyFaultError, match="task-1"):
        envs.send(action_EA)
