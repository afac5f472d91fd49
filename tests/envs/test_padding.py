"""Tasks of different sizes in one benchmark: zeros follow observations, and actions are cut."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning.envs import ToyReach
from mtrl_lightning.envs.benchmarks.benchmark import check_spec
from mtrl_lightning.envs.benchmarks.padding import pad_to_spec, padded_spaces
from mtrl_lightning.spec import pad_to
from tests.helpers.properties import given, st

SIZES = st.integers(1, 5)
TASKS = st.tuples(
    SIZES, SIZES, st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([np.float32, np.float64])
)
"""A task's sizes of observations and actions, and the bound and type of its observations."""


class Walk(gym.Env):
    """Each number of the observation is the place, which the sum of an action moves."""

    def __init__(self, size, action_size, bound, dtype):
        self.observation_space = Box(-bound, bound, (size,), dtype)
        self.action_space = Box(-1.0, 1.0, (action_size,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.full_like(self.observation_space.low, 0.5), {}

    def step(self, action):
        assert action.shape == self.action_space.shape
        place = 0.5 - float(action.sum())
        return np.full_like(self.observation_space.low, place), 0.0, False, False, {}


@given(st.lists(TASKS, min_size=1, max_size=4))
def test_tasks_share_the_largest_spaces(tasks):
    envs = [Walk(*task) for task in tasks]
    sizes, action_sizes, _, dtypes = zip(*tasks, strict=True)
    spaces = {f"{i}": (env.observation_space, env.action_space) for i, env in enumerate(envs)}
    shared = padded_spaces(spaces)
    dtype = np.result_type(*dtypes)
    high = [max(bound for size, _, bound, _ in tasks if size > i) for i in range(max(sizes))]
    high = np.array(high, dtype)
    assert shared.observation_space == Box(-high, high, dtype=dtype.type)
    assert shared.action_space == Box(-1.0, 1.0, (max(action_sizes),), np.float32)
    assert shared.observation_sizes == (sizes if len(set(sizes)) > 1 else ())
    assert shared.action_sizes == (action_sizes if len(set(action_sizes)) > 1 else ())

    spec = check_spec(ToyReach(len(tasks)).spec._replace(**shared._asdict()))
    is_own = np.arange(max(sizes)) < np.array(sizes)[:, None]
    assert np.array_equal(spec.observation_mask_TD, is_own)
    is_own_action = np.arange(max(action_sizes)) < np.array(action_sizes)[:, None]
    assert np.array_equal(spec.action_mask_TA, is_own_action)
    for task, env in enumerate(envs):
        padded = pad_to_spec(env, spec)
        bound_D = (is_own[task] * tasks[task][2]).astype(dtypes[task])
        assert padded.observation_space == Box(-bound_D, bound_D, dtype=dtypes[task])
        assert padded.action_space == spec.action_space
        action_A = np.where(is_own_action[task], 0.125, np.nan).astype(np.float32)
        observations = [padded.reset()[0], padded.step(action_A)[0]]
        places = (0.5, 0.5 - 0.125 * action_sizes[task])
        for observation, place in zip(observations, places, strict=True):
            assert observation.dtype == dtypes[task]
            assert observation.tolist() == (is_own[task] * place).tolist()
            assert observation.astype(dtype) in spec.observation_space


@given(st.lists(st.integers(1, 3), max_size=2), SIZES, SIZES)
def test_rows_are_padded_with_zeros_or_cut(axes, own, size):
    rows = np.random.default_rng(0).normal(size=(*axes, own)).astype(np.float32)
    found = pad_to(rows, (size,))
    kept = min(own, size)
    assert found.dtype == rows.dtype and found.shape == (*axes, size)
    assert np.array_equal(found[..., :kept], rows[..., :kept])
    assert not found[..., kept:].any()


def test_tasks_with_equal_images_keep_them():
    image, actions = Box(0, 255, (3, 4, 4), np.uint8), Box(-1.0, 1.0, (2,), np.float32)
    found = padded_spaces({"a": (image, actions), "b": (image, actions)})
    assert found == (image, actions, (), ())
    rows = np.ones((5, 3, 4, 4), np.uint8)
    assert pad_to(rows, (3, 4, 4)) is rows
