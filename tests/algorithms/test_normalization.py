"""Statistics per task: beside a naive loop, frozen and resumed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import NormalizeObservation, NormalizeReward
from mtrl_lightning.transitions import Transitions
from mtrl_lightning.updates.normalization import RunningMoments
from tests.helpers.algorithms import make_batch, make_sac, make_spec

NUM_STEPS = 60
TASK_E = np.array([0, 0, 1, 2])
"""The tasks of four environments."""
EXACT = {"rtol": 1e-12, "atol": 1e-12}
SINGLE = {"rtol": 1e-5, "atol": 1e-5}


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
    moments = RunningMoments(3, (4,))
    rows = [[] for _ in range(3)]
    for transitions in random_steps():
        moments.add(transitions.observation_ED, transitions.task_E)
        for row_D, task in zip(transitions.observation_ED, transitions.task_E, strict=True):
            rows[task].append(row_D)
    means, variances = naive_moments(rows)
    np.testing.assert_allclose(moments.mean_TD.numpy(), means, **EXACT)
    np.testing.assert_allclose(moments.variance_TD.numpy(), variances, rtol=1e-9, atol=1e-12)


def test_observations_are_normalized_by_their_task_in_acting_and_in_batches():
    transform = NormalizeObservation(make_spec(3, obs_dim=1), clip=2.0)
    batch_BD = torch.tensor([[4.0], [4.0], [9.0]])
    task_B = torch.tensor([0, 1, 0])
    assert transform.observation(batch_BD, task_B).tolist() == [[2], [2], [2]], "clipped alone"
    transform.observe(step([[1.0], [3.0], [10.0], [0.0]]))
    transform.observe(step([[5.0], [7.0], [2.0], [0.0]]))
    # task 0: mean 4, variance 5; task 1: mean 6, variance 16; task 2: a constant 0
    wanted = [[0.0], [-0.5], [2.0]]
    assert transform.observation(batch_BD, task_B).tolist() == wanted
    assert transform.observation(torch.zeros(1, 1), torch.tensor([2])).tolist() == [[0]]
    assert transform.observation(torch.tensor([[6.0]]), torch.tensor([0])).item() == pytest.approx(
        2 / 5**0.5
    )


def test_the_replay_holds_raw_values_so_that_old_rows_have_the_scale_of_new_ones():
    sac = make_sac(
        transforms=[NormalizeObservation], reward_scale=partial(NormalizeReward, discount=0.99)
    )
    batch = make_batch(sac.spec)
    for observed in (2, NUM_STEPS):
        for transitions in random_steps(num_steps=observed):
            sac.transforms.observe(transitions)
        found = sac.transforms(batch)
        scale, normalize = sac.transforms
        mean_RnD = normalize.moments.mean_TD[batch.task_Rn]
        std_RnD = (normalize.moments.variance_TD[batch.task_Rn] + 1e-8).sqrt()
        std_Rn = (scale.moments.variance_TD[batch.task_Rn] + 1e-8).sqrt()
        for name in ("observation_RnD", "next_observation_RnD"):
            wanted_RnD = ((getattr(batch, name) - mean_RnD) / std_RnD).clamp(-10, 10).float()
            np.testing.assert_allclose(getattr(found, name), wanted_RnD, **SINGLE)
        np.testing.assert_allclose(
            found.reward_Rn, (batch.reward_Rn / std_Rn).clamp(-10, 10), **SINGLE
        )
    observation_ED = 5 + np.random.default_rng(1).normal(size=(3, 4))
    task_E = np.arange(3)
    given = torch.as_tensor(observation_ED, dtype=torch.float32)
    plain = make_sac()
    plain.load_state_dict(sac.state_dict(), strict=False)
    normalized_ED = sac.transforms[1].observation(given, torch.arange(3)).numpy()
    before = sac.transforms[1].moments.state_dict()
    acted = sac.act(observation_ED, task_E, "exploit")
    assert np.array_equal(acted, plain.act(normalized_ED, task_E, "exploit"))
    assert not np.allclose(acted, plain.act(observation_ED, task_E, "exploit"))
    after = sac.transforms[1].moments.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "acting changes nothing"


def test_padding_stays_zero_and_a_task_that_is_not_trained_has_the_statistics_of_its_size():
    spec = make_spec(4, obs_dim=2, train_tasks=(0, 2, 3))._replace(observation_sizes=(2, 2, 2, 1))
    transform = NormalizeObservation(spec)
    task_E = [0, 2, 3]
    for first, second, third in ((0.0, 10.0, 5.0), (2.0, 14.0, 7.0)):
        rows = [[first, 1.0], [second, 1.0], [third, 0.0]]
        transform.observe(step(rows, envs=[0, 1, 2], task_E=task_E))
    observations_BD = torch.tensor([[6.5, 1.0], [7.0, 0.0]])
    found_BD = transform.observation(observations_BD, torch.tensor([1, 3]))
    # tasks 0 and 2 have the means 1 and 12 and the variances 1 and 4: together 6.5, 2.5 + 5.5 ** 2
    assert found_BD.tolist() == [[0, 0], [1, 0]]
    assert transform.std_TD[1, 0].item() == pytest.approx((2.5 + 5.5**2) ** 0.5)


def test_statistics_may_be_frozen_after_some_steps():
    free, frozen = (
        NormalizeObservation(make_spec()),
        NormalizeObservation(make_spec(), freeze_after=12),
    )
    steps = [step(np.full((4, 4), number)) for number in range(5)]
    for number, transitions in enumerate(steps):
        free.observe(transitions)
        frozen.observe(transitions)
        assert torch.equal(free.mean_TD, frozen.mean_TD) == (number < 3)
    other = NormalizeObservation(make_spec(), freeze_after=12)
    other.load_state_dict(frozen.state_dict())
    other.observe(steps[-1])
    assert torch.equal(other.mean_TD, frozen.mean_TD) and other.moments.count_T.sum() == 12


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    discount = 0.9
    scale = NormalizeReward(make_spec(), discount=discount, clip=1.5)
    for transitions in random_steps():
        scale.observe(transitions)
    returns = naive_returns(random_steps(), discount)
    _, variances = naive_moments(returns)
    np.testing.assert_allclose(scale.moments.variance_TD.numpy(), variances, rtol=1e-9)
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


@pytest.mark.parametrize("make", [NormalizeObservation, NormalizeReward])
def test_restored_statistics_continue_in_the_middle_of_an_episode(make):
    whole, first, second = (make(make_spec()) for _ in range(3))
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
