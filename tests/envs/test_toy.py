import numpy as np
import pytest

from mtrl_lightning.envs import ToyReach
from mtrl_lightning.envs.benchmarks.toy import STEP


def placed(x, y, task=0, num_tasks=1):
    """An environment whose point was moved to a place, from a corner of the square."""
    env = ToyReach(num_tasks, horizon=100).make_env(task, "train", 0)
    env.reset(seed=0)
    for _ in range(10):
        env.step(np.ones(2))
    for _ in range(10):
        env.step((np.array([x, y]) - 1) / (10 * STEP))
    return env


def test_reward_is_one_minus_the_distance_by_hand():
    env = placed(0.0, 0.0, task=1, num_tasks=4)  # goal at 90 degrees: (0, 0.7)
    for action, place, distance in (
        ([0.0, 1.0], [0.0, 0.2], 0.5),
        ([-1.0, 0.5], [-0.2, 0.3], np.sqrt(0.2**2 + 0.4**2)),
        ([5.0, -5.0], [0.0, 0.1], 0.6),  # out of bounds
    ):
        observation, reward, terminated, truncated, info = env.step(np.array(action))
        np.testing.assert_allclose(observation, place, atol=1e-7)
        assert reward == pytest.approx(1 - distance, abs=1e-7)
        assert (terminated, truncated, info["success"]) == (False, False, False)


def test_success_begins_at_the_radius():
    found = {}
    for distance in (0.0, -0.149, -0.151, 0.151):
        env = placed(0.7 + distance, 0.0)  # goal at (0.7, 0)
        found[distance] = env.step(np.zeros(2))[4]["success"]
    assert found == {0.0: True, -0.149: True, -0.151: False, 0.151: False}


def test_points_stay_in_the_square():
    assert placed(0.95, -0.95).step(np.array([1.0, -1.0]))[0].tolist() == [1.0, -1.0]


def test_the_observation_does_not_tell_the_task():
    envs = [ToyReach(2).make_env(task, "train", 0) for task in (0, 1)]
    starts = [env.reset(seed=5)[0].tolist() for env in envs]
    (one, reward, *_), (other, other_reward, *_) = (env.step(np.array([1.0, 0.0])) for env in envs)
    assert starts[0] == starts[1] and one.tolist() == other.tolist()
    assert reward != other_reward
