import numpy as np

from mtrl_lightning.envs import ToyReach
from mtrl_lightning.envs.benchmarks.toy import STEP


def placed(x, y):
    """An environment whose point was moved to a place, from a corner of the square."""
    env = ToyReach(1, horizon=100).make_env(0, "train", 0)  # goal at (0.7, 0)
    env.reset(seed=0)
    for _ in range(10):
        env.step(np.ones(2))
    for _ in range(10):
        env.step((np.array([x, y]) - 1) / (10 * STEP))
    return env


def test_success_begins_at_the_radius():
    found = {
        x: placed(x, 0.0).step(np.zeros(2))[4]["success"] for x in (0.549, 0.551, 0.849, 0.851)
    }
    assert found == {0.549: False, 0.551: True, 0.849: True, 0.851: False}


def test_actions_stay_in_their_bounds_and_points_in_the_square():
    """The rewards of steps are tested with restarts."""
    observation, *_ = placed(0.0, 0.9).step(np.array([-5.0, 5.0]))
    np.testing.assert_allclose(observation, [-0.2, 1.0], atol=1e-7)
