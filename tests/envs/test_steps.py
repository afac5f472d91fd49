"""What a step may return, and simulations that MuJoCo resets silently."""

from functools import partial

import gymnasium as gym
import mujoco
import numpy as np
import pytest

from mtrl_lightning.envs import GymnasiumTasks, VectorEnv
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from mtrl_lightning.spec import Field
from tests.helpers.environments import run
from tests.helpers.fakes import Point, Scripted

FIELDS = (Field("energy"), Field("place", (2,), "float64"), Field("count", (), "int64"))
MISSING = object()


class Altered(Scripted):
    """``Scripted`` with further numbers in ``info``; a step of the second task has other values.

    Args:
        values: by name of what a step returns, or of a key in ``info``.
    """

    def __init__(self, **values):
        super().__init__(3)
        self.values = values

    @property
    def spec(self):
        return super().spec._replace(info_fields=FIELDS)

    def make_env(self, task, split, seed):
        return Returning(super().make_env(task, split, seed), self.values if task == 1 else {})


class Returning(gym.Wrapper):
    def __init__(self, env, values):
        super().__init__(env)
        self.values = values

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        step = self.unwrapped.steps
        info |= {"energy": 0.25, "place": action * 2, "count": step}
        core = {"observation": observation, "reward": reward, "terminated": terminated}
        returned = core | info | (self.values if step == 2 else {})
        info = {name: returned[name] for name in info if returned[name] is not MISSING}
        return *(returned[name] for name in core), truncated, info


def second_step(workers=0, options=None, **values):
    """Send the step with other values."""
    envs = VectorEnv(
        Altered(**values), [0, 1, 2], num_workers=workers, max_restarts=5, **(options or {})
    )
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
    envs = second_step(workers, **{name: value})
    result = envs.receive()
    envs.close()
    assert envs.num_restarts == 1
    assert result.valid_E.tolist() == [False, False, workers == 2]
    for column in result.extra.values():
        assert not column[~result.valid_E].any()
        assert column[result.valid_E].all()


def test_observation_may_be_the_largest_float32():
    observation = np.full(4, float(np.finfo(np.float32).max))
    result = second_step(observation=observation).receive()
    assert np.array_equal(result.next_observation_ED[1], observation)


@pytest.mark.parametrize(
    ("success", "expected"),
    [(1, True), (np.array([1.0]), True), (False, False), (np.array([0.0]), False)],
)
def test_success_is_a_boolean_or_a_number(success, expected):
    result = second_step(success=success, reward=np.array([2.5])).receive()
    assert (result.success_E[1], result.reward_E[1]) == (expected, 2.5)


@pytest.mark.parametrize(
    ("name", "value", "workers"),
    [
        ("success", np.nan, 0),
        ("success", 0.7, 0),
        ("success", "yes", 0),
        ("success", np.array([True, True]), 0),
        ("terminated", None, 0),
        ("reward", None, 0),
        ("reward", np.zeros(2), 0),
        ("observation", np.zeros(1), 0),
        ("place", 1.0, 0),
        ("place", 1.0, 1),
        ("energy", MISSING, 0),
    ],
)
def test_a_value_of_another_kind_is_refused(name, value, workers):
    envs = second_step(workers, **{name: value})
    with pytest.raises(ConfigurationError, match=f"task-1.*step 2.*{name}"):
        envs.receive()
    envs.close()
    assert envs.num_restarts == 0, "a rebuilt environment would not report it either"


@pytest.mark.parametrize("options", [{"after_success": 1}, {"midway_starts": 0.5}])
def test_extras_refuse_an_unclear_success(options):
    envs = second_step(options=options, success=0.7)
    with pytest.raises(ConfigurationError, match="success"):
        envs.receive()


@pytest.mark.parametrize("number", [1, 3])
def test_padding_does_not_hide_a_changed_shape(number):
    class Changing(Point):
        def step(self, action):
            _, *rest = super().step(action)
            return np.zeros(number, np.float32), *rest

    tasks = {"a": lambda: Changing(2), "b": lambda: Point(4)}
    envs = VectorEnv(GymnasiumTasks(tasks, horizon=5), [0], num_workers=0)
    envs.reset()
    with pytest.raises(ConfigurationError, match="observation"):
        envs.step(np.zeros((1, 4)))


def test_an_environment_of_the_old_interface_is_not_rebuilt():
    class OldStep(Point):
        def step(self, action):
            observation, reward, terminated, _, info = super().step(action)
            return observation, reward, terminated, info

    class OldReset(Point):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed, options=options)[0]

    for kind in (OldStep, OldReset):
        benchmark = GymnasiumTasks({"a": partial(kind, 3)}, horizon=5)
        envs = VectorEnv(benchmark, [0], num_workers=0, max_restarts=5)
        with pytest.raises(EnvironmentFaultError, match="task 'a'"):
            envs.reset()
            envs.step(np.zeros((1, 3)))
        assert envs.num_restarts == 0


# ---- unstable simulations ----


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
