"""Noise that persists: its steps by hand, and which actions have it."""

import numpy as np
import pytest
from gymnasium.spaces import Box
from lightning.pytorch import Trainer

from mtrl_lightning.algorithms import PPO
from mtrl_lightning.data import RolloutData
from mtrl_lightning.envs import ToyReach, VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.rollout import Collector, CorrelatedNoise
from tests.helpers.fakes import Constant, Recorder
from tests.helpers.fitting import QUIET, SMALL

SPEC = ToyReach(2).spec
TASK_E = np.array([0, 0, 1, 1])


def begun(noise, seed=0):
    noise.begin(SPEC, TASK_E)
    noise.seed(seed)
    return noise


def test_a_step_by_hand_and_a_new_episode():
    noise = begun(CorrelatedNoise(0.6), seed=3)
    generator = np.random.default_rng(3)
    first, second, third = (generator.standard_normal((4, 2)) for _ in range(3))
    np.testing.assert_allclose(noise.noise(), first, rtol=1e-6)
    last = 0.6 * first + 0.8 * second
    np.testing.assert_allclose(noise.noise(), last, rtol=1e-6)
    for env in (1, 3):
        noise.start_episodes(np.arange(4) == env, {}, None)
    expected = 0.6 * last + 0.8 * third
    expected[[1, 3]] = third[[1, 3]]
    np.testing.assert_allclose(noise.noise(), expected, rtol=1e-6)


def test_a_collector_explores_with_it_and_exploits_without():
    envs = VectorEnv(ToyReach(2, horizon=3), TASK_E.tolist(), num_workers=0)
    collector = Collector(envs, Recorder(), extras=[CorrelatedNoise(0.5)])

    def recorded(**options):
        collector.policy.noise.clear()
        collector.sample(**options)
        return np.array(collector.policy.noise)

    def are_first():
        return collector.extras[0].state_dict()["per_env"]["is_first"]

    first = recorded(num_steps=8, seed=4)
    assert (first == recorded(num_steps=8, seed=4)).all()
    assert (first != recorded(num_steps=8, seed=5)).all()
    assert not any(are_first())
    collector.sample(num_steps=4)
    assert all(are_first()), "the third step has ended the episodes"
    collector.sample(num_steps=4)
    collector.reset()
    assert all(are_first())
    assert recorded(num_steps=4, mode="exploit").tolist() == [None]


def test_policy_of_other_sizes_gets_its_own_noise():
    own = SPEC._replace(
        task_names=SPEC.task_names[::-1],
        action_space=Box(-1.0, 1.0, (3,), np.float32),
        action_sizes=(2, 2),
    )
    policy = Recorder(Constant((0.0, 0.0, 0.0)), own)
    envs = VectorEnv(ToyReach(2), [0, 1], num_workers=0)
    collector = Collector(envs, policy, extras=[CorrelatedNoise()])
    collector.extras[0].seed(1)
    transitions, _ = collector.step("explore")
    assert policy.tasks[0].tolist() == [1, 0]
    assert transitions.task_E.tolist() == [0, 1], "the benchmark's indices are stored"
    expected_EA = np.random.default_rng(1).standard_normal((2, 2)).astype(np.float32)
    assert np.array_equal(policy.noise[0], np.pad(expected_EA, ((0, 0), (0, 1))))


def test_a_new_rank_keeps_its_generator():
    first, second = begun(CorrelatedNoise(0.8)), begun(CorrelatedNoise(0.8), seed=5)
    first.noise()
    generator = second.state_dict()["generator"]
    moved = first.state_dict()["per_env"]
    second.load_state_dict({"per_env": moved})
    assert second.state_dict() == {"per_env": moved, "generator": generator}


def test_a_limit_of_the_kl_divergence_is_refused(tmp_path):
    data = RolloutData(ToyReach(2), 100, num_workers=0, extras=[CorrelatedNoise()])
    model = PPO(data.spec, max_kl=0.05, **SMALL)
    with pytest.raises(ConfigurationError, match="max_kl"):
        Trainer(**QUIET, default_root_dir=tmp_path).fit(model, data)
