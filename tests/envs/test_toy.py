import numpy as np
import pytest

from mtrl_lightning.envs import ToyReach


def at(env, x, y):
    env._position = np.array([x, y])


def test_reward_is_one_minus_the_distance_by_hand():
    env = ToyReach(num_tasks=4, horizon=20).make_env(1, "train", 0)  # goal at 90 degrees: (0, 0.7)
    env.reset(seed=0)
    at(env, 0.0, 0.0)
    observation, reward, terminated, truncated, info = env.step(np.array([0.0, 1.0], np.float32))
    np.testing.assert_allclose(observation, [0.0, 0.2], atol=1e-7)
    assert reward == pytest.approx(1 - 0.5, abs=1e-7)
    assert (terminated, truncated, info["success"]) == (False, False, False)
    observation, reward, *_ = env.step(np.array([-1.0, 0.5], np.float32))
    np.testing.assert_allclose(observation, [-0.2, 0.3], atol=1e-7)
    assert reward == pytest.approx(1 - np.sqrt(0.2**2 + 0.4**2), abs=1e-7)


def test_success_begins_at_the_radius():
    env = ToyReach(num_tasks=1).make_env(0, "train", 0)  # goal at (0.7, 0)
    for x, success in (
        (0.7, True),
        (0.7 - 0.149, True),
        (0.7 - 0.151, False),
        (0.7 + 0.151, False),
    ):
        env.reset(seed=0)
        at(env, x, 0.0)
        assert env.step(np.zeros(2, np.float32))[4]["success"] is success


def test_points_stay_in_the_square_and_actions_in_their_bounds():
    env = ToyReach().make_env(0, "train", 0)
    env.reset(seed=0)
    at(env, 0.95, -0.95)
    assert env.step(np.array([1.0, -1.0], np.float32))[0].tolist() == [1.0, -1.0]
    at(env, 0.0, 0.0)
    np.testing.assert_allclose(
        env.step(np.array([5.0, -5.0], np.float32))[0], [0.2, -0.2], atol=1e-7
    )


def test_the_observation_does_not_tell_the_task():
    benchmark = ToyReach(num_tasks=2)
    first, second = (benchmark.make_env(task, "train", 0) for task in (0, 1))
    assert first.reset(seed=5)[0].tolist() == second.reset(seed=5)[0].tolist()
    action = np.array([1.0, 0.0], np.float32)
    (one, reward, *_), (two, other_reward, *_) = first.step(action), second.step(action)
    assert one.tolist() == two.tolist()
    assert reward != other_reward
