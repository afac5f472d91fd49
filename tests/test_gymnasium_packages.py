"""Environments of packages that register themselves in Gymnasium."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.wrappers import FrameStackObservation, TimeLimit, TransformObservation

from mtrl_lightning import PPO, train
from mtrl_lightning.envs import GymnasiumTasks
from mtrl_lightning.networks import MLP, PixelEncoder, Standardize

NETWORK = partial(MLP, width=32, depth=1)
SHORT = {"num_epochs": 1, "num_minibatches": 1}
MINIGRID = "mtrl_lightning.envs.benchmarks.registered:MiniGridView-v0"


def test_minigrid_is_learned_from_the_agents_view(tmp_path):
    pytest.importorskip("minigrid")
    name = "MiniGrid-DoorKey-5x5-v0"
    benchmark = GymnasiumTasks({"door": {"id": MINIGRID, "kwargs": {"name": name}}}, horizon=288)
    ours, theirs = benchmark.make_env(0, "eval", 0), gym.make(name)
    observation_D, _ = ours.reset(seed=3)
    observation, _ = theirs.reset(seed=3)
    for action in (0, 2, 1, 2):
        np.testing.assert_array_equal(observation_D, observation["image"].ravel())
        observation_D, *_ = ours.step(np.eye(7)[action])
        observation, *_ = theirs.step(action)
    algorithm = partial(PPO, actor=NETWORK, critic=NETWORK, encoder=Standardize, num_steps=5)
    run = train(benchmark, partial(algorithm, **SHORT), total_steps=10, root=tmp_path)
    seen = run.algorithm.encoder
    assert (seen.count, seen.mean_D.max() > 1) == (2, True)


def atari(name):
    """Return the last four grey screens of a game, at half their size."""
    env = gym.make(f"ale_py:ALE/{name}-v5", obs_type="grayscale")
    env = TransformObservation(env, lambda screen: screen[::2, ::2], Box(0, 255, (105, 80), "u1"))
    return FrameStackObservation(TimeLimit(env, 200), 4)


@pytest.mark.slow
def test_three_atari_games_are_trained_for_2000_steps(tmp_path):
    pytest.importorskip("ale_py")
    games = ("Pong", "Breakout", "Freeway")
    benchmark = GymnasiumTasks({name: partial(atari, name) for name in games})
    assert benchmark.spec.observation_space.shape == (1, 4, 105, 80)
    assert benchmark.spec.action_sizes == (6, 4, 3)
    encoder = partial(PixelEncoder, channels=8, strides=(4, 4))
    algorithm = partial(PPO, actor=NETWORK, critic=NETWORK, encoder=encoder, num_steps=100)
    run = train(
        benchmark,
        partial(algorithm, **SHORT),
        total_steps=2_000,
        root=tmp_path,
        evaluation={"num_episodes": 1},
        num_workers=0,
    )
    assert all(f"eval/return/{game}" in run.evaluation for game in games)
