"""Discrete actions: losses against loops, tasks of different sizes."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mtrl_lightning import BehaviourCloning
from mtrl_lightning.algorithms.losses import Categorical
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.updates.weighting import FixedTemperature
from tests.helpers.algorithms import (
    make_batch,
    make_distral,
    make_ppo,
    make_sac,
    make_td3,
)
from tests.helpers.specs import discrete_spec

ALPHA = 0.3


def discrete_batch(spec, rows=6):
    """Random transitions, with actions that are the tasks' own."""
    batch = make_batch(spec, rows)
    score_RnA = batch.action_RnA.masked_fill(
        ~torch.from_numpy(spec.action_mask_TA)[batch.task_Rn], -2
    )
    parts = [F.one_hot(p.argmax(-1), p.shape[-1]) for p in score_RnA.split(spec.action_choices, -1)]
    return batch._replace(action_RnA=torch.cat(parts, -1).float())


@pytest.mark.parametrize(
    "spec", [discrete_spec((2, 3)), discrete_spec((5, 5), (3, 2))], ids=["two sizes", "components"]
)
def test_sac_losses_are_sums_over_the_actions(spec):
    make = partial(FixedTemperature, value=ALPHA)
    algorithm = make_sac(spec, temperature=make, discount=0.9)
    batch = discrete_batch(spec)
    noise_RnA = torch.randn_like(batch.action_RnA)
    critic_loss_R, _ = algorithm.critic_loss(batch, algorithm.critic_target(batch, noise_RnA))
    actor_loss_R, log_prob_Rn = algorithm.actor_loss(batch, noise_RnA)
    for r, task in enumerate(spec.train_tasks):
        own_A = torch.from_numpy(spec.action_mask_TA[task])
        task_1 = torch.tensor([task])
        values = partial(own_values, own_A=own_A, task_1=task_1)
        errors, costs, log_probs = [], [], []
        for i in range(batch.reward_Rn.shape[1]):
            # y = r + discount (1 - terminated) sum_a pi(a|s') [min_i Q_i'(s', a) - alpha log pi]
            next_D = batch.next_observation_RnD[r, i]
            log_pi_A = own_log_probs(algorithm, next_D, own_A, task_1)
            next_q_A = values(algorithm.target_critic, next_D).amin(0)
            next_value = (log_pi_A.exp() * (next_q_A - ALPHA * log_pi_A)).sum()
            discount = 0.0 if batch.terminated_Rn[r, i] else 0.9
            target = batch.reward_Rn[r, i] + discount * next_value
            q_QA = values(algorithm.critic, batch.observation_RnD[r, i])
            is_taken_A = batch.action_RnA[r, i][own_A].bool()
            errors.append((q_QA[:, is_taken_A].sum(1) - target).square().sum())
            # J_pi = sum_a pi(a|s) [alpha log pi - min_i Q_i]
            log_pi_A = own_log_probs(algorithm, batch.observation_RnD[r, i], own_A, task_1)
            costs.append((log_pi_A.exp() * (ALPHA * log_pi_A - q_QA.amin(0))).sum())
            log_probs.append((log_pi_A.exp() * log_pi_A).sum())
        torch.testing.assert_close(critic_loss_R[r], torch.stack(errors).mean())
        torch.testing.assert_close(actor_loss_R[r], torch.stack(costs).mean())
        torch.testing.assert_close(log_prob_Rn[r], torch.stack(log_probs))


def own_values(critic, observation_D, own_A, task_1):
    return critic(observation_D[None], task_1)[:, 0, own_A]


def own_log_probs(algorithm, observation_D, own_A, task_1):
    """Log probabilities of the task's own choices, one component after the other."""
    logits_A = algorithm.actor(observation_D[None], task_1)[0]
    parts = zip(
        logits_A.split(algorithm.spec.action_choices),
        own_A.split(algorithm.spec.action_choices),
        strict=True,
    )
    return torch.cat([logits[is_own].log_softmax(0) for logits, is_own in parts])


def test_target_entropy_is_of_the_tasks_own_number_of_actions():
    sizes = 0.98 * np.log([2, 3])
    np.testing.assert_allclose(make_sac(discrete_spec((2, 3))).target_entropy_T, sizes, rtol=1e-6)
    several = make_sac(discrete_spec((5, 5), (3, 2))).target_entropy_T
    np.testing.assert_allclose(several, [0.98 * np.log(6)] * 2, rtol=1e-6)


@pytest.mark.parametrize("make", [make_sac, make_ppo, make_distral, BehaviourCloning])
def test_padded_choices_are_never_taken(make):
    spec = discrete_spec((2, 3))
    algorithm = make(spec)
    observation_ED = np.zeros((200, 4), np.float32)
    task_E = np.zeros(200, np.int64)
    for mode in ("explore", "random", "exploit"):
        output = algorithm.act(observation_ED, task_E, mode)
        action_EA = output[0] if isinstance(output, tuple) else output
        assert (action_EA.sum(1) == 1).all() and not action_EA[:, 2].any()
        if mode == "explore":
            assert 0 < action_EA[:, 0].sum() < 200
        if mode == "random":
            assert 70 < action_EA[:, 0].sum() < 130


def test_behaviour_cloning_minimizes_the_cross_entropy():
    spec = discrete_spec((3, 3))
    algorithm = BehaviourCloning(spec)
    batch = discrete_batch(spec)
    loss_R, _ = algorithm.actor_loss(batch)
    logits_RnA = algorithm.actor(batch.observation_RnD, batch.task_Rn)
    expected_Rn = F.cross_entropy(
        logits_RnA.flatten(0, 1), batch.action_RnA.argmax(-1).flatten(), reduction="none"
    ).view(loss_R.shape[0], -1)
    torch.testing.assert_close(loss_R, expected_Rn.mean(1))


def test_methods_for_continuous_actions_refuse():
    with pytest.raises(ConfigurationError, match="SAC, PPO"):
        make_td3(discrete_spec((2, 3)))
    with pytest.raises(ConfigurationError, match="Scalar"):
        make_sac(discrete_spec((2, 3)), value=Categorical)
