"""Training episodes that end some steps after their first success."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box

from mtrl_lightning import read_metrics, train
from mtrl_lightning.algorithms import PPO
from mtrl_lightning.envs import Benchmark
from mtrl_lightning.envs.vector.success_limit import SuccessLimit
from mtrl_lightning.rollout import EndAfterSuccess
from mtrl_lightning.spec import EnvSpec

HORIZON = 12


class Scheduled(gym.Env):
    """It succeeds in given steps of an episode."""

    action_space = Box(-1.0, 1.0, (1,), np.float32)
    observation_space = Box(-np.inf, np.inf, (1,), np.float64)

    def __init__(self, *successes):
        self._successes = successes

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1), {}

    def step(self, action):
        self.steps += 1
        info = {"success": self.steps in self._successes}
        return np.array([float(self.steps)]), 1.0, False, self.steps == HORIZON, info


def length(env):
    env.reset()
    for step in range(1, HORIZON + 1):
        _, _, terminated, truncated, _ = env.step(np.zeros(1))
        assert not terminated, "the last state's value is bootstrapped"
        if truncated:
            return step
    raise AssertionError("it has no end")


@pytest.mark.parametrize(
    ("successes", "num_steps", "expected"),
    [
        ((), 3, HORIZON),
        ((4,), 0, 4),
        ((4,), 3, 7),
        ((4, 6, 7), 3, 7),
        ((4, 5, 6, 7, 8), 3, 7),
        ((1,), 2, 3),
        ((10,), 3, HORIZON),
        ((HORIZON,), 0, HORIZON),
    ],
)
def test_episode_ends_some_steps_after_its_first_success(successes, num_steps, expected):
    env = SuccessLimit(Scheduled(*successes), num_steps)
    assert [length(env), length(env)] == [expected, expected], "and so does the next one"
    env.reset()
    for _ in range(expected - 1):
        env.step(np.zeros(1))
    assert length(env) == expected, "a reset before the end forgets the success"


class SucceedsAtOnce(Benchmark):
    spaces = Scheduled.observation_space, Scheduled.action_space
    spec = EnvSpec(("a",), *spaces, HORIZON, True, (0,), {"benchmark": "scheduled"})

    def make_env(self, task, split, seed):
        return Scheduled(1)


def test_only_training_episodes_end_after_a_success(tmp_path):
    run = train(
        SucceedsAtOnce(),
        partial(PPO, num_steps=20, num_minibatches=2),
        total_steps=40,
        data={"num_workers": 0, "extras": [EndAfterSuccess(3)]},
        evaluation={"every": 40, "num_episodes": 1, "num_workers": 0},
        root=tmp_path,
    )
    last = {name: values[-1] for name, (_, values) in read_metrics(run.folder).items()}
    assert last["rollout/length"] == 4
    assert last["eval/return"] == HORIZON, "the reward of each step is 1"
