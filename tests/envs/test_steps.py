"""What a step reports beyond the core fields, and simulations that MuJoCo resets silently."""

import gymnasium as gym
import mujoco
import numpy as np
import pytest

from mtrl_lightning.envs import GymnasiumTasks, VectorEnv
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from mtrl_lightning.spec import Field
from tests.helpers.fakes import Point, Scripted

FIELDS = (Field("energy"), Field("place", (2,), "float64"), Field("count", (), "int64"))


class Informed(Scripted):
    """``Scripted`` with further numbers in ``info``.

    Args:
        fields: of the spec.
        altered: what ``info`` holds instead in step 2; None for a field that is missing.
    """

    def __init__(self, fields=FIELDS, altered=None):
        super().__init__(3)
        self.fields, self.altered = fields, altered or {}

    @property
    def spec(self):
        return super().spec._replace(info_fields=self.fields)

    def make_env(self, task, split, seed):
        return _Informed(super().make_env(task, split, seed), self.altered if task == 1 else {})


class _Informed(gym.Wrapper):
    def __init__(self, env, altered):
        super().__init__(env)
        self._altered = altered

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        step = self.unwrapped.steps
        info |= {"energy": step / 4, "place": action * 2, "count": 10 * self.unwrapped.task + step}
        if step == 2:
            info |= self._altered
        return (
            observation,
            reward,
            terminated,
            truncated,
            {name: value for name, value in info.items() if value is not None},
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_of_info_are_returned_with_the_step(workers):
    tasks, episodes = [0, 1, 2, 1], [2, 5, 0, 3]
    envs = VectorEnv(Informed(), tasks, num_workers=workers)
    envs.reset(seed=episodes)
    draws = np.random.default_rng(0).uniform(-1, 1, (12, 4, 2)).astype(np.float32)
    results = []
    for action_EA in draws:
        envs.send(action_EA)
        results.append(envs.receive())
    envs.close()
    for action_EA, result in zip(draws, results, strict=True):
        step_E = result.next_observation_ED[:, 2]
        assert list(result.extra) == ["energy", "place", "count"]
        assert result.extra["energy"].dtype == np.float32
        assert result.extra["energy"].tolist() == (step_E / 4).tolist()
        assert result.extra["place"].tolist() == (2 * action_EA).astype(np.float64).tolist()
        assert result.extra["count"].tolist() == (10 * np.array(tasks) + step_E).tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("altered", "message"),
    [({"energy": None}, "task-1.*energy"), ({"place": 1.0}, "task-1.*place")],
)
def test_what_the_spec_promises_and_info_lacks_is_named(workers, altered, message):
    envs = VectorEnv(Informed(altered=altered), [0, 1, 2], num_workers=workers, max_restarts=5)
    envs.reset(seed=[0, 1, 0])
    envs.step(np.zeros((3, 2)))
    with pytest.raises(ConfigurationError, match=message):
        envs.step(np.zeros((3, 2)))
    assert envs.num_restarts == 0, "a rebuilt environment would not report it either"
    envs.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_nonfinite_info_is_a_fault_and_voids_its_row(workers):
    altered = {"place": np.array([0.0, np.inf])}
    envs = VectorEnv(Informed(altered=altered), [0, 1, 2], num_workers=workers, max_restarts=5)
    envs.reset(seed=[0, 1, 0])
    envs.step(np.ones((3, 2)))
    envs.send(np.ones((3, 2)))
    result = envs.receive()
    reason = envs.num_restarts
    envs.close()
    assert reason == 1
    assert not result.valid_E[1] and result.valid_E[2] == (workers == 2)
    for value in result.extra.values():
        assert not value[~result.valid_E].any()
        assert value[result.valid_E].all()


# ---- what a step returns ----


class Returning(gym.Wrapper):
    """Its second step returns other values, and its third those of the environment again."""

    def __init__(self, env, **values):
        super().__init__(env)
        self.values = values

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        values = {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "success": info["success"],
        }
        if self.unwrapped.steps == 2:
            values |= self.values
        success = values.pop("success")
        return *values.values(), truncated, {"success": success}


class Altered(Scripted):
    """``Scripted``, in whose second task the second step returns other values."""

    def __init__(self, **values):
        super().__init__(2)
        self.values = values

    def make_env(self, task, split, seed):
        env = super().make_env(task, split, seed)
        return Returning(env, **self.values) if task == 1 else env


def second_step(options=None, **values):
    envs = VectorEnv(Altered(**values), [0, 1], num_workers=0, max_restarts=5, **(options or {}))
    envs.reset(seed=[0, 1])
    envs.step(np.zeros((2, 2)))
    envs.send(np.zeros((2, 2)))
    return envs, envs.receive


