"""Training episodes that end some steps after their first success."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box

from mtrl_lightning import read_metrics, train
from mtrl_lightning.algorithms import PPO
from mtrl_lightning.envs import MetaWorld, ToyReach, VectorEnv
from mtrl_lightning.envs.vector.success_limit import SuccessLimit
from mtrl_lightning.rollout import EndAfterSuccess

HORIZON = 12


class Scheduled(gym.Env):
    """It succeeds in given steps of an episode."""

    action_space = Box(-1.0, 1.0, (1,), np.float32)
    observation_space = Box(-np.inf, np.inf, (1,), np.float64)

    def __init__(self, *successes):
        self._successes = successes
        self.steps = 0

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
def test_an_episode_ends_so_many_steps_after_its_first_success(successes, num_steps, expected):
    env = SuccessLimit(Scheduled(*successes), num_steps)
    assert [length(env), length(env)] == [expected, expected], "and so does the next one"


def test_a_reset_before_the_end_forgets_the_success():
    env = SuccessLimit(Scheduled(2), 5)
    env.reset()
    for _ in range(4):
        env.step(np.zeros(1))
    assert length(env) == 7


@pytest.mark.usefixtures("few_goals")
def test_metaworld_episode_ends_after_its_experts_success():
    """The scripted expert of reach-v3; without the option the episode lasts 60 steps."""
    from metaworld.policies import SawyerReachV3Policy

    benchmark = MetaWorld(["reach"], horizon=60, num_goals=2)
    ends, firsts = [], []
    for after_success in (None, 4):
        envs = VectorEnv(benchmark, [0], seed=1, num_workers=0, after_success=after_success)
        observation_ED, _ = envs.reset()
        expert = SawyerReachV3Policy()
        successes = []
        while True:
            action_A = expert.get_action(observation_ED[0].copy()).clip(-1, 1)
            envs.send(action_A[None].astype(np.float32))
            result = envs.receive()
            observation_ED = result.observation_ED
            successes.append(bool(result.success_E[0]))
            if result.truncated_E[0]:
                break
        ends.append(len(successes))
        firsts.append(successes.index(True) + 1)
    assert firsts[0] == firsts[1] < 56
    assert ends == [60, firsts[1] + 4]


@pytest.mark.slow
def test_only_training_episodes_end_after_a_success(tmp_path):
    def metrics_of(after_success, name):
        run = train(
            ToyReach(2, horizon=40),
            partial(PPO, num_steps=80, num_minibatches=4),
            total_steps=16_000,
            seed=0,
            data={
                "envs_per_task": 5,
                "extras": [] if after_success is None else [EndAfterSuccess(after_success)],
            },
            evaluation={"every": 4_000, "num_episodes": 4},
            name=name,
            root=tmp_path,
        )
        curves = read_metrics(run.folder)
        return {
            name: curves[name][1][-1] for name in ("eval/success", "eval/return", "rollout/length")
        }

    limited, whole = metrics_of(10, "limited"), metrics_of(None, "whole")
    assert limited["rollout/length"] < 30.0 < whole["rollout/length"] == 40.0
    assert limited["eval/success"] == whole["eval/success"] == 1.0
    # each step has a reward of at most 1, so that a shorter test episode has a smaller return
    assert limited["eval/return"] > 30.0
