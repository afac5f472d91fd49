"""Statistics per task: beside a naive loop, frozen and resumed."""

from __future__ import annotations

import numpy as np
import torch

from mtrl_lightning.algorithms import NormalizeReward
from mtrl_lightning.transitions import Transitions
from mtrl_lightning.updates.normalization import Moments
from tests.helpers.algorithms import make_batch, make_spec

NUM_STEPS = 60
TASK_E = np.array([0, 0, 1, 2])
"""The tasks of four environments."""
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def step(observation_ED, reward_E=None, envs=None, ended=(), task_E=TASK_E):
    """Return the transitions of one vector step; ``envs`` are those that were stepped."""
    observation_ED = np.asarray(observation_ED, np.float32)
    num_envs = len(observation_ED)
    env_E = np.arange(num_envs) if envs is None else np.array(envs)
    reward_E = np.zeros(num_envs) if reward_E is None else np.asarray(reward_E, np.float64)
    is_ended_E = np.isin(env_E, ended)
    task_E = np.asarray(task_E)[env_E]
    never_E = np.zeros(num_envs, np.bool_)
    return Transitions(
        observation_ED,
        np.zeros((num_envs, 2), np.float32),
        reward_E,
        observation_ED + 1,
        is_ended_E & (env_E % 2 == 0),
        is_ended_E & (env_E % 2 == 1),
        task_E,
        env_E,
        {"never": never_E},
    )


def random_steps(seed=0, num_steps=NUM_STEPS):
    """Return observations and rewards of vector steps, with pauses and ends of episodes."""
    generator = np.random.default_rng(seed)
    scale_E1 = np.array([[1.0], [1.0], [100.0], [0.01]])
    for _ in range(num_steps):
        present = np.flatnonzero(generator.random(len(TASK_E)) < 0.9)
        observation_ED = 5 + scale_E1 * generator.normal(size=(len(TASK_E), 4))
        reward_E = 3 * scale_E1[:, 0] * generator.normal(size=len(TASK_E))
        ended = np.flatnonzero(generator.random(len(TASK_E)) < 0.2)
        yield step(observation_ED[present], reward_E[present], present, ended)


def naive_moments(rows_per_task):
    rows = [np.array(rows, np.float64) for rows in rows_per_task]
    return [r.mean(0) for r in rows], [r.var(0) for r in rows]


def naive_returns(steps, discount):
    """Return every task's discounted returns, one step and one environment after another."""
    returns = [[] for _ in range(3)]
    running = dict.fromkeys(range(len(TASK_E)), 0.0)
    for transitions in steps:
        rows = zip(
            transitions.env_E.tolist(),
            transitions.task_E.tolist(),
            transitions.reward_E.tolist(),
            (transitions.terminated_E | transitions.truncated_E).tolist(),
            strict=True,
        )
        for env, task, reward, is_ended in rows:
            running[env] = discount * running[env] + reward
            returns[task].append(running[env])
            if is_ended:
                running[env] = 0.0
    return returns


def test_moments_equal_those_of_all_rows_together():
    moments = Moments(3)
    rows = [[] for _ in range(3)]
    for transitions in random_steps():
        moments.add(transitions.reward_E, transitions.task_E)
        for reward, task in zip(transitions.reward_E, transitions.task_E, strict=True):
            rows[task].append(reward)
    means, variances = naive_moments(rows)
    np.testing.assert_allclose(moments.mean_T.numpy(), means, **EXACT)
    np.testing.assert_allclose(moments.variance_T.numpy(), variances, rtol=1e-9, atol=1e-12)


def test_rewards_are_divided_by_the_std_of_returns():
    discount = 0.9
    scale = NormalizeReward(make_spec(), discount=discount, clip=1.5)
    for transitions in random_steps():
        scale.observe(transitions)
    returns = naive_returns(random_steps(), discount)
    _, variances = naive_moments(returns)
    np.testing.assert_allclose(scale.moments.variance_T.numpy(), variances, rtol=1e-9)
    batch = make_batch(make_spec())
    found_Rn = scale(batch).reward_Rn
    wanted_Rn = batch.reward_Rn / torch.tensor(variances)[batch.task_Rn].sqrt()
    np.testing.assert_allclose(found_Rn, wanted_Rn.clamp(-1.5, 1.5), rtol=1e-4)
    assert found_Rn.abs().max() == 1.5 and found_Rn[1].abs().max() < 0.1


def test_the_return_of_a_rebuilt_environment_restarts_at_zero():
    scale = NormalizeReward(make_spec(), discount=0.5)
    scale.observe(step(np.zeros((2, 4)), [8.0, 4.0]))
    scale.drop_episodes(np.array([0, 3]))
    scale.observe(step(np.zeros((2, 4)), [1.0, 1.0]))
    assert scale.get_extra_state()["per_env"]["returns"] == [1.0, 3.0]


def test_restored_statistics_continue_within_an_episode():
    whole, first, second = (NormalizeReward(make_spec()) for _ in range(3))
    steps = list(random_steps())
    for transitions in steps:
        whole.observe(transitions)
    for transitions in steps[:20]:
        first.observe(transitions)
    state = first.state_dict()
    first.observe(steps[20])  # a saved state does not move
    second.load_state_dict(state)
    for transitions in steps[20:]:
        second.observe(transitions)
    found, wanted = second.get_extra_state(), whole.get_extra_state()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.array_equal(found[name], value) if name != "per_env" else found[name] == value
    for one, other in zip(second.buffers(), whole.buffers(), strict=True):
        assert torch.equal(one, other)