@pytest.mark.parametrize(
    ("success", "expected"),
    [(one, True) for one in (True, np.True_, 1, 1.0, np.array(True), np.array([1.0]))]
    + [(zero, False) for zero in (False, 0, np.array([0.0]))],
)
def test_success_is_a_boolean_or_a_number(success, expected):
    _, receive = second_step(success=success, reward=np.array([2.5]))
    result = receive()
    assert (result.success_E[1], result.reward_E[1]) == (expected, 2.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("success", np.nan),
        ("success", 0.7),
        ("success", "yes"),
        ("success", None),
        ("success", np.array([True, True])),
        ("terminated", None),
        ("reward", None),
        ("reward", np.zeros(2)),
        ("observation", np.zeros(1)),
        ("observation", np.zeros(3)),
    ],
)
def test_a_value_of_another_kind_is_refused(field, value):
    envs, receive = second_step(**{field: value})
    with pytest.raises(ConfigurationError, match=f"task-1.*step 2.*{field}"):
        receive()
    assert envs.num_restarts == 0


@pytest.mark.parametrize("options", [{"after_success": 1}, {"midway_starts": 0.5}])
def test_extras_refuse_an_unclear_success(options):
    _, receive = second_step(options, success=0.7)
    with pytest.raises(ConfigurationError, match="success"):
        receive()


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


class OldStep(Point):
    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class OldReset(Point):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0]


@pytest.mark.parametrize("kind", [OldStep, OldReset])
def test_an_environment_of_the_old_interface_is_not_rebuilt(kind):
    benchmark = GymnasiumTasks({"a": lambda: kind(3)}, horizon=5)
    envs = VectorEnv(benchmark, [0], num_workers=0, max_restarts=5)
    with pytest.raises(EnvironmentFaultError, match="task 'a'"):
        envs.reset()
        envs.step(np.zeros((1, 3)))
    assert envs.num_restarts == 0


# ---- unstable simulations ----

PENDULUM = {"a": "InvertedPendulum-v5", "b": "InvertedPendulum-v5"}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("place", "speed", "warning"),
    [(1e12, 0.0, "mjWARN_BADQPOS"), (0.0, 1e12, "mjWARN_BADQVEL"), (0.0, 1e9, "mjWARN_BADQACC")],
)
def test_a_simulation_that_mujoco_reset_is_a_fault(
    tmp_path, monkeypatch, workers, place, speed, warning
):
    """Every number of such a step is finite, but the transition never happened."""
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its log
    reasons = []
    benchmark = GymnasiumTasks(PENDULUM, horizon=50)
    envs = VectorEnv(
        benchmark, [0, 1], num_workers=workers, max_restarts=3, on_restart=reasons.append
    )
    envs.reset(seed=0)
    envs.step(np.zeros((2, 1)))
    for i, group in enumerate(envs._groups):
        if i == 0:
            group.ask("call", "set_state", np.full(2, place), np.full(2, speed))
            group.answer()
    envs.send(np.zeros((2, 1)))
    result = envs.receive()
    envs.send(np.zeros((2, 1)))
    after = envs.receive()
    envs.close()
    assert result.valid_E.tolist() == [False, workers == 2] and after.valid_E.all()
    (reason,) = reasons
    assert "task 'a', step 2 of its episode: MuJoCo reset the simulation" in reason
    assert warning in reason


class UnstableReset(gym.Wrapper):
    """Ends every reset with a simulation that MuJoCo has reset, and that has counted it."""

    def reset(self, **kwargs):
        self.env.reset(**kwargs)
        simulation = self.unwrapped
        simulation.data.qvel[:] = 1e12
        mujoco.mj_step(simulation.model, simulation.data)
        assert simulation.data.warning.number.any()
        return np.zeros(4), {}


def test_a_warning_of_a_reset_is_no_fault_of_the_next_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make = {"a": lambda: UnstableReset(gym.make("InvertedPendulum-v5"))}
    envs = VectorEnv(GymnasiumTasks(make, horizon=50), [0], num_workers=0)
    envs.reset(seed=0)
    envs.step(np.zeros((1, 1)))
    envs.call("set_state", np.zeros(2), np.full(2, 1e12))
    with pytest.raises(EnvironmentFaultError, match="mjWARN_BADQVEL"):
        envs.step(np.zeros((1, 1)))
    envs.reset(seed=0)
    envs.step(np.zeros((1, 1)))
