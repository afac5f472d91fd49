import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box

from mtrl_lightning.envs import ToyReach
from mtrl_lightning.envs.benchmarks.benchmark import check_same, check_spec
from mtrl_lightning.envs.benchmarks.padding import Padded, padded_spaces
from mtrl_lightning.errors import ConfigurationError


def box(size, bound=1.0, dtype=np.float32):
    return Box(-bound, bound, (size,), dtype)


class Walk(gym.Env):
    """The observation counts up by the action's sum; its state is the place."""

    def __init__(self, observation_size=2, action_size=1):
        self.observation_space = box(observation_size, 9.0, np.float64)
        self.action_space = box(action_size)
        self.place = 0.0

    def reset(self, *, seed=None, options=None):
        self.place = 1.0
        return np.full(self.observation_space.shape, self.place), {}

    def step(self, action):
        assert action.shape == self.action_space.shape
        self.place += float(action.sum())
        return np.full(self.observation_space.shape, self.place), 0.0, False, False, {}


def test_zeros_follow_an_observation_and_actions_are_cut():
    env = Padded(Walk(2, 1), 4, 3)
    assert env.reset()[0].tolist() == [1, 1, 0, 0]
    observation, *_ = env.step(np.array([0.5, 100.0, np.nan], np.float32))
    assert observation.tolist() == [1.5, 1.5, 0, 0]
    assert observation.dtype == np.float64
    high = np.array([9.0, 9, 0, 0])
    assert env.observation_space == Box(-high, high, dtype=np.float64)
    assert env.action_space == box(3)


def test_tasks_share_the_largest_spaces():
    found = padded_spaces(
        {"a": (box(2, 3.0), box(1)), "b": (box(4, 2.0, np.float64), box(1)), "c": (box(2), box(1))}
    )
    high = np.array([3.0, 3, 2, 2])
    assert found.observation_space == Box(-high, high, dtype=np.float64)
    assert found.action_space == box(1)
    assert found.observation_sizes == (2, 4, 2)
    assert found.action_sizes == ()


def test_tasks_with_equal_spaces_keep_them():
    image = Box(0, 255, (3, 4, 4), np.uint8)
    found = padded_spaces({"a": (image, box(2)), "b": (image, box(2))})
    assert found.observation_space == image
    assert found.observation_sizes == found.action_sizes == ()


def test_masks_say_what_is_a_tasks_own():
    spec = ToyReach(2).spec
    assert spec.observation_mask_TD.tolist() == [[True, True]] * 2
    assert spec.action_mask_TA.tolist() == [[True, True]] * 2
    padded = check_spec(spec._replace(observation_sizes=(1, 2), action_sizes=(2, 1)))
    assert padded.observation_mask_TD.tolist() == [[True, False], [True, True]]
    assert padded.action_mask_TA.tolist() == [[True, True], [True, False]]


def test_benchmark_with_another_max_return_is_refused():
    spec = ToyReach(2).spec._replace(max_return=10.0)
    check_same(spec, spec._replace(horizon=2 * spec.horizon, max_return=20.0))
    for changed in (20.0, None):
        with pytest.raises(ConfigurationError, match=f"{changed}"):
            check_same(spec, spec._replace(max_return=changed))
    with pytest.raises(ConfigurationError, match="max_return"):
        check_same(spec, spec._replace(horizon=2, max_return=None))


@pytest.mark.parametrize("name", ["observation_sizes", "action_sizes"])
def test_a_benchmark_of_other_sizes_takes_no_place_of_another(name):
    spec = ToyReach(2).spec
    check_same(spec, spec._replace(**{name: (2, 2)}))
    with pytest.raises(ConfigurationError, match=f"{name}"):
        check_same(spec, spec._replace(**{name: (1, 2)}))
