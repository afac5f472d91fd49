"""Gymnasium's contract of vector environments, held to its own ``SyncVectorEnv``.

It is written in the documentation of ``gymnasium.vector.VectorEnv`` and in Gymnasium's own tests of
its two vector environments.
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
    ResetNeeded,
)
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space

from mtrl_lightning.envs import DMControl, VectorEnv
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from tests.helpers.fakes import Faulty, Scripted

TASKS = [0, 1, 2, 1]
ZEROS = np.zeros((4, 2), np.float32)


@pytest.fixture(params=[0, 1])
def envs(request):
    """Scripted environments, whose observations are task, episode, step and last action."""
    vector = VectorEnv(Scripted(3), TASKS, num_workers=request.param)
    yield vector
    vector.close()


def sync(benchmark, tasks=TASKS):
    makers = [lambda task=task: benchmark.make_env(task, "train", 0) for task in tasks]
    space = benchmark.spec.observation_space
    return SyncVectorEnv(
        makers,
        observation_mode=(batch_space(space, len(tasks)), space),
        autoreset_mode=AutoresetMode.SAME_STEP,
    )


# ---- seeding ----


def test_seeds_are_those_of_gymnasium(envs):
    theirs = sync(Scripted(3))
    seeds = [(3, 3), (np.int64(3), 3), ((5, 3, 3, 9), [5, 3, 3, 9]), ([np.int64(4)] * 4, [4] * 4)]
    for seed, same_seed in seeds:
        assert np.array_equal(envs.reset(seed=seed)[0], theirs.reset(seed=same_seed)[0])
        for _ in range(5):
            assert np.array_equal(envs.step(ZEROS)[0], theirs.step(ZEROS)[0])
    assert envs.reset(seed=3)[0][:, 1].tolist() == [3, 4, 5, 6]
    assert envs.reset(seed=[7, None, None, 8])[0][:, 1].tolist() == [7, 5, 6, 8]
    assert envs.reset()[0][:, 1].tolist() == [8, 6, 7, 9], "None continues each environment"


@pytest.mark.parametrize("workers", [0, 1])
def test_generators_of_all_environments(workers):
    envs = VectorEnv(DMControl(["walker-walk"]), [0] * 3, num_workers=workers)
    envs.reset(seed=5)
    assert envs.np_random_seed == (5, 6, 7)
    expected = [np.random.default_rng(seed).random() for seed in (5, 6, 7)]
    assert [generator.random() for generator in envs.np_random] == expected
    envs.close()


# ---- a reset of some ----


def test_a_mask_resets_some_environments(envs):
    theirs = sync(Scripted(3))
    for vector in (envs, theirs):
        vector.reset(seed=[0, 1, 2, 3])
        vector.step(ZEROS)
    mask_E = np.array([False, True, False, True])
    options = {"reset_mask": mask_E}
    observation_ED, _ = envs.reset(seed=[9, 8, 7, 6], options=options)
    assert options == {"reset_mask": mask_E}, "the caller's options are not changed"
    expected_ED, _ = theirs.reset(seed=[9, 8, 7, 6], options={"reset_mask": mask_E})
    assert np.array_equal(observation_ED, expected_ED)
    assert observation_ED[:, 1].tolist() == [0, 8, 2, 6]
    assert observation_ED[:, 2].tolist() == [1, 0, 1, 0]
    lengths = []
    for _ in range(20):
        *_, info = envs.step(ZEROS)
        *_, expected = theirs.step(ZEROS)
        assert ("final_obs" in info) == ("final_obs" in expected)
        if "final_obs" in info:
            rows = np.flatnonzero(info["_final_obs"])
            lengths += [
                (info["final_obs"][e][2], info["final_info"]["episode"]["l"][e]) for e in rows
            ]
    assert lengths and all(step == length for step, length in lengths)


@pytest.mark.parametrize(
    "mask",
    [[True] * 4, np.ones(3, np.bool_), np.ones(4, np.int64), np.zeros(4, np.bool_)],
    ids=["list", "short", "integers", "none"],
)
def test_a_mask_that_cannot_be_used_is_refused_as_by_gymnasium(mask):
    envs = VectorEnv(Scripted(3), TASKS, num_workers=0)
    with pytest.raises(ConfigurationError, match="of 4"):
        envs.reset(options={"reset_mask": mask})
    with pytest.raises((TypeError, ValueError)):
        sync(Scripted(3)).reset(options={"reset_mask": mask})


# ---- the order of calls ----


def test_a_step_needs_a_reset_of_every_environment(envs):
    with pytest.raises(ResetNeeded, match="call reset"):
        envs.step(ZEROS)
    envs.reset(options={"reset_mask": np.array([True, True, False, True])})
    with pytest.raises(ResetNeeded, match="call reset"):
        envs.step(ZEROS)
    envs.reset(options={"reset_mask": np.array([False, False, True, False])})
    envs.step(ZEROS)
    state = envs.get_state()
    other = VectorEnv(Scripted(3), TASKS, num_workers=0)
    other.set_state(state)
    assert np.array_equal(other.step(ZEROS)[0], envs.step(ZEROS)[0])
    remade = VectorEnv(Scripted(3), TASKS, num_workers=0)
    remade.remake()
    remade.step(ZEROS)


def test_a_step_is_received_before_anything_else(envs):
    envs.reset(seed=0)
    with pytest.raises(NoAsyncCallError, match="call send"):
        envs.receive()
    envs.send(ZEROS)
    for call in (lambda: envs.send(ZEROS), envs.reset, envs.get_state, envs.remake):
        with pytest.raises(AlreadyPendingCallError, match="call receive"):
            call()
    assert envs.receive().observation_ED[:, 2].tolist() == [1] * 4
    with pytest.raises(NoAsyncCallError, match="call send"):
        envs.receive()
    theirs = sync(Scripted(3))
    theirs.reset(seed=0)
    theirs.step(ZEROS)
    assert np.array_equal(envs.step(ZEROS)[0], theirs.step(ZEROS)[0])


# ---- closing ----


def test_closed_environments_say_so(envs):
    envs.reset(seed=0)
    envs.close()
    assert envs.closed
    envs.close()
    calls = (
        lambda: envs.step(ZEROS),
        envs.reset,
        envs.get_state,
        envs.remake,
        lambda: envs.call("num_resets"),
    )
    for call in calls:
        with pytest.raises(ClosedEnvironmentError, match="make a new VectorEnv"):
            call()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("when", ["made", "sent", "broken"])
def test_environments_can_be_closed_at_any_time(workers, when):
    envs = VectorEnv(Faulty(3), TASKS, num_workers=workers)
    if when != "made":
        envs.reset(seed=0, options={"fault": "raise", "task": "task-1", "step": 1})
        envs.send(ZEROS)
    if when == "broken":
        with pytest.raises(EnvironmentFaultError):
            envs.receive()
    envs.close()
    envs.close()
    assert envs.closed


class Closing(gym.Wrapper):
    """Counts how often it is closed; one raises."""

    closed: list[int] = []  # noqa: RUF012

    def __init__(self, env, task):
        super().__init__(env)
        self.task = task

    def close(self):
        self.closed.append(self.task)
        if self.task == 1:
            raise RuntimeError("the window is gone")


class WithClosing(Scripted):
    def make_env(self, task, split, seed):
        return Closing(super().make_env(task, split, seed), task)


def test_an_environment_that_cannot_be_closed_keeps_none_open():
    Closing.closed.clear()
    benchmark: Benchmark = WithClosing(3)
    envs = VectorEnv(benchmark, [0, 1, 2], num_workers=0)
    envs.reset()
    with pytest.raises(RuntimeError, match="the window is gone"):
        envs.close()
    envs.close()
    assert Closing.closed == [0, 1, 2] and envs.closed
