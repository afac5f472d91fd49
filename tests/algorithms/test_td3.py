"""TD3's update against plain PyTorch, and its exploration.

What it shares with SAC is tested with SAC; the matrix has both.
"""

from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import Scalar
from mtrl_lightning.algorithms.td3 import spread_over_environments
from mtrl_lightning.networks import MLP
from tests.helpers import plain
from tests.helpers.algorithms import make_batch, make_td3

STD, CLIP = 0.2, 0.15


def close(value):
    return pytest.approx(value, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("reduction", ["min", "mean"])
def test_update_is_that_of_plain_pytorch(reduction):
    value = partial(Scalar, reduction=reduction)
    actor = partial(MLP, width=8, depth=1)  # without a bound of its outputs
    options = {"target_std": STD, "target_clip": CLIP, "value": value, "actor": actor}
    td3, parts = plain.prepared(make_td3, encoder_tau=0.5, **options)
    with torch.no_grad():
        for target in (td3.target_actor, parts["target_actor"]):
            target.head.bias.copy_(torch.tensor([0.1, 1.8]))
    actor, critic, encoder = (parts[name] for name in ("actor", "critic", "encoder"))
    batch = make_batch(td3.spec)
    task_Rn = batch.task_Rn
    noise_RnA = (STD * plain.noises(batch.action_RnA)[0]).clip(-CLIP, CLIP)
    assert (noise_RnA.abs() < CLIP).any() and (noise_RnA.abs() == CLIP).any()
    td3.training_step(batch, 0)

    with torch.no_grad():
        z_RnZ = parts["target_encoder"](batch.next_observation_RnD, task_Rn)
        next_action_RnA = parts["target_actor"](z_RnZ, task_Rn).tanh() + noise_RnA
        assert (next_action_RnA.abs() > 1).any()
        action_RnA = next_action_RnA.clip(-1, 1)
        next_q_QRn = plain.values(parts["target_critic"].members, z_RnZ, action_RnA, task_Rn)
        next_q_Rn = next_q_QRn.amin(0) if reduction == "min" else next_q_QRn.mean(0)
        target_Rn = batch.reward_Rn + plain.DISCOUNT * ~batch.terminated_Rn * next_q_Rn
    z_RnZ = encoder(batch.observation_RnD, task_Rn)
    q_QRn = plain.values(critic.members, z_RnZ, batch.action_RnA, task_Rn)
    critic_loss = (q_QRn - target_Rn).square().sum(0).mean()
    plain.descend(critic_loss, critic, encoder)
    # the actor follows the first critic
    z_RnZ = encoder(batch.observation_RnD, task_Rn).detach()
    action_RnA = actor(z_RnZ, task_Rn).tanh()
    actor_loss = -plain.values(critic.members[:1], z_RnZ, action_RnA, task_Rn).mean()
    plain.descend(actor_loss, actor)
    plain.move_targets(parts, encoder_tau=0.5)
    plain.assert_same_weights(td3, parts)
    metrics = td3.drain_metrics()
    assert metrics["train/critic_loss"] == close(critic_loss.item())
    assert metrics["train/actor_loss"] == close(actor_loss.item())


@pytest.mark.parametrize("acting", [[0, 0, 1, 1], [0, 1, 1, 1]])
def test_deviations_are_spread_over_environments_of_all_ranks(acting):
    found = []
    for envs in ([0, 1, 4, 5], [2, 3, 6, 7]):
        td3 = make_td3(exploration_std_min=0.0, exploration_std_max=0.3)
        td3.begin_exploring([0] * 4 + [1] * 4, envs)
        policy = td3.policy(torch.ones(4, 4), torch.tensor(acting))
        found.append(policy.log_std_BA[:, 0].exp().tolist())
    assert found == [close([0.0, 0.1, 0.0, 0.1]), close([0.2, 0.3, 0.2, 0.3])]
    # in any order; one alone has the mean
    std_E = spread_over_environments(torch.tensor([0, 1, 0, 2, 1, 0]), 0.1, 0.5)
    assert std_E.tolist() == close([0.1, 0.1, 0.3, 0.3, 0.5, 0.5])


def test_exploring_adds_the_noise_of_each_environment():
    td3 = make_td3(exploration_std_min=0.0, exploration_std_max=2.0)
    observation_ED, task_E = np.ones((3, 4), np.float32), np.zeros(3, np.int64)
    with torch.no_grad():
        output_EA = td3.actor(torch.from_numpy(observation_ED), torch.from_numpy(task_E))
    mode_EA = td3.act(observation_ED, task_E, "exploit")
    np.testing.assert_allclose(mode_EA, output_EA.tanh(), rtol=1e-6)
    noise_EA = np.array([[0.5, -1.0], [0.3, -0.2], [3.0, 0.1]], np.float32)
    found_EA = td3.act(observation_ED, task_E, "explore", noise_EA)
    wanted_EA = mode_EA + np.array([[0.0], [1.0], [2.0]]) * noise_EA
    np.testing.assert_allclose(found_EA, wanted_EA.clip(-1, 1), rtol=1e-5, atol=1e-6)
    assert found_EA[2, 0] == 1
