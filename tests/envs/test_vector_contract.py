"""Gymnasium's contract of vector environments, held to its own ``SyncVectorEnv``.

It is written in the documentation of ``gymnasium.vector.VectorEnv`` and in Gymnasium's own tests of
its two vector environments.
"""

from unittest import mock

import numpy as np
import pytest
from gymnasium import error
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.envs.vector.episodes import Episodes
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from tests.helpers.altered_reach import OnceFaulty
from tests.helpers.environments import draw
from tests.helpers.fakes import Scripted, scripted_return

TASKS = [0, 1, 2, 1]
ZEROS = np.zeros((4, 2), np.float32)
SPACES = ("single_observation_space", "observation_space", "single_action_space", "action_space")


@pytest.fixture(params=[0, 1])
def envs(request):
    """Scripted environments, whose observations are task, episode, step and last action."""
    vector = VectorEnv(Scripted(3), TASKS, num_workers=request.param)
    yield vector
    vector.close()


def sync(benchmark):
    def maker(task):
        return lambda: Episodes(benchmark.make_env(task, "train", 0), 0, is_numbered=False)

    return SyncVectorEnv(map(maker, TASKS), autoreset_mode=AutoresetMode.SAME_STEP)


def test_steps_give_what_gymnasiums_own_vector_environment_gives(envs):
    theirs, recorded = sync(Scripted(3)), RecordEpisodeStatistics(envs)
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert all(getattr(envs, name) == getattr(theirs, name) for name in ("num_envs", *SPACES))
    assert np.array_equal(recorded.reset(seed=3)[0], theirs.reset(seed=3)[0])
    steps = [(recorded.step(a_EA), theirs.step(a_EA)) for a_EA in draw(envs, 40)]
    ends = 0
    for (*arrays, info), (*expected, expected_info) in steps:  # of which none has overwritten one
        for array, other in zip(arrays, expected, strict=True):
            assert array.dtype == other.dtype and np.array_equal(array, other)
        assert ("final_obs" in info) == ("final_obs" in expected_info)
        if "final_obs" in info:
            done_E = arrays[2] | arrays[3]
            ends += done_E.sum()
            for name in ("_final_obs", "_final_info"):
                assert np.array_equal(info[name], expected_info[name])
                assert np.array_equal(info[name], done_E)
            assert all(map(np.array_equal, info["final_obs"], expected_info["final_obs"]))
            found, wanted = info["final_info"], expected_info["final_info"]
            assert np.array_equal(found["success"][done_E], wanted["success"][done_E])
            for e in np.flatnonzero(done_E):
                task, number, length, _ = info["final_obs"][e].astype(int)
                assert info["episode"]["r"][e] == scripted_return(task, number)
                assert info["episode"]["l"][e] == length
    assert ends > 20


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
    envs = VectorEnv(ToyReach(1), [0] * 3, num_workers=workers)
    envs.reset(seed=5)
    assert envs.np_random_seed == (5, 6, 7)
    expected = [np.random.default_rng(seed) for seed in (5, 6, 7)]
    drawn = [generator.uniform(-1, 1, 2) for generator in expected]
    assert np.array_equal(np.float32(drawn), envs.reset(seed=5)[0])
    assert [one.random() for one in envs.np_random] == [one.random() for one in expected]
    envs.close()


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
    assert observation_ED[:, 1:3].tolist() == [[0, 1], [8, 0], [2, 1], [6, 0]]  # episode, step
    for _ in range(20):
        assert all(map(np.array_equal, envs.step(ZEROS)[:4], theirs.step(ZEROS)))


def test_a_mask_that_cannot_be_used_is_refused(envs):
    for mask in ([True] * 4, np.ones(3, np.bool_), np.ones(4, np.int64), np.zeros(4, np.bool_)):
        with pytest.raises(ConfigurationError, match="of 4"):
            envs.reset(options={"reset_mask": mask})


def test_calls_out_of_order_are_refused(envs):
    def step():
        return envs.step(ZEROS)

    for mask in (None, [True, True, False, True]):
        if mask:
            envs.reset(options={"reset_mask": np.array(mask)})
        with pytest.raises(error.ResetNeeded):
            step()
    envs.reset(seed=0)
    with pytest.raises(error.NoAsyncCallError):
        envs.receive()
    envs.send(ZEROS)
    for call in (step, envs.reset, envs.get_state):
        with pytest.raises(error.AlreadyPendingCallError):
            call()
    assert envs.receive().observation_ED[:, 2].tolist() == [1] * 4
    with pytest.raises(error.NoAsyncCallError):
        envs.receive()
    envs.close()
    envs.close()
    assert envs.closed
    for call in (step, envs.reset, envs.get_state, lambda: envs.call("task")):
        with pytest.raises(error.ClosedEnvironmentError):
            call()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("when", ["sent", "broken"])
def test_environments_can_be_closed_at_any_time(workers, when):
    envs = VectorEnv(OnceFaulty("raise", step=1), TASKS, num_workers=workers, max_restarts=5)
    envs.reset(seed=0)
    envs.send(ZEROS)
    if when == "broken":
        with pytest.raises(EnvironmentFaultError, match="task 'goal-1'"):
            envs.receive()
    envs.close()
    assert envs.closed and envs.num_restarts == 0, "rebuilding does not repair it"


def test_an_environment_that_cannot_be_closed_keeps_none_open():
    benchmark = Scripted(3)
    made = [benchmark.make_env(task, "train", 0) for task in range(3)]
    benchmark.make_env = lambda task, *_: made[task]
    for env, broken in zip(made, (None, RuntimeError("the window is gone"), None), strict=True):
        env.close = mock.Mock(side_effect=broken)
    envs = VectorEnv(benchmark, [0, 1, 2], num_workers=0)
    envs.reset()
    with pytest.raises(RuntimeError, match="the window is gone"):
        envs.close()
    envs.close()
    assert [env.close.call_count for env in made] == [1] * 3 and envs.closed
