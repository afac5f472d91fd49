"""A benchmark of a user's own Gymnasium environments."""

import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.wrappers import TimeAwareObservation, TimeLimit

from mtrl_lightning.envs import GymnasiumTasks, VectorEnv
from mtrl_lightning.envs.vector.episodes import episode_seed
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.fakes import Line, Point, limited

PENDULUMS = {"light": {"id": "Pendulum-v1", "kwargs": {"g": 5.0}}, "heavy": "Pendulum-v1"}


def imported():
    return TimeLimit(Line(), 4)


def test_spaces_horizon_and_protocol_come_from_the_environments():
    spec = GymnasiumTasks(PENDULUMS).spec
    assert spec.task_names == ("light", "heavy") and spec.train_tasks == (0, 1)
    assert spec.observation_space == gym.make("Pendulum-v1").observation_space
    assert spec.action_space == Box(-1.0, 1.0, (1,), np.float32)
    assert (spec.horizon, spec.has_success) == (200, False)
    assert spec.protocol == {
        "benchmark": "gymnasium",
        "gymnasium": gym.__version__,
        "horizon": 200,
        "task light": 'Pendulum-v1 {"g": 5.0}',
        "task heavy": "Pendulum-v1",
    }
    named = GymnasiumTasks({"Pendulum-v1": "Pendulum-v1"})
    for ids in (["Pendulum-v1"], "Pendulum-v1"):
        assert GymnasiumTasks(ids).spec == named.spec
    functions = {
        "a": imported,
        "b": functools.partial(gym.make, "Pendulum-v1", g=3.0),
        "c": f"{__name__}.imported",
    }
    protocol = GymnasiumTasks(functions).spec.protocol
    assert protocol["task a"] == protocol["task c"] == f"{__name__}.imported"
    assert protocol["task b"] == 'gymnasium.envs.registration.make ["Pendulum-v1", {"g": 3.0}]'


def test_steps_are_gymnasiums_with_rescaled_actions():
    envs = VectorEnv(GymnasiumTasks(PENDULUMS, horizon=20), [0, 1], num_workers=0)
    plain = [gym.make("Pendulum-v1", g=g) for g in (5.0, 10.0)]
    observation_ED, _ = envs.reset(seed=4)
    assert np.array_equal(observation_ED, [env.reset(seed=4 + e)[0] for e, env in enumerate(plain)])
    draws = np.random.default_rng(0).uniform(-1, 1, (25, 2, 1)).astype(np.float32)
    for k, action_EA in enumerate(draws):
        envs.send(action_EA)
        result = envs.receive()
        for e, env in enumerate(plain):
            observation, reward, *_ = env.step(2 * action_EA[e])
            np.testing.assert_allclose(result.next_observation_ED[e], observation, atol=2e-5)
            assert result.reward_E[e] == pytest.approx(float(reward), abs=1e-4)
            assert result.truncated_E[e] == (k == 19)
            if k == 19:
                following = env.reset(seed=episode_seed(4 + e, 1))[0]
                assert result.observation_ED[e].tolist() == following.tolist()


@pytest.mark.parametrize(
    ("limit", "horizon", "expected"), [(4, None, 4), (4, 9, 4), (9, 4, 4), (None, 3, 3)]
)
def test_shorter_of_limit_and_horizon_truncates(limit, horizon, expected):
    benchmark = GymnasiumTasks({"a": limited(limit) if limit else Line}, horizon=horizon)
    assert benchmark.spec.horizon == expected
    env = benchmark.make_env(0, "train", 0)
    env.reset()
    ends = [env.step(np.zeros(1, np.float32))[3] for _ in range(expected)]
    assert ends == [False] * (expected - 1) + [True]


def test_dictionaries_of_boxes_are_flattened():
    benchmark = GymnasiumTasks({"a": lambda: TimeAwareObservation(limited(5)(), flatten=False)})
    envs = VectorEnv(benchmark, [0], num_workers=0)
    ((before, _),), _ = envs.reset()
    ((place, time),), *_ = envs.step(np.full((1, 1), 0.5))
    assert (place - before, time) == (pytest.approx(1.5), 1)


@pytest.mark.parametrize("key", ["success", "is_success"])
def test_success_is_read_from_either_key(key):
    benchmark = GymnasiumTasks({"a": limited(5, success=key)}, has_success=True)
    envs = VectorEnv(benchmark, [0, 0], num_workers=0)
    envs.reset()
    envs.send(np.array([[1.0], [-1.0]]))
    assert benchmark.spec.has_success and envs.receive().success_E.tolist() == [True, False]


def test_success_that_is_never_reported_is_refused():
    benchmark = GymnasiumTasks({"a": limited(2)}, has_success=True)
    envs = VectorEnv(benchmark, [0], num_workers=0, max_restarts=3)
    envs.reset()
    envs.step(np.zeros((1, 1)))
    with pytest.raises(ConfigurationError, match="is_success"):
        envs.step(np.zeros((1, 1)))
    assert envs.num_restarts == 0


def test_functions_of_a_loop_that_share_its_variable_warn(recwarn):
    bound = {f"k{k}": lambda k=k: TimeLimit(Line(), k) for k in (1, 2)}
    partials = {f"p{k}": functools.partial(TimeLimit, Line(), k) for k in (1, 2)}
    GymnasiumTasks({**bound, **partials, "a": limited(2), "b": limited(3)})
    assert not recwarn.list
    with pytest.warns(UserWarning, match="k1, k2"):
        GymnasiumTasks({f"k{k}": lambda: TimeLimit(Line(), k) for k in (1, 2)})  # noqa: B023


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.filterwarnings("error")
def test_a_constant_entry_of_the_action_stays_constant(dtype):
    def make():
        env = Point(3)
        env.action_space = Box(np.array([0, 1, -4], dtype), np.array([0, 3, 4], dtype), dtype=dtype)
        return env

    envs = VectorEnv(GymnasiumTasks({"a": make}, horizon=5), [0], num_workers=0)
    before_D = envs.reset()[0][0]
    after_D = envs.step(np.array([[0.5, -1.0, 0.25]], np.float32))[0][0]
    np.testing.assert_allclose(after_D - before_D, [0.0, 0.2, 0.2], atol=1e-6)


def test_workers_make_ids_registered_in_the_main_process():
    gym.register("OnlyHere-v0", entry_point=Line, max_episode_steps=6)
    try:
        envs = VectorEnv(GymnasiumTasks({"a": "OnlyHere-v0"}), [0], num_workers=1)
        envs.reset()
        ends = [bool(envs.step(np.zeros((1, 1)))[3][0]) for _ in range(6)]
        envs.close()
    finally:
        del gym.registry["OnlyHere-v0"]
    assert ends == [False] * 5 + [True]


@pytest.mark.filterwarnings("ignore:.*render mode.*")
def test_render_mode_is_passed_to_envs_that_take_one():
    def drawn(render_mode=None):
        env = Line()
        env.render_mode = render_mode
        return env

    for make, render_mode in ((drawn, "rgb_array"), (Line, None)):
        benchmark = GymnasiumTasks({"a": make}, horizon=3)
        assert benchmark.make_env(0, "eval", 0).render_mode is None
        assert benchmark.make_rendered_env(0, "eval", 0).render_mode == render_mode
