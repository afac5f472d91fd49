"""What a step may return, and simulations that MuJoCo resets silently."""

import gymnasium as gym
import mujoco
import numpy as np
import pytest

from mtrl_lightning.envs import GymnasiumTasks, VectorEnv
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.environments import run
from tests.helpers.fakes import Informed


def second_step(values, **options):
    """Send the step with other values."""
    given = {"num_workers": 0, "max_restarts": 5, **options}
    envs = VectorEnv(Informed(**values), [0, 1, 2], **given)
    envs.reset(seed=[0, 1, 0])
    envs.step(np.ones((3, 2)))
    envs.send(np.ones((3, 2)))
    return envs


@pytest.mark.parametrize(
    ("workers", "name", "value"),
    [
        (0, "place", np.array([0.0, np.inf])),
        (2, "place", np.array([0.0, np.inf])),
        (0, "reward", np.nan),
        (1, "reward", -np.inf),
        (0, "reward", 1e39),
        (0, "observation", np.array([0.0, np.nan, 0.0, 0.0])),
        (1, "observation", np.array([0.0, 0.0, 0.0, 1e39])),
    ],
)
def test_nonfinite_number_is_a_fault_and_voids_its_row(workers, name, value):
    envs = second_step({name: value}, num_workers=workers)
    result = envs.receive()
    envs.close()
    assert envs.num_restarts == 1
    assert result.valid_E.tolist() == [False, False, workers == 2]
    for column in result.extra.values():
        assert not column[~result.valid_E].any()
        assert column[result.valid_E].all()


@pytest.mark.parametrize(
    ("success", "expected"),
    [(1, True), (np.array([1.0]), True), (False, False), (np.array([0.0]), False)],
)
def test_values_may_be_arrays_and_as_large_as_float32(success, expected):
    largest = np.full(4, np.finfo(np.float32).max, np.float64)
    values = {"success": success, "reward": np.array([2.5]), "observation": largest}
    result = second_step(values).receive()
    assert (result.success_E[1], result.reward_E[1]) == (expected, 2.5)
    assert np.array_equal(result.next_observation_ED[1], largest)


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("success", np.nan, {}),
        ("success", 0.7, {}),
        ("success", 0.7, {"after_success": 1}),
        ("success", 0.7, {"midway_starts": 0.5}),
        ("success", "yes", {}),
        ("success", np.array([True, True]), {}),
        ("terminated", None, {}),
        ("reward", None, {}),
        ("reward", np.zeros(2), {}),
        ("observation", np.zeros(1), {}),
        ("place", 1.0, {}),
        ("place", 1.0, {"num_workers": 1}),
        ("energy", ..., {}),
    ],
)
def test_a_value_of_another_kind_is_refused(name, value, options):
    envs = second_step({name: value}, **options)
    with pytest.raises(ConfigurationError, match=f"task-1.*step 2.*{name}"):
        envs.receive()
    envs.close()
    assert envs.num_restarts == 0, "a rebuilt environment would not report it either"


class UnstableReset(gym.Wrapper):
    """Ends every reset with a simulation that MuJoCo has reset, and that has counted it."""

    def reset(self, **kwargs):
        self.env.reset(**kwargs)
        simulation = self.unwrapped
        simulation.data.qvel[:] = 1e12
        mujoco.mj_step(simulation.model, simulation.data)
        assert simulation.data.warning.number.any()
        return np.zeros(4), {}


@pytest.mark.parametrize(
    ("place", "speed", "warning"),
    [(1e12, 0.0, "mjWARN_BADQPOS"), (0.0, 1e12, "mjWARN_BADQVEL"), (0.0, 1e9, "mjWARN_BADQACC")],
)
def test_a_simulation_that_mujoco_reset_is_a_fault(tmp_path, monkeypatch, place, speed, warning):
    """Every number of such a step is finite, but the transition never happened."""
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its log
    reasons = []
    benchmark = GymnasiumTasks({"a": lambda: UnstableReset(gym.make("InvertedPendulum-v5"))}, 50)
    envs = VectorEnv(benchmark, [0], num_workers=0, max_restarts=3, on_restart=reasons.append)
    envs.reset(seed=0)
    envs.step(np.zeros((1, 1)))
    envs.call("set_state", np.full(2, place), np.full(2, speed))
    results = run(envs, np.zeros((2, 1, 1)))
    assert [result.valid_E.tolist() for result in results] == [[False], [True]]
    (reason,) = reasons
    assert "task 'a', step 2 of its episode" in reason and warning in reason
